"""The index of a shard as DVID writes it, 8 bytes a record: one record a chunk and a message, 8-byte aligned, in a cube."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.shard_index import Found, Place, ShardIndex, WideIndex, no_records, to_keys, wide_index

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.volume import XYZ

    Ints = npt.NDArray[np.int64]

WORD_BYTES = 8  # offsets and lengths are multiples of it
MAX_CELLS = 1 << 16
_MAX_OFFSET_WORDS = 1 << 32
_MAX_SIZE_WORDS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class CompactIndex:
    """An index of one record for each chunk, each alone in its message, all within a box of at most 65,536 chunks.

    Attributes:
        low_xyz: The box's first chunk.
        extent_xyz: Its chunks along each axis.
        cells: Each chunk's place in the box, x slowest: uint16, ascending, shape (n,).
        offset_words: Start of its message, in 8 bytes: uint32, likewise.
        size_words: Length of its message, in 8 bytes: uint16, likewise.
    """

    low_xyz: XYZ
    extent_xyz: XYZ
    cells: npt.NDArray[np.uint16]
    offset_words: npt.NDArray[np.uint32]
    size_words: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def n_chunks(self) -> int:
        """See `ShardIndex`."""
        return len(self.cells)

    @property
    def nbytes(self) -> int:
        """See `ShardIndex`."""
        return self.cells.nbytes + self.offset_words.nbytes + self.size_words.nbytes

    def places(self, chunk_xyz: XYZ) -> list[Place]:
        """See `ShardIndex`."""
        x, y, z = (c - low for c, low in zip(chunk_xyz, self.low_xyz, strict=True))
        nx, ny, nz = self.extent_xyz
        if not (0 <= x < nx and 0 <= y < ny and 0 <= z < nz):
            return []
        cell = np.uint16((x * ny + y) * nz + z)
        at = int(np.searchsorted(self.cells, cell))
        if at == len(self.cells) or self.cells[at] != cell:
            return []
        return [Place(WORD_BYTES * int(self.offset_words[at]), WORD_BYTES * int(self.size_words[at]), 0, 1)]

    def look_up(self, chunks_xyz: Ints) -> Found:
        """See `ShardIndex`."""
        if not len(self):
            return no_records(len(chunks_xyz))
        x, y, z = (chunks_xyz - np.array(self.low_xyz)).T
        nx, ny, nz = self.extent_xyz
        is_inside = (x >= 0) & (x < nx) & (y >= 0) & (y < ny) & (z >= 0) & (z < nz)
        cells = ((x * ny + y) * nz + z).astype(np.uint16)  # of what lies outside, any
        at = np.minimum(np.searchsorted(self.cells, cells), len(self) - 1)
        n_records = (is_inside & (self.cells[at] == cells)).astype(np.int64)
        return Found(
            n_records,
            WORD_BYTES * self.offset_words[at].astype(np.int64),
            WORD_BYTES * self.size_words[at].astype(np.int64),
            np.zeros(len(at), np.int32),
            np.ones(len(at), np.int32),
        )

    def chunks_xyz(self) -> Ints:
        """See `ShardIndex`."""
        _, ny, nz = self.extent_xyz
        rest, z = np.divmod(self.cells.astype(np.int64), nz)
        x, y = np.divmod(rest, ny)
        return np.stack([x, y, z], axis=1) + np.array(self.low_xyz, np.int64)

    def table(self) -> WideIndex:
        """See `ShardIndex`."""
        return WideIndex(
            to_keys(self.chunks_xyz()),
            WORD_BYTES * self.offset_words.astype(np.int64),
            WORD_BYTES * self.size_words.astype(np.int64),
            np.zeros(len(self), np.int32),
            np.ones(len(self), np.int32),
        )


def build_index(chunks_xyz: Ints, offset_bytes: Ints, size_bytes: Ints, row: Ints) -> ShardIndex:
    """Sorts places by chunk, into the smallest form that they fit. Coordinates must be in [0, 2**21)."""
    return _compact(chunks_xyz, offset_bytes, size_bytes, row) or wide_index(chunks_xyz, offset_bytes, size_bytes, row)


def _compact(chunks_xyz: Ints, offset_bytes: Ints, size_bytes: Ints, row: Ints) -> CompactIndex | None:
    if not len(chunks_xyz) or row.any() or ((offset_bytes | size_bytes) % WORD_BYTES).any():
        return None
    low = chunks_xyz.min(axis=0)
    extent = chunks_xyz.max(axis=0) - low + 1
    (x0, y0, z0), (nx, ny, nz) = low.tolist(), extent.tolist()
    offset_words, size_words = offset_bytes // WORD_BYTES, size_bytes // WORD_BYTES
    if (
        math.prod((nx, ny, nz)) > MAX_CELLS
        or size_words.max() >= _MAX_SIZE_WORDS
        or not (offset_words.min() >= 0 and offset_words.max() < _MAX_OFFSET_WORDS)
        or _has_twins(offset_words)  # records that share a message
    ):
        return None
    x, y, z = (chunks_xyz - low).T
    cells = ((x * ny + y) * nz + z).astype(np.uint16)
    order = np.argsort(cells, kind="stable")
    cells = cells[order]
    if (cells[1:] == cells[:-1]).any():
        return None
    return CompactIndex(
        (x0, y0, z0),
        (nx, ny, nz),
        cells,
        offset_words[order].astype(np.uint32),
        size_words[order].astype(np.uint16),
    )


def _has_twins(values: Ints) -> bool:
    """Whether a value occurs twice; offsets mostly ascend."""
    return not (values[1:] > values[:-1]).all() and len(np.unique(values)) < len(values)
