"""Which byte ranges of a file to read for the records that are wanted. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    if len(offset_bytes) < 2:
        return [PlannedRead(int(o), int(n), np.zeros(1, np.int64)) for o, n in zip(offset_bytes, size_bytes, strict=True)]
    order = np.argsort(offset_bytes, kind="stable")
    starts = offset_bytes[order]
    ends = np.maximum.accumulate(starts + size_bytes[order])
    apart = starts[1:] - ends[:-1]  # negative where ranges overlap
    reads = []
    for first, last in _spans(apart > gap_bytes):
        for a, b in _within(starts[first:last], ends[first:last], apart[first : last - 1] >= 0, max_bytes):
            i, j = first + a, first + b
            reads.append(PlannedRead(int(starts[i]), int(ends[j - 1] - starts[i]), order[i:j]))
    return reads


def _spans(cuts: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Half-open spans of n + 1 things with cuts at some of the n places between them."""
    at = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(cuts) + 1]
    yield from itertools.pairwise(at)


def _within(starts: Ints, ends: Ints, may_cut: npt.NDArray[np.bool_], max_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open spans of ranges, each as long as fits into `max_bytes`, or as can't be cut shorter."""
    cuts = np.concatenate([[0], np.flatnonzero(may_cut) + 1, [len(starts)]])
    first = 0
    while first < len(starts):
        # The last cut such that all before it fits; else the first one there is.
        n_fit = int(np.searchsorted(ends, starts[first] + max_bytes, side="right"))
        last = int(cuts[np.searchsorted(cuts, max(n_fit, first + 1), side="right") - 1])
        if last <= first:
            last = int(cuts[np.searchsorted(cuts, first, side="right")])
        yield first, last
        first = last
