from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zarr_dvid.downsample import downsample_majority

LARGEST = 2**64 - 1


def naive_majority(volume: np.ndarray) -> np.ndarray:
    """The rule in words, voxel by voxel."""
    padded = np.pad(volume, [(0, n % 2) for n in volume.shape], mode="edge")
    halved = np.empty([n // 2 for n in padded.shape], np.uint64)
    for z, y, x in np.ndindex(halved.shape):
        counts = Counter(padded[2 * z : 2 * z + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].ravel().tolist())
        most = max(counts.values())
        tied = [label for label, count in counts.items() if count == most]
        halved[z, y, x] = min([label for label in tied if label] or [0])
    return halved


@settings(deadline=None)
@given(
    arrays(
        np.uint64,
        st.tuples(*[st.integers(1, 7)] * 3),
        elements=st.sampled_from([0, 0, 1, 2, 3, LARGEST - 1, LARGEST]),
    )
)
def test_every_voxel_follows_the_rule(volume):
    before = volume.copy()
    np.testing.assert_array_equal(downsample_majority(volume), naive_majority(volume))
    np.testing.assert_array_equal(volume, before)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 5), min_size=8, max_size=8), st.permutations(range(8)))
def test_the_order_of_the_eight_voxels_does_not_matter(labels, order):
    cube = np.array(labels, np.uint64)
    expected = naive_majority(cube.reshape(2, 2, 2))
    np.testing.assert_array_equal(downsample_majority(cube[list(order)].reshape(2, 2, 2)), expected)


@pytest.mark.parametrize(
    ("labels", "winner"),
    [
        ([0, 0, 0, 0, 9, 9, 9, 9], 9),
        ([0, 0, 0, 0, 0, 9, 9, 9], 0),
        ([9, 9, 9, 5, 5, 5, 0, 0], 5),
        ([0, 0, 0, LARGEST, LARGEST, LARGEST, 1, 1], LARGEST),
        ([8, 7, 6, 5, 4, 3, 2, 0], 2),
        ([0] * 8, 0),
        ([LARGEST] * 8, LARGEST),
    ],
)
def test_ties(labels, winner):
    assert downsample_majority(np.array(labels, np.uint64).reshape(2, 2, 2)).tolist() == [[[winner]]]


def test_views_of_any_strides_are_taken():
    volume = np.random.default_rng(0).integers(0, 3, (9, 12, 10)).astype(np.uint64)
    for view in (volume.T, volume[::-1, ::2, 1::3], np.asfortranarray(volume)):
        np.testing.assert_array_equal(downsample_majority(view), naive_majority(view))


def test_a_solid_volume_stays_solid():
    assert (downsample_majority(np.full((5, 4, 3), 7, np.uint64)) == np.full((3, 2, 2), 7)).all()


def test_other_arrays_are_refused():
    with pytest.raises(TypeError, match="uint64, not int64"):
        downsample_majority(np.zeros((2, 2, 2), np.int64))
    with pytest.raises(ValueError, match="three dimensions"):
        downsample_majority(np.zeros((2, 2), np.uint64))
