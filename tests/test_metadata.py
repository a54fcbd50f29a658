"""The documents of the hierarchy: Zarr v3, OME-Zarr 0.5, coordinates, consolidated metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from exports import make_chunks, volume_info, write_shard
from sample import INFO, SHAPES, sample_files, write_files

import zarr_dvid
from zarr_dvid import DvidStore
from zarr_dvid.metadata import Grid, documents

VIEWS = ("labels", "supervoxels")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("metadata") / "sample", sample_files())


def document(store: DvidStore, path: str) -> dict[str, Any]:
    data = store.hierarchy.get(f"{path}/zarr.json" if path else "zarr.json")
    assert data is not None
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


class TestMultiscales:
    """OME-Zarr 0.5: https://ngff.openmicroscopy.org/0.5, section multiscales."""

    @pytest.fixture(params=[None, 8, (40, 4, 6.5)], ids=["voxels", "one size", "three sizes"])
    def opened(self, request: pytest.FixtureRequest, export: Path) -> tuple[DvidStore, tuple[float, float, float] | None]:
        size = request.param
        return DvidStore(export, voxel_size=size), (size, size, size) if size == 8 else size

    def test_structure(self, opened: tuple[DvidStore, tuple[float, float, float] | None]) -> None:
        store, voxel_size = opened
        attributes = document(store, "")["attributes"]
        assert attributes.keys() == {"ome"}
        ome = attributes["ome"]
        assert ome.keys() == {"version", "multiscales"}
        assert ome["version"] == "0.5"
        assert [view["name"] for view in ome["multiscales"]] == ["sample labels", "sample supervoxels"]
        for view, multiscale in zip(VIEWS, ome["multiscales"], strict=True):
            axis = {"type": "space"} | ({} if voxel_size is None else {"unit": "nanometer"})
            assert multiscale["axes"] == [{"name": name, **axis} for name in "zyx"]
            assert [dataset["path"] for dataset in multiscale["datasets"]] == [f"s0/{view}", f"s1/{view}"]
            for level, dataset in enumerate(multiscale["datasets"]):
                base = np.array(voxel_size or (1, 1, 1))
                scale, translation = dataset["coordinateTransformations"]
                assert scale == {"type": "scale", "scale": (base * 2**level).tolist()}
                # The centre of the first voxel: half a coarse voxel less half a fine one.
                assert translation == {"type": "translation", "translation": ((2**level - 1) / 2 * base).tolist()}

    def test_paths_are_arrays_with_the_axes_as_dimensions(
        self, opened: tuple[DvidStore, tuple[float, float, float] | None]
    ) -> None:
        root: Any = zarr.open_group(opened[0], mode="r")
        for multiscale in document(opened[0], "")["attributes"]["ome"]["multiscales"]:
            names = tuple(axis["name"] for axis in multiscale["axes"])
            for dataset in multiscale["datasets"]:
                array = root[dataset["path"]]
                assert isinstance(array, zarr.Array)
                assert array.metadata.dimension_names == names == ("z", "y", "x")
                assert array.ndim == len(dataset["coordinateTransformations"][0]["scale"]) == 3

    def test_scales_are_ordered_from_fine_to_coarse(self, tmp_path: Path) -> None:
        files: dict[str, bytes] = {}
        for level in (11, 2, 0, 10, 1):
            files |= write_shard(make_chunks((0, 0, 0), seed=level)).files(f"s{level}/0_0_0")
        store = DvidStore(write_files(tmp_path, files))
        multiscale = document(store, "")["attributes"]["ome"]["multiscales"][0]
        assert [d["path"] for d in multiscale["datasets"]] == [f"s{level}/labels" for level in (0, 1, 2, 10, 11)]
        assert multiscale["datasets"][4]["coordinateTransformations"][0]["scale"] == [2048.0] * 3


