"""DVID's compressed label blocks: bytes to voxels and back.

A block is a grid of 8x8x8 sub-blocks with one table of labels; its layout is DVID's
(``datatype/common/labels/compressed.go``), described in docs/format.md. Exports keep each block in a zstd frame; both
forms are taken everywhere, told apart by zstd's magic number, which no block can start with.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import zstandard

from zarr_dvid._native import core
from zarr_dvid.errors import BlockError

if TYPE_CHECKING:
    import numpy.typing as npt

BytesLike: TypeAlias = bytes | bytearray | memoryview
Voxels: TypeAlias = "npt.NDArray[np.uint64]"
ShapeZYX: TypeAlias = tuple[int, int, int]
Window: TypeAlias = tuple[slice, slice, slice]

CHUNK_SHAPE: ShapeZYX = (64, 64, 64)
"""Voxels of a block of an export, and of a chunk of its Zarr arrays."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SUBBLOCK_MAX_BYTES = 8 * 512 + 2 + 4 * 512 + 64 * 9  # all 512 voxels differ, in a sub-block whose labels no other has
_MAX_GRID = 128
_MAX_WINDOW_BYTES = 8 << 20  # what zstd lets an encoder use and asks all decoders to support
_UINT64 = np.dtype(np.uint64)
_GRID = struct.Struct("<3I")
_ORIGIN: ShapeZYX = (0, 0, 0)
_decompressors = threading.local()


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """What a block's header and tables say, without its voxels.

    Attributes:
        shape: Voxels, (z, y, x).
        grid: 8x8x8 sub-blocks, (z, y, x).
        n_labels: Entries of the label table; repeats and unused ones count.
        n_subblock_labels: Entries of all sub-blocks' tables together.
        solid: Whether the block has one label and nothing else.
        nbytes: Size of the bare block, in bytes.
        nbytes_stored: Size as given, in bytes; less than `nbytes` for a zstd frame.
        compressed: Whether it was given as a zstd frame.
    """

    shape: ShapeZYX
    grid: ShapeZYX
    n_labels: int
    n_subblock_labels: int
    solid: bool
    nbytes: int
    nbytes_stored: int
    compressed: bool


