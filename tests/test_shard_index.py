"""The table of a shard's records, against dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from exports import XYZ
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid.shard_index import (
    MAX_CHUNKS_A_SIDE,
    Place,
    wide_index,
    chunk_key,
    find_gap,
    from_keys,
    to_keys,
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
