"""The cache of shards: bounded, made once for many threads, and whole again after failures and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from exports import CountingReader, Dialect, MemoryReader, make_chunk, make_chunks, write_shard
from hypothesis import given
from hypothesis import strategies as st

from zarr_dvid.cache import ByteBoundedCache
from zarr_dvid.errors import MissingFileError, ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export

N_THREADS = 16


@dataclass(eq=False)
class Value:
    nbytes: int = 1


def maker(made: list[object], key: object, nbytes: int = 1) -> Callable[[], Value]:
    def make() -> Value:
        made.append(key)
        return Value(nbytes)

    return make


# ---- bounded


def test_values_are_kept() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(3)
    made: list[object] = []
    first = cache.get("a", maker(made, "a"))
    assert cache.get("a", maker(made, "a")) is first
    assert cache.get("b", maker(made, "b")) is not first
    assert (made, cache.nbytes) == (["a", "b"], 2)


def test_the_least_recently_used_goes() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(3)
    made: list[object] = []
    for key in ("a", "b", "c", "a", "d"):
        cache.get(key, maker(made, key))
    assert made == ["a", "b", "c", "d"]
    for key in ("a", "c", "d"):
        cache.get(key, maker(made, key))
    assert made == ["a", "b", "c", "d"]
    cache.get("b", maker(made, "b"))
    assert made == ["a", "b", "c", "d", "b"]
    assert cache.nbytes == 3


def test_what_goes_is_freed() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(1)
    first = weakref.ref(cache.get("a", Value))
    cache.get("b", Value)
    gc.collect()
    assert first() is None


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=60), st.integers(0, 20))
def test_never_more_than_the_bound_beside_the_newest(gets: list[tuple[int, int]], max_bytes: int) -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(max_bytes)
    sizes: dict[int, int] = {}
    order: list[int] = []  # least recently used first: what the cache must hold
    for key, nbytes in gets:
        made: list[object] = []
        sizes[key] = cache.get(key, maker(made, key, nbytes)).nbytes
        assert bool(made) == (key not in order)
        order = [k for k in order if k != key] + [key]
        if made:
            while sum(sizes[k] for k in order) > max_bytes and len(order) > 1:
                order.pop(0)
        assert cache.nbytes == sum(sizes[k] for k in order)
        assert cache.nbytes <= max(max_bytes, sizes[key])


def test_a_value_larger_than_the_cache_stays_while_it_is_the_newest() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(3)
    made: list[object] = []
    for key, nbytes in (("a", 1), ("large", 100), ("large", 100), ("b", 1)):
        cache.get(key, maker(made, key, nbytes))
    assert made == ["a", "large", "b"]
    assert cache.nbytes == 1


# ---- many threads


def run_together(work: Callable[[int], object]) -> list[object]:
    """`work` in many threads that start at once."""
    barrier = threading.Barrier(N_THREADS)

    def start(i: int) -> object:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(start, range(N_THREADS)))


def test_one_makes_what_many_ask_for() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(10)
    made: list[object] = []

    def make() -> Value:
        made.append(None)
        time.sleep(0.05)
        return Value()

    values = run_together(lambda _: cache.get("a", make))
    assert len(made) == 1
    assert len(set(map(id, values))) == 1
    assert cache.nbytes == 1


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(10)
    made: list[object] = []

    def fail() -> Value:
        made.append(None)
        time.sleep(0.05)
        raise ShardIndexError("broken", path="p")

    def ask(_: int) -> object:
        with pytest.raises(ShardIndexError) as caught:
            cache.get("a", fail)
        return str(caught.value)

    assert len(set(run_together(ask))) == 1
    assert len(made) < N_THREADS
    assert cache.nbytes == 0
    assert cache.get("a", Value).nbytes == 1


def test_a_failure_leaves_no_cycle() -> None:
    """What the callers' frames hold is free at once, not when the garbage collector comes round."""
    cache: ByteBoundedCache[Value] = ByteBoundedCache(10)

    def fail() -> Value:
        raise ShardIndexError("broken", path="p")

    def ask(mine: Value) -> int:
        with contextlib.suppress(ShardIndexError):
            cache.get("a", fail)
        return mine.nbytes

    value = Value()
    held = weakref.ref(value)
    gc.disable()
    try:
        ask(value)
        del value
        assert held() is None
    finally:
        gc.enable()


def test_an_interrupt_leaves_no_one_waiting() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(10)

    def interrupted() -> Value:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get("a", interrupted)
    assert cache.get("a", Value).nbytes == 1


