"""One shard's index: which record holds which chunk. Pure arithmetic on tables of integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

CHUNK_VOXELS = 64
MAX_CHUNKS_A_SIDE = 1 << 21  # three coordinates make one int64 key
Units = Literal["chunks", "voxels"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is.

    Attributes:
        offset_bytes: Start of its message in the shard.
        size_bytes: Length of that message.
        row: Row in the message.
        n_rows: Rows that the message has according to the index.
    """

    offset_bytes: int
    size_bytes: int
    row: int
    n_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Places of a shard's records, sorted by chunk. A chunk may have several; then they have to be compared.

    Attributes:
        keys: Chunk keys, int64, ascending, shape (n,).
        offset_bytes: int64, likewise.
        size_bytes: int64.
        row: int32.
        n_rows: int32.
    """

    keys: Ints
    offset_bytes: Ints
    size_bytes: Ints
    row: npt.NDArray[np.int32]
    n_rows: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        return sum(table.nbytes for table in (self.keys, self.offset_bytes, self.size_bytes, self.row, self.n_rows))

    def places(self, chunk_xyz: tuple[int, int, int]) -> list[Place]:
        """Places of the records that claim a chunk; none if the shard has no such chunk."""
        key = chunk_key(chunk_xyz)
        first = int(np.searchsorted(self.keys, key))
        found = []
        while first < len(self.keys) and self.keys[first] == key:
            tables = (self.offset_bytes, self.size_bytes, self.row, self.n_rows)
            found.append(Place(*(int(table[first]) for table in tables)))
            first += 1
        return found

    def chunks_xyz(self) -> Ints:
        """All chunks, in the order of their keys, each once: int64, shape (n, 3)."""
        return from_keys(np.unique(self.keys))


def chunk_key(chunk_xyz: tuple[int, int, int]) -> int:
    """The key of one chunk: x, y, z in 21 bits each, x topmost."""
    x, y, z = chunk_xyz
    return (x * MAX_CHUNKS_A_SIDE + y) * MAX_CHUNKS_A_SIDE + z


def to_keys(chunks_xyz: Ints) -> Ints:
    """Keys of chunks, shape (n, 3), whose coordinates are in [0, 2**21)."""
    x, y, z = chunks_xyz.T
    keys: Ints = (x * MAX_CHUNKS_A_SIDE + y) * MAX_CHUNKS_A_SIDE + z
    return keys


def from_keys(keys: Ints) -> Ints:
    """Chunks (x, y, z) of keys, shape (n, 3)."""
    rest, z = np.divmod(keys, MAX_CHUNKS_A_SIDE)
    x, y = np.divmod(rest, MAX_CHUNKS_A_SIDE)
    return np.stack([x, y, z], axis=1)


def build_index(chunks_xyz: Ints, offset_bytes: Ints, size_bytes: Ints, row: Ints) -> ShardIndex:
    """Sorts places by chunk. Coordinates must be in [0, 2**21)."""
    _, batch, counts = np.unique(offset_bytes, return_inverse=True, return_counts=True)
    keys = to_keys(chunks_xyz)
    order = np.argsort(keys, kind="stable")
    return ShardIndex(
        keys[order],
        offset_bytes[order],
        size_bytes[order],
        row[order].astype(np.int32),
        counts[batch][order].astype(np.int32),
    )


def find_gap(offset_bytes: Ints, size_bytes: Ints, *, start: int) -> tuple[int, int] | None:
    """The first byte where messages do not follow one another without a gap, and what stands there.

    Args:
        offset_bytes: Starts of the messages, one for each row; rows of one message repeat it.
        size_bytes: Their lengths.
        start: Where the first one must start.

    Returns:
        (expected start, found start) of the first message that is out of place, or None if there is none.
    """
    pairs = np.unique(np.stack([offset_bytes, size_bytes], axis=1), axis=0)
    starts, ends = pairs[:, 0], pairs[:, 0] + pairs[:, 1]
    expected = np.concatenate([[start], ends[:-1]])
    wrong = np.flatnonzero(starts != expected)
    return (int(expected[wrong[0]]), int(starts[wrong[0]])) if len(wrong) else None


def tell_units(
    xyz: Ints, *, origin_voxel: tuple[int, int, int], cube_voxels: int, grid_xyz: tuple[int, int, int] | None
) -> Units | None:
    """Tells whether a shard's coordinates are chunks, as DVID writes them, or voxels, as the first documents have them.

    Voxel coordinates are multiples of 64. Where all are, the file's cube decides, and then the volume.

    Args:
        xyz: Coordinates as written, shape (n, 3).
        origin_voxel: The cube's first voxel (x, y, z), from the file's name.
        cube_voxels: Side of the cube, or 0 where it is not known.
        grid_xyz: Chunks of the volume along each axis, or None where that is not known.

    Returns:
        The unit, or None where it can't be told.
    """
    if not xyz.any() or (xyz % CHUNK_VOXELS).any():
        return "chunks"
    low = np.array(origin_voxel)
    as_chunks = _all_within(xyz * CHUNK_VOXELS, low, low + cube_voxels if cube_voxels else None)
    as_voxels = _all_within(xyz, low, low + cube_voxels if cube_voxels else None)
    if as_chunks == as_voxels and grid_xyz is not None:
        end = np.array(grid_xyz)
        as_chunks, as_voxels = _all_within(xyz, 0 * end, end), _all_within(xyz // CHUNK_VOXELS, 0 * end, end)
    if as_chunks == as_voxels:
        return None
    return "chunks" if as_chunks else "voxels"


def _all_within(xyz: Ints, low: Ints, high: Ints | None) -> bool:
    return bool((xyz >= low).all()) and (high is None or bool((xyz < high).all()))
