"""Making an index: killed and gone on with, twice at once, in several processes, and always the same bytes in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
from exports import Dialect, assert_reads, make_chunk, make_chunks, write_shard
from indexed import index_files, make_index, open_indexed, put, shards_of

from zarr_dvid.errors import ExportError, ExportWarning
from zarr_dvid.index_builder import index_export

N_SHARDS = 12
WIDE_SHARDS = 3


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Shards of both forms, one that is broken, and one without records."""
    files = shards_of({f"s0/{256 * x}_0_0": [(4 * x, 1, 2), (4 * x + 1, 0, 0)] for x in range(N_SHARDS)})
    some = {f"s1/{256 * x}_0_0": [(4 * x, 1, 2), (4 * x + 1, 0, 0), (4 * x, 0, 3)] for x in range(WIDE_SHARDS)}
    files |= shards_of(some, Dialect(rows_a_batch=2, index="rec"))
    files["s0/1024_0_0.csv"] = b""
    files |= write_shard([]).files("s0/0_256_0")
    return put(tmp_path / "export", files)


@pytest.fixture
def expected(export: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run gives."""
    make_index(export, tmp_path / "undisturbed")
    return index_files(tmp_path / "undisturbed")


def run(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)])


KILLED = """
    import os, signal, sys
    from zarr_dvid import index_journal
    from zarr_dvid.index_builder import index_export

    export, index, name, n = *sys.argv[1:4], int(sys.argv[4])
    owner = index_journal.Journal if name in ("append", "_write", "_take") else index_journal
    plain = getattr(owner, name)

    def killing(*arguments, **options):
        global n
        n -= 1
        if n < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)

    setattr(owner, name, killing)
    index_export(export, index, jobs=1, progress=False)
