"""Measures and prints: `python -m benchmarks [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

from benchmarks import core, startup
from benchmarks.table import Row, render


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times zarr-dvid on this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    path: Path | None = parser.parse_args().json
    results: dict[str, list[Row]] = core.measure()
    if core.REAL_EXPORT.exists():
        results["start-up"] = startup.measure(core.REAL_EXPORT)
    print("\n\n".join(render(title, rows) for title, rows in results.items()))
    if path is not None:
        found = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "rows": {title: [asdict(row) for row in rows] for title, rows in results.items()},
        }
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
