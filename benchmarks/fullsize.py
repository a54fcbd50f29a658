"""An export at full size: what it takes to open it and to look chunks up: `python -m benchmarks.fullsize FOLDER`.

Each measurement is made in a process of its own, without a prebuilt index and with one. Files opened and directories
listed are those that Python's audit events name, whoever opened them. The folder is one of `benchmarks.simulate`, or any
other export in DVID's dialect of today.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.probes import (
    SIDE,
    XYZ,
    Place,
    in_fresh_process,
    probe_info,
    probe_look_ups,
    probe_many,
    probe_occupied,
    probe_open,
    probe_vectorised,
    read_rows,
)

MIB = 1 << 20
_SHARDS_WITHOUT_INDEX = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One thing measured.

    Attributes:
        name: What.
        value: How much.
        unit: Of it.
        at_most: What it should not exceed.
        at_least: What it should reach.
    """

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def target(self) -> str:
        """In words; empty where there is none."""
        if self.at_most is not None:
            return f"<= {self.at_most:,g}"
        return "" if self.at_least is None else f">= {self.at_least:,g}"

    @property
    def verdict(self) -> str:
        """Whether the target is met; empty where there is none."""
        if not self.target:
            return ""
        too_much = self.at_most is not None and self.value > self.at_most
        too_little = self.at_least is not None and self.value < self.at_least
        return "MISSED" if too_much or too_little else "met"


def origin_of(path: Path) -> XYZ:
    """The first voxel of a shard's cube, which is its name."""
    x, y, z = map(int, path.stem.split("_"))
    return x, y, z


