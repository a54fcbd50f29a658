"""xarray and dask over the store and the filesystem, in threads, processes and a distributed cluster."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from dask.base import tokenize
from distributed import Client, LocalCluster
from exports import Dialect, make_chunk
from sample import BOTH, INFO, SHAPES, sample_files, sample_volume, shard_path, write_files

from zarr_dvid import BlockError, DvidStore, MissingFileError, ReadOnlyError, ShardError

FILES = sample_files() | {"info": json.dumps(INFO).encode()}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("xarray") / "sample", FILES)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with a broken block, in chunk (3, 2, 2)."""
    files = sample_files(Dialect(raw_blocks=True, has_size=False, index="json")) | {"info": json.dumps(INFO).encode()}
    chunk = make_chunk((3, 2, 2))
    shard = bytearray(files[shard_path(0, chunk.xyz)])
    shard[shard.index(chunk.block) + 16 + 8 * len(chunk.table)] ^= 0xFF  # how many labels the first sub-block has
    return write_files(tmp_path_factory.mktemp("broken") / "sample", files | {shard_path(0, chunk.xyz): bytes(shard)})


@pytest.fixture(params=["filesystem", "store"])
def target(request: pytest.FixtureRequest, export: Path) -> Any:
    return f"dvid::file://{export}" if request.param == "filesystem" else DvidStore(export)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        yield client


class TestXarray:
    @pytest.mark.parametrize("level", SHAPES)
    @pytest.mark.parametrize("options", [{}, {"chunks": None}, {"chunks": {}}, {"chunks": {"z": 128}}], ids=repr)
    def test_a_scale_is_a_data_set(self, target: Any, level: int, options: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = xr.open_zarr(target, group=f"s{level}", **options)
        assert set(data.data_vars) == set(BOTH)
        assert data.labels.dims == ("z", "y", "x")
        assert list(data.coords) == ["z", "y", "x"]
        for values in BOTH:
            assert data[values].dtype == np.uint64
            np.testing.assert_array_equal(data[values].to_numpy(), sample_volume(level, values))

    def test_labels_are_selected_by_nanometres(self, target: Any) -> None:
        labels = xr.open_zarr(target, group="s1").labels
        found = labels.sel(z=slice(100, 500), y=slice(204, 700), x=slice(0, 84))
        # Voxels of 16 nm, the first one's centre at 4.
        np.testing.assert_array_equal(found.to_numpy(), sample_volume(1, "labels")[6:32, 13:44, :6])
        assert float(found.z[0]) == 100
        assert float(found.y[0]) == 212

    def test_open_dataset(self, target: Any) -> None:
        data = xr.open_dataset(target, engine="zarr", group="s0", chunks=None)
        window = {"z": slice(60, 70), "y": 5, "x": slice(0, 200, 7)}
        np.testing.assert_array_equal(data.supervoxels.isel(window), sample_volume(0, "supervoxels")[60:70, 5, ::7])

    def test_all_scales_are_a_tree(self, target: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = xr.open_datatree(target, engine="zarr", chunks=None)
        assert list(tree.children) == ["s0", "s1"]
        for level in SHAPES:
            np.testing.assert_array_equal(tree[f"s{level}/labels"].to_numpy(), sample_volume(level, "labels"))

    def test_dask_chunks_are_those_of_the_export(self, target: Any) -> None:
        data = xr.open_zarr(target, group="s0", chunks={})
        assert data.labels.data.chunksize == (64, 64, 64)

    def test_opening_is_lazy(self, tmp_path: Path) -> None:
        folder = write_files(tmp_path, FILES)
        data = xr.open_zarr(f"dvid::file://{folder}", group="s0")
        path = shard_path(0, (3, 2, 2))
        (folder / path).unlink()
        (folder / path).with_suffix(".csv").unlink()
        np.testing.assert_array_equal(data.labels[:64, :64, :64], sample_volume(0, "labels")[:64, :64, :64])
        with pytest.raises(MissingFileError, match=path):
            data.labels[149, 129, 199].compute(scheduler="synchronous")


class TestCopies:
    """What an export holds, in a plain Zarr store."""

    def test_of_a_data_set(self, target: Any, tmp_path: Path) -> None:
        xr.open_zarr(target, group="s1").drop_encoding().to_zarr(tmp_path / "copy", consolidated=False)
        copy = xr.open_zarr(tmp_path / "copy", consolidated=False)
        for values in BOTH:
            np.testing.assert_array_equal(copy[values].to_numpy(), sample_volume(1, values))
        assert copy.x.attrs["units"] == "nanometer"

    def test_of_an_array(self, target: Any, tmp_path: Path) -> None:
        labels = zarr.open_group(target, mode="r")["s1/labels"]
        assert isinstance(labels, zarr.Array)
        copy = zarr.create_array(tmp_path / "zarr", data=labels)
        np.testing.assert_array_equal(copy[...], sample_volume(1, "labels"))
        other = zarr.from_array(tmp_path / "from_array", data=labels, serializer="auto")
        np.testing.assert_array_equal(other[...], sample_volume(1, "labels"))
        da.from_zarr(target, component="s1/labels").to_zarr(tmp_path / "dask")
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "dask")[...], sample_volume(1, "labels"))

    def test_what_to_do_is_told_where_the_records_codec_is_kept(self, target: Any, tmp_path: Path) -> None:
        with pytest.raises(ReadOnlyError, match="drop_encoding"):
            xr.open_zarr(target, group="s1").to_zarr(tmp_path / "copy", consolidated=False)


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(params=["synchronous", "threads", "processes"])
def _scheduler(request: pytest.FixtureRequest) -> Iterator[None]:
    pool = {"pool": request.getfixturevalue("spawned")} if request.param == "processes" else {}
    with dask.config.set(scheduler=request.param, num_workers=2, **pool):
        yield


