"""Settings: which pipeline is put in place, how many threads decode, how much is held."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from conftest import ZARR_PIPELINE
from distributed import Client, LocalCluster
from sample import INFO, sample_files, sample_volume, write_files
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import get_pipeline_class

import zarr_dvid
from zarr_dvid import DvidStore
from zarr_dvid.configuration import PIPELINE, max_in_flight_bytes, n_decode_threads, use_pipeline
from zarr_dvid.filesystem import DvidFileSystem
from zarr_dvid.pipeline import DvidPipeline

N_PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = sample_files() | {"info": json.dumps(INFO).encode()}
    return write_files(tmp_path_factory.mktemp("configuration") / "sample", files)


@pytest.fixture(autouse=True)
def _as_zarr_has_it() -> Iterator[None]:
    """Zarr's configuration as in a new process, and afterwards as it was."""
    with zarr.config.set({"codec_pipeline.path": ZARR_PIPELINE}):
        yield


def path_in_place() -> str:
    path: str = zarr.config.get("codec_pipeline.path")
    return path


class TestPipeline:
    def test_its_name_is_that_of_the_class(self) -> None:
        assert f"{DvidPipeline.__module__}.{DvidPipeline.__qualname__}" == PIPELINE

    def test_the_default_is_still_zarrs(self) -> None:
        assert zarr.config.defaults[0]["codec_pipeline"]["path"] == ZARR_PIPELINE
        assert f"{BatchedCodecPipeline.__module__}.{BatchedCodecPipeline.__qualname__}" == ZARR_PIPELINE

    def test_the_entry_point(self) -> None:
        (entry,) = importlib.metadata.entry_points(group="zarr.codec_pipeline", name="dvid")
        assert entry.load() is DvidPipeline

    @pytest.mark.parametrize(
        "open_",
        [
            DvidStore,
            zarr_dvid.open,
            lambda path: DvidFileSystem(str(path)),
            lambda path: zarr.open(f"dvid::file://{path}", mode="r"),
            lambda path: fsspec.get_mapper(f"dvid::file://{path}"),
        ],
        ids=["store", "open", "filesystem", "zarr.open", "mapper"],
    )
    def test_opening_puts_it_in_place(self, export: Path, open_: Callable[[Path], Any]) -> None:
        assert path_in_place() == ZARR_PIPELINE
        open_(export)
        assert path_in_place() == PIPELINE
        assert get_pipeline_class() is DvidPipeline

    def test_unpickling_puts_it_in_place(self, export: Path) -> None:
        pickled = pickle.dumps(DvidStore(export))
        zarr.config.set({"codec_pipeline.path": ZARR_PIPELINE})
        pickle.loads(pickled)
        assert path_in_place() == PIPELINE

    def test_importing_does_not(self) -> None:
        program = "import zarr, zarr_dvid, zarr_dvid.filesystem; print(zarr.config.get('codec_pipeline.path'))"
        assert in_a_process(program) == ZARR_PIPELINE

    def test_it_can_be_turned_off(self, export: Path) -> None:
        with zarr.config.set({"dvid.pipeline": False}):
            array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
            zarr.open(f"dvid::file://{export}", mode="r")
        assert path_in_place() == ZARR_PIPELINE
        assert type(array.async_array.codec_pipeline) is BatchedCodecPipeline
        np.testing.assert_array_equal(array[60:70, 3, :], sample_volume(0, "labels")[60:70, 3, :])

    @pytest.mark.parametrize("value", [True, None])
    def test_it_can_be_left_on(self, export: Path, value: Any) -> None:
        settings = {} if value is None else {"dvid.pipeline": value}
        with zarr.config.set(settings):
            DvidStore(export)
            assert path_in_place() == PIPELINE

    def test_it_can_be_turned_off_by_the_environment(self, export: Path) -> None:
        program = f"import zarr, zarr_dvid; zarr_dvid.open({str(export)!r}); print(zarr.config.get('codec_pipeline.path'))"
        assert in_a_process(program, ZARR_DVID__PIPELINE="False") == ZARR_PIPELINE
        assert in_a_process(program) == PIPELINE

    def test_another_one_is_left_alone(self, export: Path) -> None:
        other = "some.other.Pipeline"
        with zarr.config.set({"codec_pipeline.path": other}):
            DvidStore(export)
            DvidFileSystem(str(export))
            use_pipeline()
            assert path_in_place() == other

    def test_arrays_that_were_open_keep_theirs(self, export: Path, tmp_path: Path) -> None:
        array = zarr.create_array(tmp_path / "a.zarr", shape=(8,), dtype="i4")
        DvidStore(export)
        assert type(array.async_array.codec_pipeline) is BatchedCodecPipeline