def test_many_threads_and_keys_keep_the_account() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(50)

    def work(seed: int) -> None:
        for i in range(300):
            key = (seed * 7919 + i * 104729) % 40
            nbytes = key % 9
            assert cache.get(key, lambda n=nbytes: Value(n)).nbytes == nbytes

    run_together(work)
    assert 0 <= cache.nbytes <= 50
    kept = sum(future.result().nbytes for future in cache._futures.values())
    assert cache.nbytes == kept


def test_a_slow_one_does_not_hold_up_others() -> None:
    cache: ByteBoundedCache[Value] = ByteBoundedCache(1)
    go_on = threading.Event()

    def slow() -> Value:
        assert go_on.wait(20)
        return Value()

    thread = threading.Thread(target=lambda: cache.get("slow", slow))
    thread.start()
    for key in "abcdef":
        assert cache.get(key, Value).nbytes == 1
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    assert cache.nbytes <= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_anew() -> None:
    """While another thread of the parent makes something, which the child's copy would wait for without end."""
    cache: ByteBoundedCache[Value] = ByteBoundedCache(10)
    started, go_on = threading.Event(), threading.Event()

    def slow() -> Value:
        started.set()
        assert go_on.wait(20)
        return Value()

    thread = threading.Thread(target=lambda: cache.get("a", slow))
    thread.start()
    assert started.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(cache.get("a", lambda: Value(7)).nbytes)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join(20)
    assert os.waitstatus_to_exitcode(status) == 7


# ---- shards


def test_a_shards_index_is_read_once_for_many_threads() -> None:
    chunks = make_chunks(*[(x, y, 0) for x in range(4) for y in range(4)])
    assert len(chunks) == N_THREADS
    for index in ("offset", "rec"):
        shard = write_shard(chunks, Dialect(index=index))
        reader = CountingReader(MemoryReader(shard.files()), before_read=lambda _: time.sleep(0.002))
        export = Export(reader)
        found = run_together(lambda i, e=export: e.read_chunk(0, chunks[i].xyz))
        assert [payload == shard.arrow[at : at + size] for payload, (at, size, _) in zip(found, shard.ranges, strict=True)]
        paths = [path for method, path, _ in reader.calls if method == "read"]
        assert paths.count("s0/0_0_0.csv") == 1
        heads = [ranges for _, _, ranges in reader.calls if ranges and ranges[0][0] == 0 and len(ranges) == 2]
        assert len(heads) == 1


def test_a_failed_load_is_tried_again() -> None:
    """The file may have come back; only what was read whole is kept."""
    files = write_shard(make_chunks((0, 0, 0), (1, 2, 3))).files()
    reader = MemoryReader(files)
    export = Export(reader)
    assert list(export.scales) == [0]
    csv = reader.files.pop("s0/0_0_0.csv")
    for _ in range(2):
        with pytest.raises(MissingFileError):
            export.read_chunk(0, (1, 2, 3))
    reader.files["s0/0_0_0.csv"] = csv
    assert export.read_chunk(0, (1, 2, 3)) is not None


def test_a_shard_that_vanishes_or_shrinks_while_it_is_open() -> None:
    shard = write_shard(make_chunks((0, 0, 0), (1, 2, 3)))
    reader = MemoryReader(shard.files())
    export = Export(reader)
    assert export.read_chunk(0, (0, 0, 0)) is not None
    del reader.files["s0/0_0_0.arrow"]
    with pytest.raises(MissingFileError) as caught:
        export.read_chunk(0, (1, 2, 3))
    assert (caught.value.path, caught.value.chunk_xyz) == ("s0/0_0_0.arrow", (1, 2, 3))
    assert not isinstance(caught.value, FileNotFoundError)  # which Zarr would take for its fill value


def test_a_shard_replaced_while_it_is_open_is_never_read_wrong() -> None:
    one = write_shard(make_chunks((0, 0, 0), (1, 2, 3)))
    other = write_shard(make_chunks((1, 2, 3), (0, 0, 0)))
    reader = MemoryReader(one.files())
    export = Export(reader)
    assert export.read_chunk(0, (0, 0, 0)) is not None
    reader.files |= other.files()
    for xyz in ((0, 0, 0), (1, 2, 3)):
        with pytest.raises(ZarrDvidError):
            export.read_chunk(0, xyz)
    fresh = Export(MemoryReader(other.files()))
    assert fresh.read_chunk(0, make_chunk((1, 2, 3)).xyz) is not None
