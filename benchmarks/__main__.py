"""Measures and prints: `python -m benchmarks [--json FILE] [--chart FILE] [--only PART] [--quick]`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import chart, core, peers, report, startup
from benchmarks.operations import QUICK_SUBJECTS, SUBJECTS
from benchmarks.systems import n_threads
from benchmarks.table import Row, render

_PARTS = ("core", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times zarr-dvid on this machine, alone and against other readers."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the comparison with other readers, a PNG")
    parser.add_argument("--only", choices=_PARTS, help="the block core and start-up, or the other readers (default: both)")
    parser.add_argument("--quick", action="store_true", help="small volumes: a trial whose figures mean nothing")
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else _PARTS
    if arguments.chart and "peers" not in parts:
        parser.error("--chart draws what --only core leaves out")
    if arguments.chart and (reason := chart.absent()):
        parser.error(f"--chart: {reason}")

    found: dict[str, Any] = {"machine": machine(), "python": platform.python_version(), "versions": peers.versions()}
    print(", ".join([found["machine"], f"Python {found['python']}", *map(" ".join, found["versions"].items())]), flush=True)
    if "peers" in parts:
        absent = peers.absent_systems()
        begun = time.monotonic()
        measured = peers.measure(
            QUICK_SUBJECTS if arguments.quick else SUBJECTS,
            lambda text: print(f"{time.monotonic() - begun:4.0f} s  {text}", file=sys.stderr),
        )
        print(f"\n{report.render_settings(measured, absent)}")
        for volume in measured:
            print(f"\n{report.render_volume(volume)}")
        print(f"\n{report.render_targets(measured)}")
        found["peers"] = report.as_json(measured, absent)
        if arguments.chart:
            chart.draw(measured, found["machine"], arguments.chart)
    if "core" in parts:
        rows = core_rows()
        print("\n" + "\n\n".join(render(title, part) for title, part in rows.items()))
        found["rows"] = {title: [asdict(row) for row in part] for title, part in rows.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def core_rows() -> dict[str, list[Row]]:
    """Rows of the block core, and of start-up where the real export is there."""
    results = core.measure()
    if core.REAL_EXPORT.exists():
        results["start-up"] = startup.measure(core.REAL_EXPORT)
    return results


def machine() -> str:
    """The processor and the cores that may be used, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {n_threads()} cores"


if __name__ == "__main__":
    main()
