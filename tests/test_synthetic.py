"""Made-up volumes: the tissue of the demonstration, and the benchmarks' blocks."""

from __future__ import annotations

import hashlib
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from zarr_dvid import BlockInfo, block_info, encode_block
from zarr_dvid.synthetic import neurite_volume

Tissue = tuple[npt.NDArray[np.uint64], dict[int, int]]

VOLUMES = Path(__file__).resolve().parents[1] / "benchmarks" / "volumes.py"


@pytest.fixture(scope="module")
def tissue() -> Tissue:
    return neurite_volume((64, 256, 256))


def test_same_seed_same_volume() -> None:
    shape = (24, 72, 50)
    first, mapping = neurite_volume(shape, seed=3)
    again, mapping_again = neurite_volume(shape, seed=3)
    other, _ = neurite_volume(shape, seed=4)
    assert first.shape == shape
    assert first.dtype == np.uint64
    np.testing.assert_array_equal(first, again)
    assert mapping == mapping_again
    assert (first != other).mean() > 0.5
    # The same on any machine, and with any numpy.
    assert (
        hashlib.sha256(first.astype("<u8").tobytes()).hexdigest()
        == "f7136d67b0ff24137f6bb09a6369a9241db7e1aacf23d1ab76eb293e0e8f787a"
    )


def test_tissue_has_a_surface_with_nothing_beyond(tissue: Tissue) -> None:
    supervoxels, _ = tissue
    assert 0.2 < (supervoxels == 0).mean() < 0.5
    full = supervoxels.reshape(64, 4, 64, 4, 64).max((0, 2, 4)) > 0
    assert not full[0, 0]
    assert full.sum() >= 12
    # Away from the surface next to nothing is left open.
    assert (supervoxels[:, 128:, 128:] == 0).mean() < 0.01


def test_bodies_are_made_of_supervoxels(tissue: Tissue) -> None:
    supervoxels, mapping = tissue
    present = set(np.unique(supervoxels[supervoxels != 0]).tolist())
    assert mapping.keys() <= present
    assert 0.5 * len(present) < len(mapping) < len(present)
    pieces = Counter(mapping.values())
    assert min(pieces.values()) >= 2
    assert max(pieces.values()) >= 10
    # A body goes by the id of one of its own supervoxels, so it never takes the name of somebody else's.
    assert all(mapping[body] == body for body in pieces)
    assert min(present) > 10**10
    assert max(present) - min(present) > 100 * len(present)


def test_processes_are_of_all_widths(tissue: Tissue) -> None:
    supervoxels, mapping = tissue
    ids, place = np.unique(supervoxels[32], return_inverse=True)
    bodies = np.array([mapping.get(id_, id_) for id_ in ids.tolist()], np.uint64)[place]
    areas = np.sort(np.unique(bodies[bodies != 0], return_counts=True)[1])
    assert 100 < areas.size < 500
    assert areas[-1] > 1000
    assert np.median(areas) < 150


def test_one_voxel_is_a_volume() -> None:
    supervoxels, mapping = neurite_volume((1, 1, 1))
    assert supervoxels.shape == (1, 1, 1)
    assert not mapping


@pytest.fixture(scope="module")
def volumes() -> dict[str, Any]:
    if not VOLUMES.exists():
        pytest.skip("needs the benchmarks, which a source distribution leaves out")
    return runpy.run_path(str(VOLUMES))


def infos(volume: npt.NDArray[np.uint64]) -> list[BlockInfo]:
    return [block_info(encode_block(volume[:, :, x : x + 64])) for x in range(0, volume.shape[2], 64)]


def test_dense_blocks_are_as_dense_as_scale_3(volumes: dict[str, Any]) -> None:
    (info,) = infos(volumes["dense_volume"](64))
    assert 1650 <= info.n_labels <= 1950
    assert 12 <= info.n_subblock_labels / 512 <= 14


def test_sparse_blocks_are_as_sparse_as_scale_0(volumes: dict[str, Any]) -> None:
    volume = volumes["sparse_volume"](128)[:64, :64]
    for info in infos(volume):
        assert 17 <= info.n_labels <= 33
    subblocks = volume.reshape(8, 8, 8, 8, 16, 8).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 512)
    n_labels = np.array([np.unique(subblock).size for subblock in subblocks])
    assert 0.5 <= (n_labels == 1).mean() <= 0.7
    assert 2 <= n_labels[n_labels > 1].mean() <= 3