"""


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("append", [0, 1, 9]),
        ("_write", [4]),
        ("_take", [3, 5]),  # after the line
        ("write_table", [0]),
        ("sync_folder", [0]),
        ("replace_file", [0, 1]),
    ],
)
def test_a_killed_run_is_gone_on_with(
    export: Path, tmp_path: Path, expected: dict[str, bytes], name: str, calls: list[int]
) -> None:
    index = tmp_path / "index"
    for n in calls:
        process = run(KILLED, export, index, name, n)
        assert process.wait(60) == -signal.SIGKILL
        assert not (index / "index.json").exists()
    summary = make_index(export, index)
    assert index_files(index) == expected
    if name in ("append", "_take"):
        assert summary.n_done_before >= max(calls)
    assert make_index(export, index).was_up_to_date
    assert index_files(index) == expected


def test_killed_at_any_moment(export: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """By the clock, with worker processes, again and again until one run gets through."""
    index = tmp_path / "index"
    code = """
        import sys, time
        from zarr_dvid import index_builder
        from zarr_dvid.index_builder import index_export
        from zarr_dvid.index_journal import Journal

        plain = Journal.append

        def slowly(self, entry):
            time.sleep(0.02)
            plain(self, entry)

        Journal.append = slowly
        if __name__ == "__main__":
            index_export(sys.argv[1], sys.argv[2], jobs=1, progress=False)
    """
    for seconds in (0.02, 0.11, 0.17, 0.05):
        process = run(code, export, index)
        deadline = time.monotonic() + 60
        while not (index / "unfinished" / "journal.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(seconds)
        process.kill()
        process.wait()
    make_index(export, index)
    assert index_files(index) == expected


def damage(path: Path, *, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    "what", ["torn line", "lost blocks", "other blocks", "cut blocks", "no journal", "other parameters"]
)
def test_what_an_interrupted_run_left_is_checked(
    export: Path, tmp_path: Path, expected: dict[str, bytes], what: str
) -> None:
    index = tmp_path / "index"
    assert run(KILLED, export, index, "append", 8).wait(60) == -signal.SIGKILL
    left = index / "unfinished"
    journal = left / "journal.jsonl"
    if what == "torn line":
        journal.write_bytes(journal.read_bytes()[:-30])
    elif what == "lost blocks":
        (left / "blocks").unlink()
    elif what == "other blocks":
        damage(left / "blocks", at=(left / "blocks").stat().st_size // 2)
    elif what == "cut blocks":
        os.truncate(left / "blocks", (left / "blocks").stat().st_size - 8)
    elif what == "no journal":
        journal.unlink()
    else:
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join([json.dumps({"cubes_voxels": {"0": 1}}) + "\n", *lines[1:]]))
    summary = make_index(export, index)
    assert summary.n_done_before == (7 if what == "torn line" else 0)
    assert index_files(index) == expected


def test_a_shard_that_changed_meanwhile_is_indexed_again(export: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert run(KILLED, export, index, "append", 9).wait(60) == -signal.SIGKILL
    other = [make_chunk((8, 1, 2), seed=1), make_chunk((9, 3, 3))]
    put(export, write_shard(other).files("s0/512_0_0"))
    os.utime(export / "s0" / "512_0_0.arrow", ns=(1, 1))
    summary = make_index(export, index)
    assert 0 < summary.n_done_before < 9
    make_index(export, tmp_path / "anew")
    assert index_files(index) == index_files(tmp_path / "anew")
    assert_reads(open_indexed(export, index)[0], other)


def test_only_what_changed_is_read_again(export: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    make_index(export, index)
    put(export, shards_of({"s0/512_0_0": [(8, 3, 3)], "s0/0_512_0": [(0, 8, 0)]}))
    os.utime(export / "s0" / "512_0_0.arrow", ns=(1, 1))
    for path in (export / "s0").glob("2816_0_0*"):
        path.unlink()
    summary = make_index(export, index)
    assert summary.n_shards - summary.n_done_before == 2
    make_index(export, tmp_path / "anew")
    assert index_files(index) == index_files(tmp_path / "anew")


@pytest.mark.parametrize("kind", ["index", "shards", "blocks", "wide"])
def test_a_damaged_index_is_made_again(export: Path, tmp_path: Path, expected: dict[str, bytes], kind: str) -> None:
    index = tmp_path / "index"
    make_index(export, index)
    path = next(index.glob(f"{kind}*"))
    damage(path, at=path.stat().st_size // 2)
    assert not make_index(export, index).was_up_to_date
    assert index_files(index) == expected
    os.truncate(next(index.glob(f"{kind}*")), 20)
    assert not make_index(export, index).was_up_to_date
    assert index_files(index) == expected


def test_several_processes_give_the_same_bytes(export: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    summary = index_export(export, tmp_path / "index", jobs=2, check_records=True, progress=False)
    assert index_files(tmp_path / "index") == expected
    assert summary.n_checked == summary.n_records == 2 * (N_SHARDS - 1) + 3 * WIDE_SHARDS


def test_no_worker_outlives_a_killed_run(export: Path, tmp_path: Path) -> None:
    code = """
        import multiprocessing, sys, time
        from zarr_dvid.index_builder import index_export
        from zarr_dvid.index_journal import Journal

        def stop(self, entry):
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            time.sleep(60)

        Journal.append = stop
        if __name__ == "__main__":
            index_export(sys.argv[1], sys.argv[2], jobs=2, progress=False)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    with subprocess.Popen(
        [sys.executable, str(script), str(export), str(tmp_path / "index")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert pids
    deadline = time.monotonic() + 60
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_two_runs_at_once_do_not_meet(export: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    index = tmp_path / "index"
    code = """
        import sys
        from zarr_dvid.errors import ExportError
        from zarr_dvid.index_builder import index_export

        try:
            index_export(sys.argv[1], sys.argv[2], jobs=1, progress=False)
        except ExportError as error:
            assert "another process" in str(error), error
            sys.exit(3)
    """
    processes = [run(code, export, index) for _ in range(4)]
    codes = [process.wait(120) for process in processes]
    assert 0 in codes
    assert set(codes) <= {0, 3}
    assert index_files(index) == expected


def test_a_second_run_is_refused_by_name(export: Path, tmp_path: Path) -> None:
    from zarr_dvid.index_journal import locked

    with locked(tmp_path / "index"), pytest.raises(ExportError, match="another process is making an index here"):
        make_index(export, tmp_path / "index")
    make_index(export, tmp_path / "index")


def test_a_reader_keeps_its_index_while_another_is_made(export: Path, tmp_path: Path) -> None:
    """What it has not read yet is gone then, and it says so."""
    from zarr_dvid.errors import ShardIndexError

    index = tmp_path / "index"
    make_index(export, index)
    reader, _, _ = open_indexed(export, index)
    assert_reads(reader, make_chunks((0, 1, 2)))
    put(export, shards_of({"s0/512_0_0": [(8, 3, 3)]}))
    os.utime(export / "s0" / "512_0_0.arrow", ns=(1, 1))
    make_index(export, index)
    assert_reads(reader, make_chunks((1, 0, 0)))
    with pytest.raises(ShardIndexError, match="index"):
        reader.read_chunk(0, (12, 1, 2))
    assert_reads(open_indexed(export, index)[0], make_chunks((12, 1, 2)))


def test_units_that_only_other_shards_tell(tmp_path: Path) -> None:
    """Coordinates in voxels: no shard tells by itself what they count."""
    shards = {f"s0/{256 * x}_0_0": [(4 * x, 1, 2), (4 * x + 1, 0, 0)] for x in range(5)}
    export = put(tmp_path / "export", shards_of(shards, Dialect(units="voxels")))
    for jobs in (1, 2):
        summary = index_export(export, tmp_path / f"index{jobs}", jobs=jobs, progress=False)
        assert (summary.n_records, summary.n_broken) == (10, 0)
    assert index_files(tmp_path / "index1") == index_files(tmp_path / "index2")
    reader, _, _ = open_indexed(export, tmp_path / "index1")
    assert_reads(reader, make_chunks(*[xyz for some in shards.values() for xyz in some]))
    lone = put(tmp_path / "lone", shards_of({"s0/0_0_0": [(1, 0, 0)]}, Dialect(units="voxels")))
    assert make_index(lone, tmp_path / "of lone").n_broken == 1
    with pytest.raises(OSError, match="count chunks or voxels"):
        open_indexed(lone, tmp_path / "of lone")[0].read_chunk(0, (1, 0, 0))


def test_no_warning_is_lost(export: Path, tmp_path: Path) -> None:
    make_index(export, tmp_path / "index")
    reader, _, _ = open_indexed(export, tmp_path / "index")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExportWarning)
        reader.read_chunk(0, (0, 4, 0))
    messages = [str(warning.message) for warning in caught]
    assert sum("s0/0_256_0.arrow: the shard is whole but holds no record" in message for message in messages) == 1