class TestCoordinates:
    @pytest.mark.parametrize(("options", "base"), [({}, (8, 8, 8)), ({"voxel_size": (40, 4, 6.5)}, (40, 4, 6.5))])
    def test_they_are_the_voxels_centres(
        self, export: Path, options: dict[str, Any], base: tuple[float, float, float]
    ) -> None:
        root: Any = zarr_dvid.open(export, info=INFO, **options)
        for level, shape in SHAPES.items():
            for i, axis in enumerate("zyx"):
                array = root[f"s{level}/{axis}"]
                assert isinstance(array, zarr.Array)
                assert (array.dtype, array.shape, array.chunks) == (np.float64, (shape[i],), (shape[i],))
                finest = np.arange(shape[i] * 2**level).reshape(-1, 2**level)  # the voxels of scale 0 in each
                np.testing.assert_allclose(array[:], base[i] * finest.mean(axis=1), rtol=1e-12)

    def test_they_are_in_nanometres_where_the_info_has_a_voxel_size_and_in_voxels_else(self, export: Path) -> None:
        for options, unit, step in (
            ({}, "voxel", 1),
            ({"info": INFO}, "nanometer", 8),
            ({"info": INFO, "voxel_size": 5}, "nanometer", 5),
        ):
            z = zarr_dvid.open(export, **options)["s0/z"]
            assert isinstance(z, zarr.Array)
            assert z.attrs["units"] == unit
            assert z[:3].tolist() == [0, step, 2 * step]

    def test_voxel_sizes_of_an_info_are_xyz_and_those_of_an_array_zyx(self, export: Path) -> None:
        info = volume_info((200, 130, 150), n_scales=2)
        info["scales"][0]["resolution"] = [4, 5, 60]
        transformations = document(DvidStore(export, info=info), "")["attributes"]["ome"]["multiscales"][0]["datasets"]
        assert transformations[0]["coordinateTransformations"][0]["scale"] == [60, 5, 4]

    def test_xarray_takes_them_as_indexes(self, export: Path) -> None:
        data = xr.open_zarr(DvidStore(export, info=INFO), group="s1", chunks=None)
        assert dict(data.sizes) == {"z": 75, "y": 65, "x": 100}
        assert data.x.attrs == {"long_name": "voxel centre along x", "units": "nanometer"}
        found = data.labels.sel(z=500, y=100, x=1599, method="nearest")
        assert [float(found[axis]) for axis in "zyx"] == [500, 100, 1588]


class TestArrays:
    @pytest.mark.parametrize("level", SHAPES)
    @pytest.mark.parametrize("view", VIEWS)
    def test_documents(self, export: Path, level: int, view: str) -> None:
        store = DvidStore(export, info=INFO)
        found = document(store, f"s{level}/{view}")
        assert found.pop("codecs") == [{"name": "dvid_block", "configuration": {"values": view, "framing": "record"}}]
        assert found == {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(SHAPES[level]),
            "data_type": "uint64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [64, 64, 64]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "attributes": {},
            "dimension_names": ["z", "y", "x"],
        }

    def test_the_volume_starts_at_voxel_0_whatever_is_in_it(self, tmp_path: Path) -> None:
        shard = write_shard(make_chunks((9, 8, 10)))
        root: Any = zarr_dvid.open(write_files(tmp_path, shard.files("s0/512_512_512")))
        array = root["s0/labels"]
        assert isinstance(array, zarr.Array)
        assert array.shape == (704, 576, 640)
        assert not array[:64, :64, :64].any()
        np.testing.assert_array_equal(array[640:, 512:, 576:], make_chunks((9, 8, 10))[0].voxels["labels"])


