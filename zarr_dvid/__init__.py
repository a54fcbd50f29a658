"""DVID's sharded exports as Zarr, with no conversion."""

from zarr_dvid.block import BlockInfo, block_info, decode_block, encode_block

__all__ = ["BlockInfo", "block_info", "decode_block", "encode_block"]
