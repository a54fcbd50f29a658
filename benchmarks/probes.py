"""What `benchmarks.fullsize` does in processes of their own: each function here measures one thing in a fresh one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid import DvidStore

    Ints = npt.NDArray[np.int64]

XYZ = tuple[int, int, int]
SIDE = 32  # chunks, of a shard's cube
LOOKED_UP = 1_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """What is measured: an export's folder, and the index to use, or None for none."""

    folder: str
    index: str | None

    def store(self) -> DvidStore:
        """The export, opened as a user does."""
        from zarr_dvid import DvidStore

        return DvidStore(self.folder) if self.index is None else DvidStore(self.folder, index=self.index)


class Watch:
    """Counts the files that this process opens below some folders, and the directories that it lists, from now on."""

    def __init__(self, place: Place) -> None:
        self._roots = tuple(os.path.abspath(root) + os.sep for root in (place.folder, place.index) if root)  # noqa: PTH100 - compared as text
        self.opened: list[str] = []
        self.listed: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir") and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and f"{path}{os.sep}".startswith(self._roots):
                (self.opened if event == "open" else self.listed).append(path)

    def taken(self) -> tuple[list[str], list[str]]:
        """Files and directories since the last time."""
        found = self.opened, self.listed
        self.opened, self.listed = [], []
        return found


def memory() -> tuple[float, float]:
    """Resident memory of this process now and at its peak, in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def in_fresh_process(probe: Callable[..., Any], *arguments: Any) -> Any:
    """What `probe` gives in a process that has not done anything yet."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(probe, *arguments).result()


def probe_open(place: Place) -> dict[str, Any]:
    """Opens the export and the array of scale 0."""
    import zarr

    import zarr_dvid as zarr_dvid

    watch, (imported, _) = Watch(place), memory()
    start, start_cpu = time.perf_counter(), time.process_time()
    array = zarr.open_group(place.store(), mode="r")["s0/labels"]
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    opened, listed = watch.taken()
    now, peak = memory()
    assert isinstance(array, zarr.Array)
    return {
        "imported_mib": imported,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mib": now,
        "peak_mib": peak,
        "opened": [str(Path(path).name) for path in opened],
        "n_listed": len(listed),
        "n_listed_twice": len(listed) - len(set(listed)),
    }


def probe_look_ups(place: Place, cases: Sequence[tuple[int, XYZ, bool]]) -> list[dict[str, Any]]:
    """Asks whether chunks exist, one after another, and what each answer costs."""
    store, watch = place.store(), Watch(place)
    assert store.hierarchy.grid
    watch.taken()
    found = []
    for level, chunk_xyz, expected in cases:
        start = time.perf_counter()
        answer = store.hierarchy.exists(_key(level, chunk_xyz))
        seconds = time.perf_counter() - start
        if answer is not expected:
            raise AssertionError(f"s{level} {chunk_xyz}: {answer}")
        opened, listed = watch.taken()
        found.append({"seconds": seconds, "opened": opened, "n_listed": len(listed)})
    return found


def probe_many(place: Place, n_look_ups: int, n_shards: int | None) -> dict[str, Any]:
    """Looks random chunks up, spread evenly over shards, one at a time."""
    store = place.store()
    scales = store.hierarchy.export.scales
    rng = np.random.default_rng(0)
    shards = [(level, origin) for level, scale in scales.items() for origin in scale.shards]
    rng.shuffle(shards)
    shards = shards[:n_shards]
    each = -(-n_look_ups // len(shards))
    opened_mib, _ = memory()
    n_found, start = 0, time.perf_counter()
    for level, origin in shards:
        grid = scales[int(level)].grid_xyz
        low = np.asarray(origin) // 64
        chunks_xyz = rng.integers(low, np.minimum(low + SIDE, grid), (each, 3))
        n_found += sum(store.hierarchy.exists(_key(level, (x, y, z))) for x, y, z in chunks_xyz.tolist())
    seconds = time.perf_counter() - start
    now, peak = memory()
    return {
        "n": each * len(shards),
        "n_shards": len(shards),
        "n_found": n_found,
        "seconds": seconds,
        "opened_mib": opened_mib,
        "mib": now,
        "peak_mib": peak,
    }


def probe_vectorised(place: Place, level: int, origin: XYZ, csv: str) -> dict[str, Any]:
    """Looks a million chunks of one shard up in one call, and compares what is found with the rows of its CSV."""
    store = place.store()
    index = store.hierarchy.export.scales[level].load(origin).index
    rows = read_rows(Path(csv))
    found = index.look_up(rows[:, :3])
    schema = int(found.offset_bytes[0])  # DVID counts it with the first record
    offset_bytes, size_bytes = rows[:, 3].copy(), rows[:, 4].copy()
    offset_bytes[0] += schema
    size_bytes[0] -= schema
    same = (
        bool((found.n_records == 1).all())
        and np.array_equal(found.offset_bytes, offset_bytes)
        and np.array_equal(found.size_bytes, size_bytes)
    )
    if not same:
        raise AssertionError(f"{csv}: the index says something else")
    rng = np.random.default_rng(0)
    chunks_xyz = np.array(origin) // 64 + rng.integers(0, SIDE, (LOOKED_UP, 3))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        index.look_up(chunks_xyz)
        taken.append(time.perf_counter() - start)
    return {"a_second": LOOKED_UP / min(taken), "index_nbytes": index.nbytes, "n_records": len(rows)}


def probe_occupied(place: Place, level: int, box: tuple[slice, slice, slice] | None) -> dict[str, Any]:
    """Iterates the blocks of a scale that exist."""
    store, watch = place.store(), Watch(place)
    assert store.hierarchy.grid
    watch.taken()
    start = time.perf_counter()
    n_blocks = sum(len(chunks_zyx) for chunks_zyx in store.occupied(level, box))
    seconds = time.perf_counter() - start
    opened, _ = watch.taken()
    return {
        "n_blocks": n_blocks,
        "seconds": seconds,
        "peak_mib": memory()[1],
        "n_opened": len(opened),
        "n_arrows_opened": sum(path.endswith(".arrow") and path.startswith(place.folder + os.sep) for path in opened),
    }


def probe_info(place: Place) -> dict[str, Any]:
    """Tells occupancy, as `zarr-dvid info` does."""
    from zarr_dvid.describe import describe

    watch = Watch(place)
    start = time.perf_counter()
    description = describe(place.store().hierarchy, progress=False)
    seconds = time.perf_counter() - start
    opened, listed = watch.taken()
    return {
        "seconds": seconds,
        "peak_mib": memory()[1],
        "n_opened": len(opened),
        "n_listed": len(listed),
        "n_blocks": sum(scale.n_blocks for scale in description.scales),
    }


def read_rows(csv: Path) -> Ints:
    """The rows of an index file: x, y, z, offset, size, row; read without zarr_dvid."""
    rows: Ints = np.array([line.split(b",") for line in csv.read_bytes().split(b"\n")[2:-1]], np.int64)
    return rows


def _key(level: int, chunk_xyz: XYZ) -> str:
    x, y, z = chunk_xyz
    return f"s{level}/labels/c/{z}/{y}/{x}"
