"""Reading from many threads, after fork, under spawn, and all of it at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from exports import CountingReader, MemoryReader
from sample import BOTH, CHUNKS, INFO, SHAPES, sample_files, sample_volume, window_of_chunk, write_files

from zarr_dvid import DvidStore, ShardError
from zarr_dvid.hierarchy import Hierarchy

TIMEOUT_S = 120  # for what takes a moment unless it never ends

pytestmark = [
    # Python 3.12 and later warn of what is tested here.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = sample_files() | {"info": json.dumps(INFO).encode()}
    return write_files(tmp_path_factory.mktemp("processes") / "sample", files)


def digest(voxels: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(voxels).tobytes()).hexdigest()


EXPECTED = {f"s{level}/{values}": digest(sample_volume(level, values)) for level in SHAPES for values in BOTH}


def read_all(root: zarr.Group) -> dict[str, str]:
    """The voxels of all arrays, hashed."""
    return {path: digest(root[path][...]) for path in EXPECTED}


def open_and_read(target: Any) -> dict[str, str]:
    return read_all(zarr.open_group(target, mode="r"))


def read_in_threads(target: Any, n_threads: int) -> list[dict[str, str]]:
    root = zarr.open_group(target, mode="r")
    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(read_all, [root] * n_threads))


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send((True, function(*arguments)))
    except BaseException as error:
        connection.send((False, error))


def in_a_child(context: BaseContext, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, or raises, in a child process; a child that hangs is killed, and the test fails."""
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, arguments))
    child.start()
    try:
        if not receiver.poll(TIMEOUT_S):
            pytest.fail("the child process hangs")
        succeeded, result = receiver.recv()
    finally:
        child.kill()
        child.join()
    if not succeeded:
        raise result
    return result


FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["store", "filesystem"])
def target(request: pytest.FixtureRequest, export: Path) -> DvidStore | str:
    return DvidStore(export) if request.param == "store" else f"dvid::file://{export}"


class TestFork:
    def test_a_child_of_a_process_that_has_read(self, target: Any) -> None:
        root = zarr.open_group(target, mode="r")
        assert read_all(root) == EXPECTED
        assert in_a_child(FORK, read_all, root) == EXPECTED
        assert in_a_child(FORK, open_and_read, target) == EXPECTED
        assert read_all(root) == EXPECTED

    def test_a_child_of_a_process_that_has_not(self, export: Path) -> None:
        assert in_a_child(FORK, open_and_read, DvidStore(export)) == EXPECTED

    def test_a_child_of_a_child(self, target: Any) -> None:
        assert open_and_read(target) == EXPECTED
        assert in_a_child(FORK, in_a_child, FORK, open_and_read, target) == EXPECTED

    def test_children_of_a_process_that_is_reading(self, target: Any) -> None:
        root = zarr.open_group(target, mode="r")
        stop = threading.Event()

        def read_on() -> int:
            n_wrong = 0
            while not stop.is_set():
                n_wrong += open_and_read(target) != EXPECTED
            return n_wrong

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read_on) for _ in range(2)]
            try:
                for _ in range(6):
                    assert in_a_child(FORK, read_all, root) == EXPECTED
            finally:
                stop.set()
            assert [reader.result(TIMEOUT_S) for reader in readers] == [0, 0]

    @pytest.mark.parametrize("where", ["s0/0_0_0.csv", "s0/0_0_0.arrow", "info", "list"])
    def test_a_child_of_a_process_that_is_loading_what_the_child_needs(self, where: str) -> None:
        """The parent's thread holds whatever lock there is while it reads; in the child it does not go on."""
        parent = os.getpid()
        is_loading, go_on = threading.Event(), threading.Event()

        def wait_in_the_parent(path: str) -> None:
            if os.getpid() == parent and path == where:
                is_loading.set()
                assert go_on.wait(TIMEOUT_S)

        class Reader(CountingReader):
            def list(self, path: str) -> Any:
                if path == "s0":
                    wait_in_the_parent("list")
                return super().list(path)

        files = sample_files() | {"info": json.dumps(INFO).encode()}
        reader = Reader(MemoryReader(files), before_read=wait_in_the_parent)
        store = DvidStore("memory-of-the-test")
        store.hierarchy = Hierarchy(lambda: reader, name="sample")
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(open_and_read, store)
            try:
                assert is_loading.wait(TIMEOUT_S)
                assert in_a_child(FORK, open_and_read, store) == EXPECTED
            finally:
                go_on.set()
            assert loading.result(TIMEOUT_S) == EXPECTED


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
        yield pool


