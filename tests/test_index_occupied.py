"""Which blocks exist, from the index alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exports import XYZ, make_chunk, make_chunks, volume_info, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexed import make_index, open_indexed, put, shards_of

import zarr_dvid
from zarr_dvid.errors import ExportError, ShardIndexError
from zarr_dvid.export import Export
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.reader import LocalReader

SOUND = {
    "s0/0_0_0": [(0, 0, 0), (1, 2, 3), (7, 7, 7)],
    "s0/512_0_0": [(8, 1, 1), (15, 0, 2)],
    "s0/512_512_512": [(8, 8, 8), (9, 15, 10)],
    "s1/0_0_0": [(0, 1, 0)],
}
SCATTERED = {
    "s0/0_0_0": [(3, 3, 3), (0, 1, 0), (9, 2, 2)],
    "s0/512_0_0": [(9, 1, 2), (1, 1, 1), (15, 7, 0), (3, 3, 3)],
    "s0/0_512_0": [(1, 8, 1), (1, 1, 1), (9, 2, 2), (9, 1, 2)],
}


@pytest.fixture(scope="module", params=["sound", "scattered"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    files = shards_of(SOUND if request.param == "sound" else SCATTERED)
    make_index(put(root / "export", files), root / "index")
    return root


def chunks_of(folder: Path) -> set[XYZ]:
    shards = SOUND if folder.name.startswith("sound") else SCATTERED
    return {xyz for name, some in shards.items() if name.startswith("s0") for xyz in some}


bound = st.none() | st.integers(-300, 1100)


@given(box=st.none() | st.tuples(*[st.builds(slice, bound, bound)] * 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@pytest.mark.parametrize("with_index", [True, False])
def test_a_box_has_the_blocks_that_overlap_it(folder: Path, with_index: bool, box: tuple[slice, ...] | None) -> None:
    hierarchy = zarr_dvid.DvidStore(folder / "export", index=folder / "index" if with_index else False).hierarchy
    size_xyz = hierarchy.export.scales[0].size_xyz
    expected = set()
    for xyz in chunks_of(folder):
        voxels = [set(range(64 * c, 64 * c + 64)) for c in xyz]
        wanted = [set(range(n)[part]) for part, n in zip((box or (slice(None),) * 3)[::-1], size_xyz, strict=True)]
        if all(one & other for one, other in zip(voxels, wanted, strict=True)):
            expected.add(xyz[::-1])
    found = [tuple(zyx) for part in hierarchy.occupied(0, box) for zyx in part.tolist()]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_only_shards_that_may_overlap_are_loaded(tmp_path: Path) -> None:
    put(tmp_path / "export", shards_of(SOUND))
    make_index(tmp_path / "export", tmp_path / "index")
    _, reader, index = open_indexed(tmp_path / "export", tmp_path / "index")
    hierarchy = Hierarchy(lambda: reader, name="x", index=lambda: index)
    list(hierarchy.occupied(0, (slice(0, 64), slice(0, 64), slice(0, 64))))
    reader.taken(), index.taken()
    parts = list(hierarchy.occupied(0, (slice(512, 513), slice(None), slice(512, 600))))
    assert [part.tolist() for part in parts] == [[[8, 8, 8], [10, 15, 9]]] or [part.tolist() for part in parts] == [
        [[8, 8, 8]]
    ]
    assert len(index.taken()) == 1
    assert reader.taken() == []
    assert all(part.dtype == np.int64 for part in parts)


def test_a_store_tells_them(tmp_path: Path) -> None:
    store = zarr_dvid.DvidStore(put(tmp_path / "export", shards_of(SOUND)))
    assert np.concatenate(list(store.occupied(1))).tolist() == [[0, 1, 0]]
    assert list(store.occupied(0, (slice(0, 0), slice(None), slice(None)))) == []
    with pytest.raises(ExportError, match="no such scale"):
        list(store.occupied(7))
    for box in ((slice(None),) * 2, (slice(0, 9, 2), slice(None), slice(None))):
        with pytest.raises(ValueError, match="three slices"):
            list(store.occupied(0, box))


def test_a_broken_shard_matters_where_it_may_overlap(tmp_path: Path) -> None:
    files = shards_of(SOUND) | {"s0/512_512_512.csv": b"", "info": _info()}
    store = zarr_dvid.DvidStore(put(tmp_path / "export", files))
    near = (slice(0, 512), slice(0, 512), slice(None))
    with pytest.warns(zarr_dvid.ExportWarning, match="taken to be absent"):
        assert len(np.concatenate(list(store.occupied(0, near)))) == 5
    for box in (None, (slice(500, 520), slice(600, 700), slice(600, 700))):
        with pytest.raises(ShardIndexError):
            list(store.occupied(0, box))


def test_a_box_of_a_scattered_scale_with_a_broken_shard_is_refused(tmp_path: Path) -> None:
    files = shards_of({**SCATTERED, "s0/512_512_512": [(8, 8, 8)]}) | {"s0/512_512_512.csv": b"", "info": _info()}
    store = zarr_dvid.DvidStore(put(tmp_path / "export", files))
    with pytest.raises(ShardIndexError):
        list(store.occupied(0, (slice(0, 64),) * 3))


def _info() -> bytes:
    import json

    return json.dumps(volume_info((1024, 1024, 1024), n_scales=2)).encode()


def test_blocks_past_the_end_are_left_out(tmp_path: Path) -> None:
    folder = put(tmp_path / "export", shards_of({"s0/0_0_0": [(0, 1, 2), (3, 3, 3)]}))
    store = zarr_dvid.DvidStore(folder, info=volume_info((192, 192, 192)))
    with pytest.warns(zarr_dvid.ExportWarning, match="past the end"):
        assert np.concatenate(list(store.occupied(0))).tolist() == [[2, 1, 0]]
    assert np.concatenate(list(store.occupied(0, (slice(None),) * 3))).tolist() == [[2, 1, 0]]


def test_a_block_of_several_records_comes_once(tmp_path: Path) -> None:
    twice = [make_chunk((1, 1, 1)), make_chunk((1, 1, 1), seed=1), *make_chunks((2, 2, 2))]
    folder = put(tmp_path / "export", write_shard(twice).files())
    assert sum(map(len, Export(LocalReader(folder)).scales[0].occupied())) == 2