class TestConsolidatedMetadata:
    def test_the_root_and_each_scale_hold_all_that_is_below_them(self, export: Path) -> None:
        store = DvidStore(export, info=INFO)
        arrays = (*VIEWS, "z", "y", "x")
        below = {"": ["s0", *(f"s0/{a}" for a in arrays), "s1", *(f"s1/{a}" for a in arrays)], "s0": arrays, "s1": arrays}
        for path, names in below.items():
            consolidated = document(store, path)["consolidated_metadata"]
            assert (consolidated["kind"], consolidated["must_understand"]) == ("inline", False)
            assert sorted(consolidated["metadata"]) == sorted(names)
            for name, found in consolidated["metadata"].items():
                assert found == document(store, f"{path}/{name}" if path else name)

    @pytest.mark.parametrize("group", ["", "s0", "s1"])
    def test_zarr_uses_it(self, export: Path, group: str) -> None:
        opened = zarr.open_group(DvidStore(export, info=INFO), path=group, mode="r")
        assert opened.metadata.consolidated_metadata is not None
        assert len(list(opened.members(max_depth=None))) == (12 if not group else 5)

    def test_zarr_needs_no_other_document(self, export: Path) -> None:
        store = DvidStore(export, info=INFO)
        asked: list[str] = []
        get = store.hierarchy.get
        store.hierarchy.get = lambda key: asked.append(key) or get(key)
        root: Any = zarr.open_group(store, mode="r")
        assert [path for path, _ in root.members(max_depth=None)]
        assert root["s1/supervoxels"].shape == SHAPES[1]
        assert [key for key in asked if key.endswith("zarr.json")] == ["zarr.json"]

    def test_it_agrees_with_what_is_found_without_it(self, export: Path) -> None:
        store = DvidStore(export, info=INFO)
        one = zarr.open_group(store, mode="r", use_consolidated=True)
        other = zarr.open_group(store, mode="r", use_consolidated=False)
        assert other.metadata.consolidated_metadata is None
        found, expected = (dict(group.members(max_depth=None)) for group in (one, other))
        assert found.keys() == expected.keys()
        for path, node in found.items():
            if isinstance(node, zarr.Array):
                assert node.metadata == expected[path].metadata


class TestOnlyCoarseScales:
    """The real shard's export has scale 1 alone."""

    @pytest.fixture
    def coarse(self, tmp_path: Path) -> Path:
        return write_files(tmp_path / "coarse", write_shard(make_chunks((1, 0, 0))).files("s1/0_0_0"))

    def test_it_alone_is_shown_and_placed_as_scale_1(self, coarse: Path) -> None:
        store = DvidStore(coarse, voxel_size=8)
        root: Any = zarr.open_group(store, mode="r")
        assert [name for name, _ in root.members()] == ["s1"]
        [dataset] = root.attrs["ome"]["multiscales"][0]["datasets"]
        assert dataset["path"] == "s1/labels"
        scale, translation = dataset["coordinateTransformations"]
        assert (scale["scale"], translation["translation"]) == ([16.0] * 3, [4.0] * 3)
        assert root["s1/x"][:2].tolist() == [4, 20]
        assert store.hierarchy.get("s0/zarr.json") is None

    def test_the_info_of_all_scales_gives_its_size(self, coarse: Path) -> None:
        root: Any = zarr_dvid.open(coarse, info=INFO)
        assert root["s1/labels"].shape == SHAPES[1]

    def test_the_real_shard(self, shared_data: Path) -> None:
        root: Any = zarr_dvid.open(shared_data / "mcns" / "export", info=shared_data / "mcns" / "mcns-ng-specs.json")
        assert [name for name, _ in root.members()] == ["s1"]
        assert root["s1/labels"].shape == (67288, 39159, 47044)
        assert root["s1/x"][0] == 4


def test_an_export_may_lie_in_a_scale_that_it_lacks_others_of(tmp_path: Path) -> None:
    files = {}
    for level in (0, 3):
        files |= write_shard(make_chunks((0, 0, 0), seed=level)).files(f"s{level}/0_0_0")
    root: Any = zarr_dvid.open(write_files(tmp_path, files))
    assert [name for name, _ in root.members()] == ["s0", "s3"]
    assert root["s3/z"][0] == 3.5


def test_documents_of_a_grid_are_plain_json() -> None:
    found = documents(Grid({0: (64, 128, 192)}, (8.0, 8.0, 8.0), "nanometer"), "brain")
    assert list(found) == ["", "s0", "s0/labels", "s0/supervoxels", "s0/z", "s0/y", "s0/x"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
