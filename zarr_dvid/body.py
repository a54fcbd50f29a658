"""Arrow's body compression: every buffer of a record batch in a frame of its own.

DVID wrote it for some hours of 2025-09-07, with zstd; converted shards may have it with LZ4 frames too.
"""

from __future__ import annotations

import struct

import pyarrow as pa
import zstandard

from zarr_dvid._native import core
from zarr_dvid.block import BytesLike
from zarr_dvid.errors import RecordError

NO_CODEC, _LZ4, _ZSTD = -1, 0, 1

# A record's block and label lists stay below this together; Arrow's int32 offsets keep a column below 2 GiB; and no batch
# of real records comes near such a ratio once it is large.
_MAX_BYTES_A_ROW = 8 << 20
_MAX_BYTES = 2 << 30
_MAX_RATIO = 1024


def decompress_body(header: core.Message, body: memoryview) -> tuple[bytes, list[tuple[int, int]]]:
    """Undoes a body's compression.

    Args:
        header: Of the message, with a codec.
        body: Its body.

    Returns:
        The body with its buffers laid out anew, and (offset, size) of each in bytes.

    Raises:
        RecordError: A buffer is broken, or claims more than records can hold.
    """
    by_rows = _MAX_BYTES_A_ROW * max(1, header.n_rows)
    limit = min(_MAX_BYTES, by_rows, _MAX_BYTES_A_ROW + _MAX_RATIO * body.nbytes)
    plain = bytearray()
    extents: list[tuple[int, int]] = []
    for offset, size in header.buffers:
        start = len(plain)
        if size:
            plain += decompress_buffer(header.codec, body[offset : offset + size], limit - start, offset)
        extents.append((start, len(plain) - start))
        plain += bytes(-len(plain) % 8)
    return bytes(plain), extents


def decompress_buffer(codec: int, buffer: memoryview, limit: int, offset_bytes: int) -> BytesLike:
    """Decompresses one buffer: an int64 length (-1: stored as it is) and a frame.

    Raises:
        RecordError: It is broken, or claims more than `limit` bytes.
    """
    if buffer.nbytes < 8:
        raise RecordError(
            "a compressed buffer lacks its length", offset_bytes=offset_bytes, expected=8, found=buffer.nbytes
        )
    length: int = struct.unpack_from("<q", buffer)[0]
    frame = buffer[8:]
    if length == -1:
        return frame
    if not 0 <= length <= limit:
        raise RecordError(
            "a compressed buffer claims an impossible size",
            offset_bytes=offset_bytes,
            expected=f"at most {limit} bytes",
            found=length,
        )
    try:
        if codec == _ZSTD:
            claimed = zstandard.get_frame_parameters(frame).content_size
            if claimed not in (length, zstandard.CONTENTSIZE_UNKNOWN):
                raise RecordError(
                    "a zstd buffer claims two sizes", offset_bytes=offset_bytes, expected=length, found=claimed
                )
            plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max(1, length), allow_extra_data=False)
        else:
            plain = pa.decompress(pa.py_buffer(frame), decompressed_size=length, codec="lz4", asbytes=True)
    except (zstandard.ZstdError, pa.ArrowException, OSError) as error:
        raise RecordError(f"a compressed buffer is broken ({error})", offset_bytes=offset_bytes) from None
    if len(plain) != length:
        raise RecordError(
            "a compressed buffer has another size", offset_bytes=offset_bytes, expected=length, found=len(plain)
        )
    return plain
