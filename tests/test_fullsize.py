"""What an export of tens of thousands of shards takes, on a small one of the same kind: counts of reads, and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zarr
from exports import CountingReader

from zarr_dvid import DvidStore
from zarr_dvid.cli import main as zarr_dvid_command
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.reader import LocalReader
from zarr_dvid.scale import shard_cache

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").exists():
    pytest.skip("needs the benchmarks, which a source distribution leaves out", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.fullsize import cases_of  # noqa: E402 - found by the path above
from benchmarks.probes import read_rows  # noqa: E402 - found by the path above
from benchmarks.simulate import FULL, MALE_CNS, ShardPlan, Tissue, plan_shards, simulate  # noqa: E402 - found by the path above

Ints = npt.NDArray[np.int64]

MIB = 1 << 20
SMALL = Tissue(sizes_xyz=((8000, 6144, 10000), (4000, 3072, 5000), (2000, 1536, 2500)), n_blocks=400_000)
ALL_FULL = Tissue(sizes_xyz=((4096, 4096, 4096),), n_blocks=8 * FULL)

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ShardPlan]]:
    """A simulated export of a few dozen shards, and what is in it."""
    folder = tmp_path_factory.mktemp("fullsize") / "small"
    plans = simulate(folder, SMALL)
    assert 40 <= len(plans) <= 120
    return folder, plans


# --- the simulator -----------------------------------------------------------------------------------------------------


def test_the_male_cns_is_planned_to_the_block() -> None:
    plans = plan_shards(MALE_CNS)
    assert len(plans) == len({plan.path for plan in plans}) == 26_128
    assert sum(plan.n_blocks for plan in plans) == 587_173_098
    assert {plan.level for plan in plans} == set(range(10))
    n_scale_0 = sum(plan.n_blocks for plan in plans if plan.level == 0)
    assert 0.13 < n_scale_0 / (1471 * 1224 * 2103) < 0.14
    assert min(plan.n_blocks for plan in plans) >= 1
    assert max(plan.n_blocks for plan in plans) == FULL


def test_a_shrunk_one_is_planned_to_the_block_too() -> None:
    tissue = MALE_CNS.shrunk(16)
    assert sum(plan.n_blocks for plan in plan_shards(tissue)) == tissue.n_blocks == 587_173_098 // 16**3


def test_more_shards_than_the_shape_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="which are fewer than 1000"):
        plan_shards(Tissue(sizes_xyz=SMALL.sizes_xyz, n_blocks=SMALL.n_blocks, n_shards=1000))


def test_simulated_files_are_those_of_an_export(small: tuple[Path, list[ShardPlan]]) -> None:
    folder, plans = small
    for plan in plans:
        assert (folder / f"{plan.path}.csv").read_bytes().startswith(b"# schema_size=0\nx,y,z,offset,size,batch_idx\n")
        rows = read_rows(folder / f"{plan.path}.csv")
        chunks_xyz, offset_bytes, size_bytes = rows[:, :3], rows[:, 3], rows[:, 4]
        assert len(rows) == len(np.unique(chunks_xyz, axis=0)) == plan.n_blocks
        low = np.array(plan.origin_chunk)
        grid = -(-np.array(SMALL.sizes_xyz[plan.level]) // 64)
        assert (chunks_xyz >= low).all()
        assert (chunks_xyz < np.minimum(low + 32, grid)).all()
        np.testing.assert_array_equal(offset_bytes, np.cumsum(size_bytes) - size_bytes)
        assert not (size_bytes % 8).any()
        arrow = folder / f"{plan.path}.arrow"
        assert arrow.stat().st_size == size_bytes.sum() + 8
        with arrow.open("rb") as file:
            head = file.read(2048)
            file.seek(-8, os.SEEK_END)
            assert file.read() == b"\xff\xff\xff\xff\0\0\0\0"
        # The head is sound: pyarrow reads it once the hole behind it is filled.
        stream = head[: size_bytes[0]].ljust(size_bytes[0], b"\0")
        batch = pa.ipc.open_stream(stream).read_next_batch()
        assert [batch.column(i)[0].as_py() for i in range(3)] == chunks_xyz[0].tolist()


def test_simulated_shards_lie_in_random_order_and_lengths_are_spread(small: tuple[Path, list[ShardPlan]]) -> None:
    folder, plans = small
    rows = read_rows(folder / f"{max(plans, key=lambda plan: plan.n_blocks).path}.csv")
    steps = np.abs(np.diff(rows[:, :3], axis=0)).sum(axis=1)
    assert steps.mean() > 20  # of random chunks of a cube 32
    sizes = rows[1:, 4]
    assert 7000 < sizes.mean() < 7600
    assert 0.7 < np.log(sizes).std() < 0.85


def test_the_same_arguments_make_the_same_bytes(tmp_path: Path) -> None:
    tissue = MALE_CNS.shrunk(32)
    folders = tmp_path / "one", tmp_path / "two"
    for jobs, folder in enumerate(folders, 1):
        simulate(folder, tissue, jobs=jobs)
    one, two = ({path.relative_to(folder): path for path in folder.rglob("*.*")} for folder in folders)
    assert one.keys() == two.keys()
    assert all(one[path].read_bytes() == two[path].read_bytes() for path in one if path.suffix != ".arrow")
    assert all(one[path].stat().st_size == two[path].stat().st_size for path in one)


# --- without a prebuilt index ------------------------------------------------------------------------------------------


def test_opening_lists_each_directory_once_and_reads_the_documents(small: tuple[Path, list[ShardPlan]]) -> None:
    folder, _ = small
    store, reader = counted(folder)
    array = zarr.open_group(store, mode="r")["s0/labels"]
    assert isinstance(array, zarr.Array)
    assert sorted(reader.taken()) == [
        ("list", ""),
        *(("list", f"s{level}") for level in range(3)),
        ("read", "export.log"),
        ("read", "info"),
    ]


def test_a_look_up_loads_its_shard_alone(small: tuple[Path, list[ShardPlan]]) -> None:
    folder, plans = small
    store, reader = counted(folder)
    assert store.hierarchy.grid
    reader.taken()
    for plan in plans[::7]:
        rows = read_rows(folder / f"{plan.path}.csv")
        keys = [key_of(plan.level, xyz) for xyz in rows[:50, :3].tolist()]
        assert store.hierarchy.exists(keys[0])
        assert sorted(set(reader.taken())) == [("read", f"{plan.path}.arrow"), ("read", f"{plan.path}.csv")]
        assert all(store.hierarchy.exists(key) for key in keys)
        assert reader.taken() == []


def test_once_a_scale_was_looked_at_an_absent_chunk_costs_nothing(small: tuple[Path, list[ShardPlan]]) -> None:
    folder, _ = small
    store, reader = counted(folder)
    first = True
    for level, chunk_xyz, is_there in cases_of(folder):
        assert store.hierarchy.exists(key_of(level, chunk_xyz)) is is_there
        calls = reader.taken()
        if not is_there:
            assert first or calls == []
            assert not any(call == "list" for call, _ in calls)
            first = False


def test_the_cache_of_indexes_leaves_room_for_the_rest() -> None:
    # Opening the male CNS takes some 110 MiB, of which 80 are the imports.
    assert shard_cache.max_bytes <= 150 * MIB


# --- with one ----------------------------------------------------------------------------------------------------------


def test_full_shards_take_at_most_five_bytes_a_block(tmp_path: Path) -> None:
    folder, index = tmp_path / "full", tmp_path / "index"
    plans = simulate(folder, ALL_FULL)
    assert [plan.n_blocks for plan in plans] == [FULL] * 8
    assert zarr_dvid_command(["index", str(folder), "-o", str(index), "--jobs", "1"]) == 0
    assert sum(path.stat().st_size for path in index.rglob("*") if path.is_file()) <= 5 * ALL_FULL.n_blocks


@needs_proc
def test_the_figures_of_the_full_size_hold_on_a_small_one(small: tuple[Path, list[ShardPlan]], tmp_path: Path) -> None:
    """Counts and memory, as `benchmarks.fullsize` takes them in fresh processes; not times, which tell of the machine."""
    folder, plans = small
    results = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.fullsize", str(folder), "--index", str(tmp_path / "index")]
    command += ["--jobs", "1", "--look-ups", "5000", "--json", str(results)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE)
    found: dict[str, list[dict[str, Any]]] = json.loads(results.read_text())
    assert len(found) == 2
    for title, figures in found.items():
        values = {figure["name"]: figure["value"] for figure in figures}
        for figure in figures:
            if figure["unit"] in ("", "bytes", "bytes a record") and figure["at_most"] is not None:
                # Of a small export without an index, all shards are looked at before a chunk is said to be absent.
                at_most = 2 * len(plans) if figure["at_most"] == 32 else figure["at_most"]
                assert figure["value"] <= at_most, (title, figure)
        # Of the export's own size, not of the full one's: what it takes beyond the imports.
        imports = values["open: memory after the imports"]
        assert values["open: peak memory"] - imports < 8
        (many,) = (value for name, value in values.items() if name.endswith("shards: peak memory"))
        assert many - imports < 48 + 12 * SMALL.n_blocks / MIB  # 48: what parsing CSV files leaves to the allocators
    with_index = {figure["name"]: figure["value"] for figure in found["with one"]}
    assert with_index["info: blocks"] == SMALL.n_blocks
    assert with_index["occupied, all of s0: blocks"] == sum(plan.n_blocks for plan in plans if plan.level == 0)
    assert with_index["first look-up: of them, of the index"] == 1


def counted(folder: Path) -> tuple[DvidStore, CountingReader]:
    """A store over an export, and the reader that counts what it asks for."""
    reader = CountingReader(LocalReader(folder))
    store = DvidStore(folder)
    store.hierarchy = Hierarchy(lambda: reader, name=folder.name)
    return store, reader


def key_of(level: int, chunk_xyz: tuple[int, int, int]) -> str:
    x, y, z = chunk_xyz
    return f"s{level}/labels/c/{z}/{y}/{x}"
