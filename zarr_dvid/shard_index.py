"""One shard's index: which record holds which chunk. Pure arithmetic on tables of integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

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
class Found:
    """Where the records of several chunks are: arrays of shape (n,), one element for each chunk.

    Attributes:
        n_records: How many records claim the chunk, int64; 0 if the shard has no such chunk. What the other arrays have
            there is undefined.
        offset_bytes: Start of the first one's message in the shard, int64.
        size_bytes: Length of that message, int64.
        row: Row in the message, int32.
        n_rows: Rows that the message has according to the index, int32.
    """

    n_records: Ints
    offset_bytes: Ints
    size_bytes: Ints
    row: npt.NDArray[np.int32]
    n_rows: npt.NDArray[np.int32]

    def at(self, which: npt.NDArray[np.bool_] | Ints) -> Found:
        """The same of some of the chunks, given by a mask or by positions."""
        return Found(
            self.n_records[which], self.offset_bytes[which], self.size_bytes[which], self.row[which], self.n_rows[which]
        )


class ShardIndex(Protocol):
    """Places of a shard's records, by chunk. A chunk may have several; then they have to be compared."""

    def __len__(self) -> int:
        """Records."""
        ...

    @property
    def n_chunks(self) -> int:
        """Chunks that have a record."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the tables take."""
        ...

    def places(self, chunk_xyz: tuple[int, int, int]) -> list[Place]:
        """Places of the records that claim a chunk; none if the shard has no such chunk."""
        ...

    def look_up(self, chunks_xyz: Ints) -> Found:
        """Places of the first records of many chunks, shape (n, 3), whose coordinates are in [0, 2**21)."""
        ...

    def chunks_xyz(self) -> Ints:
        """All chunks, in the order of their keys, each once: int64, shape (n, 3)."""
        ...

    def table(self) -> WideIndex:
        """The same as plain columns."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class WideIndex:
    """An index of any records, 32 bytes each, sorted by chunk.

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
    def n_chunks(self) -> int:
        """See `ShardIndex`."""
        return len(np.unique(self.keys))

    @property
    def nbytes(self) -> int:
        """See `ShardIndex`."""
        return sum(table.nbytes for table in (self.keys, self.offset_bytes, self.size_bytes, self.row, self.n_rows))

    def places(self, chunk_xyz: tuple[int, int, int]) -> list[Place]:
        """See `ShardIndex`."""
        key = chunk_key(chunk_xyz)
        first = int(np.searchsorted(self.keys, key))
        found = []
        while first < len(self.keys) and self.keys[first] == key:
            tables = (self.offset_bytes, self.size_bytes, self.row, self.n_rows)
            found.append(Place(*(int(table[first]) for table in tables)))
            first += 1
        return found

    def look_up(self, chunks_xyz: Ints) -> Found:
        """See `ShardIndex`."""
        if not len(self):
            return no_records(len(chunks_xyz))
        keys = to_keys(chunks_xyz)
        first, end = np.searchsorted(self.keys, keys), np.searchsorted(self.keys, keys, "right")
        at = np.minimum(first, len(self) - 1)
        return Found(end - first, self.offset_bytes[at], self.size_bytes[at], self.row[at], self.n_rows[at])

    def chunks_xyz(self) -> Ints:
        """See `ShardIndex`."""
        return from_keys(np.unique(self.keys))

    def table(self) -> WideIndex:
        """See `ShardIndex`."""
        return self


def no_records(n_chunks: int) -> Found:
    """Of chunks none of which is there."""
    zero, small = np.zeros(n_chunks, np.int64), np.zeros(n_chunks, np.int32)
    return Found(zero, zero, zero, small, small)


def one_record(place: Place) -> Found:
    """Of a single chunk that one record claims."""
    one = np.ones(1, np.int64)
    return Found(
        one,
        place.offset_bytes * one,
        place.size_bytes * one,
        np.array([place.row], np.int32),
        np.array([place.n_rows], np.int32),
    )


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


def wide_index(chunks_xyz: Ints, offset_bytes: Ints, size_bytes: Ints, row: Ints) -> WideIndex:
    """Sorts places by chunk. Coordinates must be in [0, 2**21)."""
    _, batch, counts = np.unique(offset_bytes, return_inverse=True, return_counts=True)
    keys = to_keys(chunks_xyz)
    order = np.argsort(keys, kind="stable")
    return WideIndex(
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
