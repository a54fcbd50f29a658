"""DVID's sharded exports as Zarr, with no conversion."""

from pkgutil import extend_path

# `python3 -m zarr_dvid` in a checkout finds this folder before the installed package, which has the compiled core.
__path__ = extend_path(__path__, __name__)
from zarr_dvid.block import BlockInfo, block_info, decode_block, encode_block
from zarr_dvid.codec import DvidBlockCodec
from zarr_dvid.errors import (
    AmbiguousChunkError,
    BlockError,
    ExportError,
    ExportWarning,
    MissingFileError,
    ReadOnlyError,
    RecordError,
    ShardError,
    ShardIndexError,
    ZarrDvidError,
)
from zarr_dvid.filesystem import DvidFileSystem
from zarr_dvid.index_builder import IndexSummary, index_export
from zarr_dvid.store import DvidStore, open
from zarr_dvid.writer import write_export

__all__ = [
    "AmbiguousChunkError",
    "BlockError",
    "BlockInfo",
    "DvidBlockCodec",
    "DvidFileSystem",
    "DvidStore",
    "ExportError",
    "ExportWarning",
    "IndexSummary",
    "MissingFileError",
    "ReadOnlyError",
    "RecordError",
    "ShardError",
    "ShardIndexError",
    "ZarrDvidError",
    "block_info",
    "decode_block",
    "encode_block",
    "index_export",
    "open",
    "write_export",
]