def cases_of(folder: Path) -> list[tuple[int, XYZ, bool]]:
    """A chunk that is there, the same again, two that its shard lacks, and one that has no shard, of scale 0."""
    shards = sorted((folder / "s0").glob("*.csv"), key=lambda path: (path.stat().st_size, path.name))
    origins = {origin_of(path) for path in shards}
    path = shards[len(shards) // 4]
    chunks = {tuple(xyz) for xyz in read_rows(path)[:, :3].tolist()}
    cube = np.array(origin_of(path)) // 64 + np.argwhere(np.ones((SIDE,) * 3, bool))
    missing = [(x, y, z) for x, y, z in cube.tolist() if (x, y, z) not in chunks]
    there = min(chunks)
    nowhere = next(xyz for xyz in np.ndindex(200, 200, 200) if tuple(2048 * c for c in xyz) not in origins)
    x, y, z = (SIDE * c for c in nowhere)
    return [
        (0, there, True),
        (0, there, True),
        (0, missing[0], False),
        (0, missing[-1], False),
        (0, (x, y, z), False),
    ]


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Nothing that somebody indexed before is found in the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def without_index(folder: Path, n_look_ups: int) -> list[Figure]:
    """What is measured without a prebuilt index."""
    place = Place(str(folder), None)
    n_scales = len([path for path in folder.glob("s*") if path.is_dir()])
    with _empty_cache():
        many = in_fresh_process(probe_many, place, n_look_ups // 10, _SHARDS_WITHOUT_INDEX)
        return [
            *_opening(in_fresh_process(probe_open, place), n_scales),
            *_looking_up(in_fresh_process(probe_look_ups, place, cases_of(folder)), place),
            *_many(many),
        ]


def with_index(folder: Path, index: Path, n_look_ups: int, jobs: int) -> list[Figure]:
    """What is measured with a prebuilt index, which is built here unless it is there."""
    place = Place(str(folder), str(index))
    n_scales = len([path for path in folder.glob("s*") if path.is_dir()])
    largest = max((folder / "s0").glob("*.csv"), key=lambda path: path.stat().st_size)
    box = tuple(slice(c - 1024, c + 1024) for c in origin_of(largest)[::-1])
    with _empty_cache():
        figures = [] if index.exists() else _building(build(folder, index, jobs))
        info = in_fresh_process(probe_info, place)
        index_bytes = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
        vectorised = in_fresh_process(probe_vectorised, place, 0, origin_of(largest), str(largest))
        part = in_fresh_process(probe_occupied, place, 0, box)
        whole = in_fresh_process(probe_occupied, place, 0, None)
        return [
            *figures,
            Figure(name="index files, a block", value=index_bytes / info["n_blocks"], unit="bytes", at_most=5),
            *_opening(in_fresh_process(probe_open, place), n_scales),
            *_looking_up(in_fresh_process(probe_look_ups, place, cases_of(folder)), place),
            *_many(in_fresh_process(probe_many, place, n_look_ups, None)),
            Figure(name="in one call within a shard", value=vectorised["a_second"], unit="look-ups/s", at_least=1e6),
            Figure(
                name="a shard's index in memory",
                value=vectorised["index_nbytes"] / vectorised["n_records"],
                unit="bytes a record",
                at_most=9,
            ),
            Figure(name="info: time", value=info["seconds"], unit="s"),
            Figure(name="info: peak memory", value=info["peak_mib"], unit="MiB"),
            Figure(name="info: blocks", value=info["n_blocks"]),
            Figure(name="info: files opened", value=info["n_opened"]),
            Figure(name="occupied, a box of 2048^3: blocks", value=part["n_blocks"]),
            Figure(name="occupied, a box of 2048^3: reads", value=part["n_opened"], at_most=8),
            Figure(name="occupied, all of s0: blocks", value=whole["n_blocks"]),
            Figure(name="occupied, all of s0: time", value=whole["seconds"], unit="s"),
            Figure(name="occupied, all of s0: peak memory", value=whole["peak_mib"], unit="MiB"),
            Figure(name="occupied, all of s0: shards opened", value=whole["n_arrows_opened"], at_most=0),
        ]


def build(folder: Path, index: Path, jobs: int) -> dict[str, Any]:
    """Runs `zarr-dvid index`, and watches its memory."""
    command = [sys.executable, "-m", "zarr_dvid", "index", str(folder), "-o", str(index), "--jobs", str(jobs)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    together, largest = [], 0.0
    while process.poll() is None:
        each = _memory_of_tree(process.pid)
        together.append(sum(each))
        largest = max(largest, *each, 0)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = time.perf_counter() - start
    # Flat: what it takes at the end is what it took once all processes were there.
    half = len(together) // 2
    halves = [max(part, default=0) for part in (together[:half], together[half:])]
    return {"seconds": seconds, "mib": largest, "halves": halves}


def _memory_of_tree(pid: int) -> list[float]:
    """Resident memory of a process and of those that it started, in MiB; those that end meanwhile are left out."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _memory_of_tree(int(child))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found.append(pages * os.sysconf("SC_PAGE_SIZE") / MIB)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _building(built: Mapping[str, Any]) -> list[Figure]:
    first, second = built["halves"]
    return [
        Figure(name="building: time", value=built["seconds"], unit="s"),
        Figure(name="building: memory of the largest process", value=built["mib"], unit="MiB"),
        Figure(name="building: memory of all, 1st half", value=first, unit="MiB"),
        Figure(name="building: memory of all, 2nd half", value=second, unit="MiB", at_most=1.1 * first),
    ]


def _opening(opened: Mapping[str, Any], n_scales: int) -> list[Figure]:
    return [
        Figure(name="open: time", value=opened["seconds"], unit="s", at_most=1),
        Figure(name="open: time of the processor", value=opened["cpu_seconds"], unit="s"),
        Figure(name="open: memory after the imports", value=opened["imported_mib"], unit="MiB"),
        Figure(name="open: memory", value=opened["mib"], unit="MiB", at_most=150),
        Figure(name="open: peak memory", value=opened["peak_mib"], unit="MiB", at_most=150),
        Figure(name="open: directories listed", value=opened["n_listed"], at_most=n_scales + 2),
        Figure(name="open: directories listed twice", value=opened["n_listed_twice"], at_most=0),
        Figure(name="open: files opened", value=len(opened["opened"]), at_most=4),
    ]


def _looking_up(found: Sequence[Mapping[str, Any]], place: Place) -> list[Figure]:
    first, again, missing, another, nowhere = found
    of_index = [path for path in first["opened"] if place.index and path.startswith(place.index)]
    # Without an index the first chunk that is absent has a sample of the scale's shards looked at: 16, two files each.
    sample = 0 if place.index else 32
    return [
        Figure(name="first look-up: reads", value=len(first["opened"]), at_most=1 if place.index else 2),
        Figure(name="first look-up: of them, of the index", value=len(of_index)),
        Figure(name="first look-up: time", value=1000 * first["seconds"], unit="ms"),
        Figure(name="the same again: reads", value=len(again["opened"]), at_most=0),
        Figure(name="first absent chunk, of that shard: reads", value=len(missing["opened"]), at_most=sample),
        Figure(name="another, of that shard: reads", value=len(another["opened"]), at_most=0),
        Figure(name="another, with no shard: reads", value=len(nowhere["opened"]), at_most=0),
        Figure(name="look-ups: directories listed", value=sum(one["n_listed"] for one in found), at_most=0),
    ]


def _many(many: Mapping[str, Any]) -> list[Figure]:
    name = f"{many['n']:,} look-ups over {many['n_shards']:,} shards"
    return [
        Figure(name=f"{name}: memory", value=many["mib"], unit="MiB", at_most=300),
        Figure(name=f"{name}: peak memory", value=many["peak_mib"], unit="MiB", at_most=300),
        Figure(name=f"{name}: time", value=many["seconds"], unit="s"),
        Figure(name=f"{name}: found", value=many["n_found"]),
    ]


def render(title: str, figures: Sequence[Figure]) -> str:
    """Figures below a title, as aligned columns."""
    cells = [
        (f.name, f"{f.value:,.0f}" if f.value >= 1000 else f"{f.value:.4g}", f.unit, f.target, f.verdict) for f in figures
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    lines = [title]
    for name, value, *rest in cells:
        fields = [name.ljust(widths[0]), value.rjust(widths[1])]
        fields += [text.ljust(width) for text, width in zip(rest, widths[2:], strict=True)]
        lines.append("  ".join(fields).rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fullsize", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="of the export")
    parser.add_argument("--index", type=Path, help="folder of its index, built if it is not there (default: FOLDER.index)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that build it")
    parser.add_argument("--look-ups", type=int, default=1_000_000, metavar="N", help="over all shards (default: a million)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    index = arguments.index.absolute() if arguments.index else folder.with_name(f"{folder.name}.index")
    results = {"without a prebuilt index": without_index(folder, arguments.look_ups)}
    print(render("without a prebuilt index", results["without a prebuilt index"]), end="\n\n", flush=True)
    results["with one"] = with_index(folder, index, arguments.look_ups, arguments.jobs)
    print(render("with one", results["with one"]))
    if arguments.json is not None:
        found = {title: [asdict(figure) for figure in figures] for title, figures in results.items()}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