def max_block_nbytes(shape: ShapeZYX) -> int:
    """Size in bytes of the largest block of this shape (z, y, x in voxels): the one whose voxels all differ."""
    z, y, x = shape
    return 16 + (z // 8) * (y // 8) * (x // 8) * _SUBBLOCK_MAX_BYTES


_CHUNK_LIMIT = max_block_nbytes(CHUNK_SHAPE)


def decode_block(
    block: BytesLike,
    *,
    labels: npt.ArrayLike | None = None,
    window: Sequence[slice] | None = None,
    out: Voxels | None = None,
) -> Voxels:
    """Decodes a DVID block.

    Args:
        block: The block, bare or as one zstd frame.
        labels: Label table to use in place of the block's own, of the same length; with the `labels` column of an
            export's record this gives agglomerated labels. Shape (n_labels,), any integers that fit uint64.
        window: Part to decode: slices along z, y and x in voxels, with step 1. Sub-blocks outside it are not decoded.
        out: Array to decode into: uint64, writable, of the window's shape (z, y, x), contiguous along x and strided in
            any way along z and y.

    Returns:
        uint64 voxels of the window's shape (z, y, x); `out` itself where it was given.

    Raises:
        BlockError: The block breaks a rule of its format, or `labels` has another length than its table.
        ValueError: `window`, `labels` or `out` do not fit the block.
    """
    return decode_into(block, labels=labels, window=window, out=out)


def decode_into(
    block: BytesLike,
    *,
    labels: npt.ArrayLike | None = None,
    window: Sequence[slice] | None = None,
    out: Voxels | None = None,
    expected_shape: ShapeZYX | None = None,
) -> Voxels:
    """`decode_block` for a caller that knows what shape (z, y, x) the block has to have, and refuses any other."""
    block = _as_bytes(block)
    plain = plain_block(block, expected_shape=expected_shape) if is_zstd(block) else block
    shape = _shape(plain)
    if expected_shape is not None and shape != expected_shape:
        raise BlockError(
            "the block has another size", field="gx, gy, gz", offset_bytes=0, expected=expected_shape, found=shape
        )
    start, wanted = (_ORIGIN, shape) if window is None else _bounds(shape, window)
    table = None if labels is None else _label_table(labels)
    target = np.empty(wanted, _UINT64) if out is None else _target(out, wanted)
    try:
        core.decode_block(plain, table, start, target)
    except core.Fault as fault:
        raise block_error(fault) from None
    if out is None or out is target:
        return target
    out[...] = target
    return out


def encode_block(volume: Voxels) -> bytes:
    """Encodes voxels as a bare DVID block, byte for byte as libdvid-cpp does, which most blocks of real exports are.

    Sub-block tables ascend; the block's table is in the order of (first sub-block, label). The same voxels always give
    the same bytes. DVID itself takes blocks of at least 16 voxels a side, and of an even number of sub-blocks unless
    they are of one label.

    Args:
        volume: uint64, shape (z, y, x), each side a multiple of 8 from 8 to 1024 voxels.

    Returns:
        The block, not compressed.

    Raises:
        TypeError: `volume` is not uint64.
        ValueError: Its shape can't be a block's.
    """
    volume = np.asarray(volume)
    if volume.dtype != np.uint64:
        raise TypeError(f"a block holds uint64 labels, not {volume.dtype}")
    if volume.ndim != 3:
        raise ValueError(f"a block has three dimensions (z, y, x), not {volume.ndim}")
    if volume.strides[2] != 8 or any(stride % 8 for stride in volume.strides) or not volume.flags.aligned:
        volume = np.ascontiguousarray(volume)
    return core.encode_block(volume)


def block_info(block: BytesLike) -> BlockInfo:
    """Tells a block's grid, label count and sizes without decoding its voxels.

    Everything but the packed values is checked.

    Args:
        block: The block, bare or as one zstd frame.

    Raises:
        BlockError: The block breaks a rule of its format.
    """
    block = _as_bytes(block)
    plain = plain_block(block)
    try:
        grid, n_labels, n_subblock_labels, solid = core.inspect_block(plain)
    except core.Fault as fault:
        raise block_error(fault) from None
    z, y, x = grid
    return BlockInfo(
        shape=(8 * z, 8 * y, 8 * x),
        grid=grid,
        n_labels=n_labels,
        n_subblock_labels=n_subblock_labels,
        solid=solid,
        nbytes=len(plain),
        nbytes_stored=len(block),
        compressed=is_zstd(block),
    )


def _as_bytes(data: BytesLike) -> BytesLike:
    """The same memory, counted in unsigned bytes: a view may count in anything, and pyarrow's are signed."""
    return data if type(data) is bytes else memoryview(data).cast("B")


def is_zstd(data: BytesLike) -> bool:
    """Whether the bytes start as a zstd frame does."""
    return data[:4] == _ZSTD_MAGIC


def plain_block(block: BytesLike, *, expected_shape: ShapeZYX | None = None) -> BytesLike:
    """Gives the bare block of a zstd frame, or what it got if that is no frame.

    What a frame may hold is bounded before memory is taken for it: by what a block of `expected_shape` can be, or of 64^3
    voxels where no shape is expected. There a frame that claims more is opened for its first 16 bytes, and its claim
    must be one that a block of that grid can have. Frames that claim nothing exist: DVID's encoder leaves the content
    size out where it is below 256 bytes.

    Raises:
        BlockError: The frame is broken, or its size can't be a block's.
    """
    if not is_zstd(block):
        return block
    try:
        limit = (
            _CHUNK_LIMIT if expected_shape is None or expected_shape == CHUNK_SHAPE else max_block_nbytes(expected_shape)
        )
        content_size = zstandard.frame_content_size(block)
        if content_size < 0:  # not stated
            window_size = zstandard.get_frame_parameters(block).window_size
            if window_size > _MAX_WINDOW_BYTES:
                raise _too_large("window", _MAX_WINDOW_BYTES, window_size)
            if core.frame_nbytes(block) != len(block):  # zstandard by itself looks at nothing behind such a frame
                raise BlockError("the zstd frame is cut, or something stands behind it", field="zstd frame")
        elif content_size > limit:
            if expected_shape is None:
                limit = _limit_by_header(block)
            if content_size > limit:
                raise _too_large("content", limit, content_size)
        # By position, which is faster: the largest output, one frame only, nothing behind it.
        return _decompressor().decompress(block, limit, False, False)  # noqa: FBT003
    except zstandard.ZstdError as error:
        raise BlockError(f"the zstd frame is broken: {error}", field="zstd frame") from None


def _too_large(part: str, limit: int, found: int) -> BlockError:
    return BlockError(
        f"the zstd frame's {part} is too large for a block of its grid",
        field="zstd frame",
        offset_bytes=4,
        expected=f"at most {limit} bytes",
        found=f"{found} bytes",
    )


def block_error(fault: core.Fault) -> BlockError:
    """The native core's complaint about a block as a `BlockError`."""
    field, rule, offset_bytes, expected, found = fault.args
    facts: dict[str, Any] = {"offset_bytes": offset_bytes, "expected": expected, "found": found}
    if field in ("gx", "gy", "gz"):
        facts["expected"] = f"1 to {expected}"
    elif field == "labels":
        facts["advice"] = "Give a label for each entry of the block's own table"
    return BlockError(f"{field} {rule}", field=field, **facts)


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's own: they may not be shared, and are slow to make."""
    found: zstandard.ZstdDecompressor | None = getattr(_decompressors, "zstd", None)
    if found is None:
        found = _decompressors.zstd = zstandard.ZstdDecompressor()
    return found


def _limit_by_header(frame: BytesLike) -> int:
    with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(frame) as reader:
        header = reader.read(16)
    if len(header) < 16:
        return 0
    gx, gy, gz, n_labels = (int(field) for field in struct.unpack_from("<4I", header))
    if not all(1 <= side <= _MAX_GRID for side in (gx, gy, gz)):
        return 0
    n_subblocks = gx * gy * gz
    if n_labels == 1:
        return 24 + 6 * n_subblocks
    return 16 + 8 * min(n_labels, 512 * n_subblocks) + n_subblocks * (_SUBBLOCK_MAX_BYTES - 8 * 512)


def _shape(plain: BytesLike) -> ShapeZYX:
    """The shape that a bare block's header states; a block of more than 64^3 voxels is checked before it is believed."""
    gx, gy, gz = _GRID.unpack_from(plain) if len(plain) >= 24 else _ORIGIN
    if not (0 < gx <= 8 and 0 < gy <= 8 and 0 < gz <= 8):
        try:
            core.inspect_block(plain)
        except core.Fault as fault:
            raise block_error(fault) from None
    return 8 * gz, 8 * gy, 8 * gx


def _bounds(shape: ShapeZYX, window: Sequence[slice]) -> tuple[ShapeZYX, ShapeZYX]:
    """First voxel and shape of a window, both (z, y, x)."""
    try:
        z, y, x = window
        z0, z1, z_step = z.indices(shape[0])
        y0, y1, y_step = y.indices(shape[1])
        x0, x1, x_step = x.indices(shape[2])
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"window must be three slices (z, y, x), not {window!r}") from None
    if z_step != 1 or y_step != 1 or x_step != 1:
        raise ValueError(f"window must have step 1, not {window!r}")
    return (z0, y0, x0), (max(0, z1 - z0), max(0, y1 - y0), max(0, x1 - x0))


def _label_table(labels: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    table: npt.NDArray[Any] = np.asarray(labels)
    if table.size == 0:
        table = table.astype(np.uint64)
    if table.ndim != 1 or table.dtype.kind not in "iu" or (table.dtype.kind == "i" and table.min() < 0):
        raise ValueError("labels must be one dimension of integers from 0 to 2**64 - 1")
    return np.ascontiguousarray(table, dtype="<u8")


def _target(out: Voxels, shape: ShapeZYX) -> Voxels:
    """`out` once it is known to do, or another array to be copied into it where the core can't write to it."""
    if out.dtype != _UINT64 or out.shape != shape:
        raise ValueError(f"out must be uint64 of shape {shape}, not {out.dtype} of shape {out.shape}")
    flags, strides = out.flags, out.strides
    if not flags.writeable:
        raise ValueError("out must be writable")
    if shape[2] > 1 and strides[2] != 8:
        raise ValueError(f"out must be contiguous along x, its last axis, not strided by {strides[2]} bytes")
    if flags.aligned and strides[0] % 8 == 0 and strides[1] % 8 == 0:
        return out
    return np.empty(shape, _UINT64)