def in_a_process(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return done.stdout.strip()


def give_threads(*_: Any) -> int:
    return n_decode_threads()


BAD_NUMBERS: list[Any] = [0, -1, True, False, 1.0, 2.5, "2", "", [1], float("nan"), float("inf")]


class TestThreads:
    def test_all_processors_by_default(self) -> None:
        assert n_decode_threads() == N_PROCESSORS

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
    def test_those_that_the_process_may_use(self) -> None:
        program = (
            "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
            "from zarr_dvid.configuration import n_decode_threads; print(n_decode_threads())"
        )
        assert in_a_process(program) == "1"

    @pytest.mark.parametrize("threads", [1, 3, 64])
    def test_as_told(self, threads: int) -> None:
        assert n_decode_threads(threads) == threads
        with zarr.config.set({"dvid.threads": threads}):
            assert n_decode_threads() == threads
            assert n_decode_threads(2) == 2
        with zarr.config.set({"dvid.threads": None}):
            assert n_decode_threads() == N_PROCESSORS

    def test_any_kind_of_integer(self) -> None:
        assert n_decode_threads(np.int64(3)) == 3
        assert n_decode_threads(np.uint8(2)) == 2

    def test_as_the_environment_tells(self) -> None:
        program = "from zarr_dvid.configuration import n_decode_threads; print(n_decode_threads())"
        assert in_a_process(program, ZARR_DVID__THREADS="3") == "3"

    @pytest.mark.parametrize("threads", BAD_NUMBERS, ids=repr)
    def test_what_is_no_number_is_refused(self, export: Path, threads: Any) -> None:
        with pytest.raises(ValueError, match="threads must be 1 or more"):
            DvidStore(export, threads=threads)
        with pytest.raises(ValueError, match="threads must be 1 or more"):
            DvidFileSystem(str(export), threads=threads)
        with zarr.config.set({"dvid.threads": threads}), pytest.raises(ValueError, match="threads must be 1 or more"):
            n_decode_threads()

    def test_a_bad_setting_does_not_read_as_0(self, export: Path) -> None:
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        with zarr.config.set({"dvid.threads": 0}), pytest.raises(ValueError, match="threads must be 1 or more"):
            array[0, 0, 0]
        assert array[1, 2, 3] == sample_volume(0, "labels")[1, 2, 3]

    def test_a_number_beyond_all_machines(self, export: Path) -> None:
        for threads in (2**31, 2**32, 2**64):
            store = DvidStore(export, threads=threads)
            np.testing.assert_array_equal(store.read(0, [slice(64)] * 3), sample_volume(0, "labels")[:64, :64, :64])

    def test_a_store_keeps_its_number(self, export: Path) -> None:
        store = DvidStore(export, threads=3)
        for some in (store, pickle.loads(pickle.dumps(store)), store.with_read_only(True)):
            assert some.hierarchy.threads == 3
        assert store != DvidStore(export)
        filesystem = DvidFileSystem(str(export), threads=2)
        for same in (filesystem, pickle.loads(pickle.dumps(filesystem))):
            assert same.hierarchy.threads == 2


class TestDask:
    """In a dask worker, no more threads than it was given."""

    def test_a_worker_of_this_process(self) -> None:
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, memory_limit=0) as one,
            Client(one) as client,
        ):
            assert client.submit(give_threads, pure=False).result(60) == 1
            assert n_decode_threads() == 1
            assert n_decode_threads(8) == 1
            with zarr.config.set({"dvid.threads": 8}):
                assert client.submit(give_threads, pure=False).result(60) == 1

    def test_workers_of_this_process_share(self) -> None:
        with (
            LocalCluster(n_workers=2, threads_per_worker=3, processes=False, dashboard_address=None, memory_limit=0) as two,
            Client(two) as client,
        ):
            assert n_decode_threads(64) == 6
            assert client.submit(n_decode_threads, 64, pure=False).result(60) == 6
            assert n_decode_threads() == min(6, N_PROCESSORS or 1)
            assert n_decode_threads(2) == 2

    def test_a_worker_that_was_closed_does_not_count(self) -> None:
        for _ in range(2):
            with (
                LocalCluster(
                    n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, memory_limit=0
                ) as cluster,
                Client(cluster),
            ):
                assert n_decode_threads(5) == 1
            assert n_decode_threads(5) == 5

    def test_a_worker_in_a_process_of_its_own(self) -> None:
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
            ) as cluster,
            Client(cluster) as client,
        ):
            assert client.submit(give_threads, pure=False).result(60) == 1
            assert client.submit(n_decode_threads, 64, pure=False).result(60) == 1
            assert n_decode_threads(64) == 64  # only the client is here


class TestBytesInFlight:
    def test_default(self) -> None:
        assert max_in_flight_bytes() == 64 << 20

    def test_as_told(self) -> None:
        with zarr.config.set({"dvid.max_in_flight_bytes": 5}):
            assert max_in_flight_bytes() == 5

    @pytest.mark.parametrize("wanted", [*BAD_NUMBERS, None], ids=repr)
    def test_what_is_no_number_is_refused(self, export: Path, wanted: Any) -> None:
        array = zarr.open_array(DvidStore(export), path="s0/labels", mode="r")
        with zarr.config.set({"dvid.max_in_flight_bytes": wanted}):
            with pytest.raises(ValueError, match="max_in_flight_bytes must be 1 or more"):
                max_in_flight_bytes()
            with pytest.raises(ValueError, match="max_in_flight_bytes must be 1 or more"):
                array[0, 0, 0]
