"""Boxes of voxels as windows of chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarr_dvid.pieces import Pieces, box_of, pieces_of_box

Box = tuple[slice, slice, slice]
SHAPE = (150, 130, 200)


def bound(size: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-2 * size, 2 * size)


boxes = st.tuples(*(st.builds(slice, bound(size), bound(size), st.sampled_from([None, 1])) for size in SHAPE))


@given(boxes)
def test_bounds_are_as_numpys(box: Box) -> None:
    found = box_of(box, SHAPE)
    for part, given_, size in zip(found, box, SHAPE, strict=True):
        assert part.step is None
        assert 0 <= part.start <= part.stop
        assert list(range(part.start, part.stop)) == list(range(size))[given_]


def test_bounds_may_be_any_integers() -> None:
    some: list[Any] = [slice(np.int64(3), np.uint8(7)), slice(-1, None), slice(None, 10**9)]
    assert box_of(some, SHAPE) == (slice(3, 7), slice(129, 130), slice(0, 200))


@pytest.mark.parametrize(
    "box",
    [
        (),
        (slice(None),),
        (slice(None),) * 4,
        (slice(None), slice(None), 3),
        (..., slice(None), slice(None)),
        (slice(None), slice(None), slice(None, None, 2)),
        (slice(None), slice(None), slice(None, None, -1)),
        (slice(None), slice(None), np.arange(3)),
        (None, None, None),
        "zyx",
    ],
    ids=repr,
)
def test_what_is_no_box_is_refused(box: Any) -> None:
    with pytest.raises(ValueError, match=r"box must be three slices \(z, y, x\) with step 1"):
        box_of(box, SHAPE)


def rows(pieces: Pieces) -> list[tuple[list[int], tuple[slice, ...], tuple[slice, ...]]]:
    return [(list(pieces.chunk_xyz(i)), pieces.window(i), pieces.place(i)) for i in range(len(pieces))]


@settings(max_examples=40)
@given(boxes)
def test_each_voxel_of_a_box_comes_from_its_place_in_its_chunk(box: Box) -> None:
    bounds = box_of(box, SHAPE)
    shape = tuple(part.stop - part.start for part in bounds)
    # Voxel z, y, x of the volume has the value (z, y, x); so has each voxel of its chunk, 64 times the chunk's place off.
    found = np.full((*shape, 3), -1, np.int64)
    n_voxels = 0
    pieces = pieces_of_box(bounds)
    assert (pieces.target == 0).all()
    seen = set()
    for (x, y, z), window, place in rows(pieces):
        seen.add((x, y, z))
        parts = [64 * c + np.arange(64)[w] for c, w in zip((z, y, x), window, strict=True)]
        voxels = np.stack(np.meshgrid(*parts, indexing="ij"), axis=-1)
        assert voxels.size > 0
        assert (found[place] == -1).all()
        found[place] = voxels
        n_voxels += voxels.size // 3
    assert len(seen) == len(pieces)
    assert n_voxels == np.prod(shape)
    expected = np.stack(np.meshgrid(*(np.arange(p.start, p.stop) for p in bounds), indexing="ij"), axis=-1)
    np.testing.assert_array_equal(found, expected.reshape(found.shape))


@given(boxes)
def test_chunks_are_those_that_the_box_touches(box: Box) -> None:
    bounds = box_of(box, SHAPE)
    touched = [sorted({v // 64 for v in range(part.start, part.stop)}) for part in bounds]
    expected = [[x, y, z] for z in touched[0] for y in touched[1] for x in touched[2]]
    assert [chunk for chunk, _, _ in rows(pieces_of_box(bounds))] == expected


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 128])
def test_an_empty_box_has_no_pieces(axis: int, at: int) -> None:
    box = [slice(3, 70)] * 3
    box[axis] = slice(at, at)
    pieces = pieces_of_box((box[0], box[1], box[2]))
    assert len(pieces) == 0
    for table in (pieces.chunks_xyz, pieces.start_zyx, pieces.shape_zyx, pieces.to_zyx):
        assert table.shape == (0, 3)
        assert table.dtype == np.int64


def test_tables_are_as_the_native_core_wants_them() -> None:
    pieces = pieces_of_box((slice(0, 65), slice(3, 4), slice(60, 200)))
    for table in (pieces.chunks_xyz, pieces.start_zyx, pieces.shape_zyx, pieces.to_zyx):
        assert table.shape == (8, 3)
        assert table.dtype == np.int64
    assert pieces.target.dtype == np.int64
