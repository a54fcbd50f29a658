"""Planning reads: ranges of a file to as few reads as a gap and a maximum allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zarr_dvid.reads import PlannedRead, plan_reads

Range = tuple[int, int]  # offset and size in bytes


def plan(ranges: Sequence[Range], *, gap: int, most: int) -> list[PlannedRead]:
    offsets, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    return plan_reads(offsets, sizes, gap_bytes=gap, max_bytes=most)


def planned(ranges: Sequence[Range], *, gap: int = 0, most: int = 10**9) -> list[tuple[int, int, list[int]]]:
    reads = plan(ranges, gap=gap, most=most)
    return [(read.offset_bytes, read.size_bytes, read.which.tolist()) for read in reads]


class TestExamples:
    def test_nothing(self) -> None:
        assert planned([]) == []

    def test_one_range_is_read_as_it_is(self) -> None:
        assert planned([(7, 5)]) == [(7, 5, [0])]
        assert planned([(7, 500)], most=1) == [(7, 500, [0])]

    def test_ranges_that_touch_are_one_read(self) -> None:
        assert planned([(0, 10), (10, 5), (15, 1)]) == [(0, 16, [0, 1, 2])]

    def test_in_any_order(self) -> None:
        assert planned([(15, 1), (0, 10), (10, 5)]) == [(0, 16, [1, 2, 0])]

    @pytest.mark.parametrize(("gap", "n_reads"), [(0, 2), (3, 2), (4, 1), (99, 1)])
    def test_a_gap_is_read_if_it_is_not_too_large(self, gap: int, n_reads: int) -> None:
        assert len(planned([(0, 10), (14, 5)], gap=gap)) == n_reads

    @pytest.mark.parametrize(
        ("most", "sizes"), [(30, [30]), (29, [20, 10]), (20, [20, 10]), (19, [10, 10, 10]), (1, [10] * 3)]
    )
    def test_none_is_merged_beyond_the_maximum(self, most: int, sizes: list[int]) -> None:
        assert [size for _, size, _ in planned([(0, 10), (10, 10), (20, 10)], most=most)] == sizes

    def test_a_long_range_is_read_alone(self) -> None:
        assert planned([(0, 5), (5, 100), (105, 5)], most=50) == [(0, 5, [0]), (5, 100, [1]), (105, 5, [2])]

    def test_the_same_range_twice_is_read_once(self) -> None:
        # as records of one batch have it
        assert planned([(10, 90), (10, 90), (100, 5), (10, 90)], most=20) == [(10, 90, [0, 1, 3]), (100, 5, [2])]

    def test_ranges_that_overlap_are_read_together_whatever_their_length(self) -> None:
        assert planned([(0, 60), (50, 60), (100, 60)], most=10) == [(0, 160, [0, 1, 2])]

    def test_a_range_inside_another(self) -> None:
        assert planned([(0, 100), (10, 5), (90, 20), (110, 5)], most=112) == [(0, 110, [0, 1, 2]), (110, 5, [3])]

    def test_offsets_of_large_files(self) -> None:
        far = 2**50
        assert planned([(far, 10), (far + 10, 10)]) == [(far, 20, [0, 1])]


ranges_of_a_file = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=30)
# One behind the other, some of them asked for several times.
messages_of_a_shard = st.lists(st.integers(1, 60), min_size=1, max_size=30).flatmap(
    lambda sizes: st.lists(st.sampled_from([(sum(sizes[:i]), size) for i, size in enumerate(sizes)]), max_size=40)
)


@given(
    ranges=ranges_of_a_file | messages_of_a_shard,
    gap=st.integers(0, 60),
    most=st.integers(1, 200),
)
@example(ranges=[(0, 60), (10, 5), (20, 5), (61, 9)], gap=0, most=20)
def test_any_plan(ranges: list[Range], gap: int, most: int) -> None:
    reads = plan(ranges, gap=gap, most=most)
    # Each range lies in just one read, by ascending offset.
    assert sorted(i for read in reads for i in read.which.tolist()) == list(range(len(ranges)))
    held = []
    for read in reads:
        own = [ranges[i] for i in read.which.tolist()]
        held.append(own)
        assert [offset for offset, _ in own] == sorted(offset for offset, _ in own)
        end = read.offset_bytes + read.size_bytes
        assert read.offset_bytes == own[0][0]
        assert end == max(offset + size for offset, size in own)
        # Bytes that nobody wants are at most a gap in a row.
        reached = read.offset_bytes
        for offset, size in own:
            assert offset - reached <= gap
            reached = max(reached, offset + size)
        assert read.size_bytes <= most or can_not_be_cut(own)
    # By ascending offset, and no byte twice.
    for one, other in itertools.pairwise(reads):
        assert one.offset_bytes + one.size_bytes <= other.offset_bytes
    # No two neighbours could have been one.
    for (one, ours), (other, theirs) in itertools.pairwise(zip(reads, held, strict=True)):
        distance = other.offset_bytes - (one.offset_bytes + one.size_bytes)
        together = other.offset_bytes + first_part(theirs) - one.offset_bytes
        assert distance > gap or together > most, (ours, theirs)


def can_not_be_cut(own: list[Range]) -> bool:
    """Whether each range overlaps one before it."""
    return first_part(own) == max(offset + size for offset, size in own) - own[0][0]


def first_part(own: list[Range]) -> int:
    """Bytes of the first of these ranges, and of those that overlap."""
    end = sum(own[0])
    for offset, size in own[1:]:
        if offset >= end:
            break
        end = max(end, offset + size)
    return end - own[0][0]


@pytest.mark.parametrize(("gap", "most"), [(0, 8 << 20), (16 << 10, 8 << 20), (16 << 10, 4096), (0, 1)])
def test_a_whole_shard_in_a_random_order(gap: int, most: int) -> None:
    rng = np.random.default_rng(5)
    sizes = 8 * rng.integers(64, 1500, 32_768)
    offsets = np.concatenate([[688], 688 + np.cumsum(sizes)[:-1]])
    order = rng.permutation(len(sizes))
    reads = plan_reads(offsets[order], sizes[order], gap_bytes=gap, max_bytes=most)
    assert reads[0].offset_bytes == 688
    ends = np.array([read.offset_bytes + read.size_bytes for read in reads])
    assert [read.offset_bytes for read in reads[1:]] == ends[:-1].tolist()
    assert ends[-1] == 688 + sizes.sum()
    np.testing.assert_array_equal(order[np.concatenate([read.which for read in reads])], np.arange(len(sizes)))
    longest = max(most, int(sizes.max()))
    assert all(read.size_bytes <= longest for read in reads)
    assert len(reads) <= sizes.sum() / max(1, most - sizes.max()) + 1 or len(reads) == len(sizes)