class TestSpawn:
    def test_arrays_groups_stores_and_urls_travel(self, target: Any, spawned: ProcessPoolExecutor) -> None:
        root = zarr.open_group(target, mode="r")
        assert spawned.submit(read_all, root).result(TIMEOUT_S) == EXPECTED
        assert spawned.submit(open_and_read, target).result(TIMEOUT_S) == EXPECTED

    def test_errors_arrive_whole(self, tmp_path: Path, spawned: ProcessPoolExecutor) -> None:
        store = DvidStore(write_files(tmp_path, sample_files()), info=INFO)
        assert open_and_read(store) == EXPECTED
        (tmp_path / "s1" / "0_0_0.arrow").unlink()
        (tmp_path / "s1" / "0_0_0.csv").write_bytes(b"")
        with pytest.raises(ShardError, match=r"s1/0_0_0\.arrow.*missing") as caught:
            spawned.submit(open_and_read, store).result(TIMEOUT_S)
        assert caught.value.path == "s1/0_0_0.arrow"

    def test_8_threads_in_each_of_2_processes(self, target: Any, spawned: ProcessPoolExecutor) -> None:
        jobs = [spawned.submit(read_in_threads, target, 8) for _ in range(2)]
        assert [job.result(TIMEOUT_S) for job in jobs] == [[EXPECTED] * 8] * 2


class TestThreads:
    def test_8_threads_load_each_index_once(self) -> None:
        n_threads = 8
        barrier = threading.Barrier(n_threads)
        files = sample_files() | {"info": json.dumps(INFO).encode()}
        reader = CountingReader(MemoryReader(files))
        hierarchy = Hierarchy(lambda: reader, name="sample")
        keys = [f"s0/labels/c/{z}/{y}/{x}" for x, y, z in CHUNKS[0]]

        def read_chunks(_: int) -> list[bytes | None]:
            barrier.wait(TIMEOUT_S)
            return [hierarchy.get(key) for key in keys]

        with ThreadPoolExecutor(n_threads) as pool:
            first, *others = pool.map(read_chunks, range(n_threads))
        assert None not in first
        assert all(other == first for other in others)
        indexes = Counter(path for method, path in reader.taken() if path.endswith(".csv"))
        assert set(indexes.values()) == {1}

    def test_threads_that_wait_for_a_failed_load_fail_alike_and_the_next_one_tries_again(self) -> None:
        n_threads = 8
        barrier = threading.Barrier(n_threads)
        files = sample_files() | {"info": json.dumps(INFO).encode()}
        memory = MemoryReader(files)
        index = memory.files["s0/0_0_0.csv"]
        memory.files["s0/0_0_0.csv"] = b"0" * len(index)
        hierarchy = Hierarchy(lambda: memory, name="sample")

        def read_chunk(_: int) -> str:
            barrier.wait(TIMEOUT_S)
            with pytest.raises(OSError, match=r"s0/0_0_0\.csv") as caught:
                hierarchy.get("s0/labels/c/0/0/0")
            return str(caught.value)

        with ThreadPoolExecutor(n_threads) as pool:
            assert len(set(pool.map(read_chunk, range(n_threads)))) == 1
        memory.files["s0/0_0_0.csv"] = index
        assert hierarchy.get("s0/labels/c/0/0/0") is not None

    def test_a_shard_that_goes_while_they_read_raises_in_all_of_them(self, tmp_path: Path) -> None:
        folder = write_files(tmp_path, sample_files())
        labels = zarr.open_group(DvidStore(folder, info=INFO), mode="r")["s0/labels"]
        assert isinstance(labels, zarr.Array)
        window = window_of_chunk((1, 1, 1))
        n_threads = 4
        barrier = threading.Barrier(n_threads + 1)

        def read_on() -> None:
            barrier.wait(TIMEOUT_S)
            while True:
                np.testing.assert_array_equal(labels[window], sample_volume(0, "labels")[window])

        with ThreadPoolExecutor(n_threads) as pool:
            readers = [pool.submit(read_on) for _ in range(n_threads)]
            barrier.wait(TIMEOUT_S)
            np.testing.assert_array_equal(labels[...], sample_volume(0, "labels"))
            (folder / "s0" / "0_0_0.arrow").unlink()
            errors = [reader.exception(TIMEOUT_S) for reader in readers]
        assert all(isinstance(error, ShardError) for error in errors), errors
