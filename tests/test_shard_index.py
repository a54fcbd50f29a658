"""The table of a shard's records, against dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from exports import XYZ
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid.compact_index import CompactIndex, build_index
from zarr_dvid.shard_index import (
    MAX_CHUNKS_A_SIDE,
    Place,
    chunk_key,
    find_gap,
    from_keys,
    to_keys,
    wide_index,
)

LAST = MAX_CHUNKS_A_SIDE - 1
side = st.integers(0, LAST) | st.sampled_from([0, 1, LAST - 1, LAST]) | st.integers(0, 3)
chunk = st.tuples(side, side, side)


@given(st.lists(chunk, max_size=30))
def test_keys_are_chunks_and_keep_their_order(chunks: list[XYZ]) -> None:
    table = np.array(chunks, np.int64).reshape(-1, 3)
    keys = to_keys(table)
    assert keys.tolist() == [chunk_key(xyz) for xyz in chunks]
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    np.testing.assert_array_equal(from_keys(keys), table)
    assert [chunks[i] for i in np.argsort(keys, kind="stable")] == sorted(chunks)


@given(st.lists(chunk, min_size=0, max_size=30), st.data())
def test_an_index_is_a_dictionary(chunks: list[XYZ], data: st.DataObject) -> None:
    """Of records in batches of any length; a chunk may have several."""
    batches: list[int] = []
    while sum(batches) < len(chunks):
        batches.append(data.draw(st.integers(1, len(chunks) - sum(batches))))
    places: list[Place] = []
    at = 688
    for n_rows in batches:
        size = data.draw(st.integers(8, 10**7))
        places += [Place(at, size, row, n_rows) for row in range(n_rows)]
        at += size
    expected: dict[XYZ, list[Place]] = {}
    for xyz, place in zip(chunks, places, strict=True):
        expected.setdefault(xyz, []).append(place)
    order = data.draw(st.permutations(range(len(chunks))))

    def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([values[i] for i in order], np.int64)

    index = wide_index(
        np.array([chunks[i] for i in order], np.int64).reshape(-1, 3),
        column([place.offset_bytes for place in places]),
        column([place.size_bytes for place in places]),
        column([place.row for place in places]),
    )
    assert len(index) == len(chunks)
    assert index.nbytes <= 32 * len(chunks)
    for xyz in {*chunks, (0, 0, 0), (LAST, LAST, LAST), (1, 2, 3)}:
        found = index.places(xyz)
        assert Counter(found) == Counter(expected.get(xyz, []))
    assert [tuple(xyz) for xyz in index.chunks_xyz().tolist()] == sorted(expected)


def test_an_empty_index_has_no_places() -> None:
    empty = np.empty(0, np.int64)
    index = wide_index(empty.reshape(0, 3), empty, empty, empty)
    assert len(index) == 0
    assert index.places((0, 0, 0)) == []
    assert index.chunks_xyz().shape == (0, 3)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 4)), max_size=8), st.integers(0, 10**9), st.randoms())
def test_messages_without_a_gap(messages: list[tuple[int, int]], start: int, rng: object) -> None:
    rows = []
    at = start
    for size, n_rows in messages:
        rows += [(at, size)] * n_rows
        at += size
    rng.shuffle(rows)
    table = np.array(rows, np.int64).reshape(-1, 2)
    assert find_gap(table[:, 0], table[:, 1], start=start) is None
    if rows:
        assert find_gap(table[:, 0], table[:, 1], start=start + 8) == (start + 8, start)


@pytest.mark.parametrize(
    ("rows", "gap"),
    [
        ([(8, 8)], (0, 8)),
        ([(0, 8), (16, 8)], (8, 16)),
        ([(0, 8), (4, 8)], (8, 4)),
        ([(0, 8), (8, 8), (8, 16)], (16, 8)),
        ([(0, 8), (0, 16), (16, 8)], (8, 0)),
        ([(0, 8), (8, 8), (24, 8), (32, 8)], (16, 24)),
        ([(0, 2**61), (2**61, 2**61), (0, 8)], (8, 0)),
    ],
)
def test_gaps_and_overlaps(rows: list[tuple[int, int]], gap: tuple[int, int]) -> None:
    for some in (rows, rows[::-1]):
        table = np.array(some, np.int64)
        assert find_gap(table[:, 0], table[:, 1], start=0) == gap


# ---- the compact form


def cube(n: int, *, low: XYZ = (0, 0, 0), seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    chunks = np.random.default_rng(seed).permutation(np.argwhere(np.ones((n, n, n)))) + np.array(low)
    return chunks.astype(np.int64)


def columns(n: int, *, start: int = 688) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    """Offsets and lengths of n messages, and rows."""
    sizes = 8 * np.random.default_rng(n).integers(1, 1 << 16, n)
    return start + np.cumsum(sizes) - sizes, sizes, np.zeros(n, np.int64)


@given(
    st.tuples(*[st.integers(0, LAST - 6)] * 3),
    st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, unique=True),
    st.randoms(),
)
def test_a_compact_index_is_a_dictionary(low: XYZ, some: list[XYZ], rng: object) -> None:
    rng.shuffle(some)  # type: ignore[attr-defined]
    chunks = np.array(some, np.int64) + np.array(low)
    offsets, sizes, rows = columns(len(some))
    index = build_index(chunks, offsets, sizes, rows)
    assert isinstance(index, CompactIndex)
    assert len(index) == index.n_chunks == len(some)
    assert index.nbytes == 8 * len(some)
    expected = {(x, y, z): (at, n) for (x, y, z), at, n in zip(chunks.tolist(), offsets, sizes, strict=True)}
    around = np.argwhere(np.ones((9, 9, 9))) + np.array(low) - 1
    around = around[((around >= 0) & (around <= LAST)).all(axis=1)]
    found = index.look_up(around)
    for i, (x, y, z) in enumerate(around.tolist()):
        place = expected.get((x, y, z))
        assert index.places((x, y, z)) == ([] if place is None else [Place(*place, 0, 1)])
        assert found.n_records[i] == (place is not None)
        if place is not None:
            assert (found.offset_bytes[i], found.size_bytes[i], found.row[i], found.n_rows[i]) == (*place, 0, 1)
    assert [tuple(xyz) for xyz in index.chunks_xyz().tolist()] == sorted(expected)
    for far in ((0, 0, 0), (LAST, LAST, LAST), (LAST, 0, LAST)):
        assert bool(index.places(far)) == (far in expected)
        assert bool(index.look_up(np.array([far])).n_records[0]) == (far in expected)
    table, wide = index.table(), wide_index(chunks, offsets, sizes, rows)
    for name in ("keys", "offset_bytes", "size_bytes", "row", "n_rows"):
        np.testing.assert_array_equal(getattr(table, name), getattr(wide, name))


def test_what_does_not_fit_is_wide() -> None:
    chunks, (offsets, sizes, rows) = cube(4), columns(64)
    assert isinstance(build_index(chunks, offsets, sizes, rows), CompactIndex)
    twice, far, huge, odd, shared, late = (array.copy() for array in (chunks, chunks, sizes, offsets, offsets, rows))
    twice[3], far[3] = twice[4], (70_000, 0, 0)
    huge[5], odd[5], shared[5], late[5] = 8 << 16, odd[5] + 4, shared[6], 1
    for columns_of in (
        (twice, offsets, sizes, rows),
        (far, offsets, sizes, rows),
        (chunks, offsets, huge, rows),
        (chunks, odd, sizes, rows),
        (chunks, shared, sizes, rows),
        (chunks, offsets, sizes, late),
        (chunks, offsets + (8 << 32), sizes, rows),
    ):
        index, wide = build_index(*columns_of), wide_index(*columns_of)
        assert not isinstance(index, CompactIndex)
        for xyz in map(tuple, columns_of[0].tolist()):
            assert index.places(xyz) == wide.places(xyz)


@pytest.mark.parametrize("n", [1, 32, 40])
def test_boxes_up_to_what_two_bytes_count(n: int) -> None:
    chunks = cube(n, low=(7, 0, LAST - n + 1))
    index = build_index(chunks, *columns(len(chunks)))
    assert isinstance(index, CompactIndex)
    assert (index.look_up(chunks).n_records == 1).all()
    np.testing.assert_array_equal(index.look_up(chunks).offset_bytes, columns(len(chunks))[0])
    np.testing.assert_array_equal(np.sort(to_keys(chunks)), to_keys(index.chunks_xyz()))
