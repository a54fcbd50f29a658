"""Which byte ranges of a file to read for the records that are wanted. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRead:
    """One range of a file, and what it brings.

    Attributes:
        offset_bytes: Where it starts.
        size_bytes: Its length.
        which: Positions of the wanted ranges that lie in it, int64, by ascending offset.
    """

    offset_bytes: int
    size_bytes: int
    which: Ints


def plan_reads(offset_bytes: Ints, size_bytes: Ints, *, gap_bytes: int, max_bytes: int) -> list[PlannedRead]:
    """Merges ranges of a file into reads.

    Ranges that are not more than a gap apart are read together. Ranges that overlap are read together whatever comes of
    it, so that no byte is read twice.

    Args:
        offset_bytes: Where the ranges start, int64, shape (n,), in any order.
        size_bytes: Their lengths, likewise.
        gap_bytes: How many bytes that nobody wants may be read rather than asking twice.
        max_bytes: Length that no read is merged beyond.

    Returns:
        The reads, by ascending offset. Every range lies in just one of them.
    """
    order = np.argsort(offset_bytes, kind="stable")
    starts = offset_bytes[order].tolist()
    ends = (offset_bytes + size_bytes)[order].tolist()
    reads: list[PlannedRead] = []
    begin = end = first = last = 0
    for start, stop, i, j in _clumps(starts, ends):
        if last and (start - end > gap_bytes or stop - begin > max_bytes):
            reads.append(PlannedRead(begin, end - begin, order[first:last]))
            last = 0
        if not last:
            begin, first = start, i
        end, last = stop, j
    if last:
        reads.append(PlannedRead(begin, end - begin, order[first:last]))
    return reads


def _clumps(starts: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Ranges that overlap, taken together: start, end, and the half-open span of ranges. Starts must ascend."""
    first = 0
    while first < len(starts):
        last, end = first + 1, ends[first]
        while last < len(starts) and starts[last] < end:
            end = max(end, ends[last])
            last += 1
        yield starts[first], end, first, last
        first = last