class TestDask:
    @pytest.mark.usefixtures("_scheduler")
    def test_schedulers(self, target: Any) -> None:
        array = da.from_zarr(target, component="s0/labels")
        assert (array.shape, array.chunksize, array.dtype) == (SHAPES[0], (64, 64, 64), np.uint64)
        assert array.sum().compute() == sample_volume(0, "labels").sum()
        np.testing.assert_array_equal(array[30:100, 5, ::3].compute(), sample_volume(0, "labels")[30:100, 5, ::3])

    def test_rechunked(self, target: Any) -> None:
        array = da.from_zarr(target, component="s1/supervoxels").rechunk((75, 20, 100))
        np.testing.assert_array_equal(array.compute(), sample_volume(1, "supervoxels"))

    def test_names_are_deterministic(self, target: Any, export: Path) -> None:
        labels, again, supervoxels = (da.from_zarr(target, component=f"s0/{v}").name for v in ("labels", *BOTH))
        assert labels == again != supervoxels
        assert tokenize(DvidStore(export)) == tokenize(DvidStore(export)) != tokenize(DvidStore(export, voxel_size=8))

    @pytest.mark.usefixtures("_scheduler")
    def test_errors_arrive_with_their_type_and_message(self, broken: Path) -> None:
        array = da.from_zarr(f"dvid::file://{broken}", component="s0/labels")
        np.testing.assert_array_equal(array[:64, :64].compute(), sample_volume(0, "labels")[:64, :64])
        with pytest.raises(BlockError, match=r"s0/128_128_128\.arrow, chunk \(3, 2, 2\) \(x, y, z\)") as caught:
            array.max().compute()
        assert caught.value.chunk_xyz == (3, 2, 2)


class TestDistributed:
    def test_dask_arrays(self, client: Client, target: Any) -> None:
        for values in BOTH:
            array = da.from_zarr(target, component=f"s0/{values}")
            np.testing.assert_array_equal(client.compute(array).result(timeout=120), sample_volume(0, values))

    def test_xarray(self, client: Client, target: Any) -> None:
        labels = xr.open_zarr(target, group="s0", chunks={}).labels
        found = client.compute((labels != 0).sum(["y", "x"])).result(timeout=120)
        np.testing.assert_array_equal(found, (sample_volume(0, "labels") != 0).sum((1, 2)))

    @pytest.mark.parametrize("kind", ["filesystem", "store"])
    def test_errors_arrive_with_their_type_and_message(self, client: Client, broken: Path, kind: str) -> None:
        target: Any = f"dvid::file://{broken}" if kind == "filesystem" else DvidStore(broken)
        future = client.compute(da.from_zarr(target, component="s0/labels")[149, 129, 199])
        error = future.exception(timeout=120)
        assert isinstance(error, BlockError)
        assert str(error).startswith("s0/128_128_128.arrow, chunk (3, 2, 2) (x, y, z): ")
        assert (error.path, error.chunk_xyz) == ("s0/128_128_128.arrow", (3, 2, 2))
        assert error.advice

    def test_a_shard_that_vanished_is_an_error(self, client: Client, tmp_path: Path) -> None:
        folder = write_files(tmp_path, FILES)
        array = da.from_zarr(f"dvid::file://{folder}", component="s0/labels")
        np.testing.assert_array_equal(
            client.compute(array[:, 129, 199]).result(timeout=120), sample_volume(0, "labels")[:, 129, 199]
        )
        (folder / "s0" / "128_128_128.arrow").unlink()
        error = client.compute(array[149, 129, 199:]).exception(timeout=120)
        assert isinstance(error, ShardError), error
        assert error.path == "s0/128_128_128.arrow"
