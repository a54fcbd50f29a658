"""The numcodecs codec `dvid_block`, for Zarr v2 arrays, kerchunk references, or by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy

from zarr_dvid.block import Voxels, decode_into, encode_block
from zarr_dvid.codec import CODEC_NAME, RECORD_ADVICE, Framing, check_configuration
from zarr_dvid.errors import ReadOnlyError
from zarr_dvid.voxels import Values, decode_payload


class DvidBlock(Codec):  # type: ignore[misc]
    """Decodes, and for bare blocks encodes, uint64 arrays (z, y, x) as DVID blocks.

    Args:
        values: "labels" (agglomerated) or "supervoxels"; by default what the framing has.
        framing: "block" or "record"; see `zarr_dvid.codec.DvidBlockCodec`.
    """

    codec_id = CODEC_NAME

    def __init__(self, *, values: Values | None = None, framing: Framing = "block") -> None:
        self.values, self.framing = check_configuration(values, framing)

    def encode(self, buf: Any) -> bytes:
        """Encodes a uint64 array of shape (z, y, x) as a bare block."""
        if self.framing == "record":
            raise ReadOnlyError(
                f"{CODEC_NAME} can't encode records, which hold what only an export knows", advice=RECORD_ADVICE
            )
        volume = np.asarray(buf)
        if volume.flags.f_contiguous and not volume.flags.c_contiguous:
            # Zarr would take what `decode` gives for Fortran order again, which a block's bytes do not tell.
            raise ValueError(f"{CODEC_NAME} holds arrays in C order (z, y, x); create the array with order='C'")
        return encode_block(volume)

    def decode(self, buf: Any, out: Any = None) -> Voxels:
        """Decodes a block or record to uint64 voxels of shape (z, y, x); into `out` where it is given."""
        data = ensure_contiguous_ndarray(buf).data
        if self.framing == "record":
            voxels = decode_payload(data, values=self.values, shape=(64, 64, 64))
        else:
            voxels = decode_into(data)
        return voxels if out is None else ndarray_copy(voxels, out)
