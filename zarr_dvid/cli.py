"""The command `zarr-dvid`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zarr_dvid.describe import ExportDescription, describe
from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.store import DvidStore
from zarr_dvid.voxels import VALUES

_MAX_PIXELS = 1 << 27

_INFO_EXAMPLES = """examples:
  zarr-dvid info /exports/mcns
  zarr-dvid info /exports/mcns --info mcns-ng-specs.json --json
"""
_SLICE_EXAMPLES = """examples:
  zarr-dvid slice /exports/mcns --scale 5 --z 1234 -o slice.png
  zarr-dvid slice /exports/mcns --z 60000 --y 20000:21000 --x 30000:31500 --view supervoxels -o crop.png
"""
_INDEX_EXAMPLES = """examples:
  zarr-dvid index /exports/mcns
  zarr-dvid index https://example.org/mcns -o mcns-index
  zarr-dvid info https://example.org/mcns --index mcns-index
"""
_DEMO_EXAMPLES = """examples:
  zarr-dvid demo
  zarr-dvid demo my-first-export
"""


class _UsageError(Exception):
    """What a user asked for can't be done; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: As on the command line, without the program's name; by default those.

    Returns:
        Exit code: 0 when done, 1 when it could not be done, 2 when the command was not understood.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ZarrDvidError, _UsageError, ImportError) as error:
        print(f"zarr-dvid: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"zarr-dvid: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("zarr-dvid: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zarr-dvid", description="DVID's sharded exports as Zarr, with no conversion.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = _command(commands, "info", "say what an export holds", _INFO_EXAMPLES, _run_info)
    _add_export(info)
    info.add_argument("--json", action="store_true", help="print JSON, for programs")

    picture = _command(commands, "slice", "save a slice as a picture", _SLICE_EXAMPLES, _run_slice)
    _add_export(picture)
    picture.add_argument("--scale", type=int, default=0, help="scale (default: 0)")
    picture.add_argument("--z", type=int, required=True, help="plane, in voxels of that scale")
    picture.add_argument("--y", type=_span, default=slice(None), metavar="A:B", help="rows (default: all)")
    picture.add_argument("--x", type=_span, default=slice(None), metavar="A:B", help="columns (default: all)")
    picture.add_argument("--view", choices=VALUES, default="labels", help="what to show (default: labels)")
    picture.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png", help="picture to write")

    index = _command(commands, "index", "make the compact index of an export", _INDEX_EXAMPLES, _run_index)
    _add_url(index)
    index.add_argument("-o", "--output", metavar="DEST", help="its folder (default: in the export, else the user's cache)")
    index.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each processor)")
    index.add_argument("--check", choices=("records",), help="compare each entry with the record that it points to")
    index.add_argument("--json", action="store_true", help="print JSON, for programs")

    demo = _command(commands, "demo", "write a small export, open it, and save a picture", _DEMO_EXAMPLES, _run_demo)
    demo.add_argument("directory", nargs="?", type=Path, help="where to write (default: a temporary directory)")
    return parser


def _command(commands: Any, name: str, what: str, examples: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="directory that export-shards wrote: a path, or a URL")
    parser.add_argument("--info", metavar="FILE", help="neuroglancer volume description, such as the export's spec")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("--index", metavar="DIR", help="compact index (default: in the export, or the user's cache)")
    parser.add_argument("--voxel-size", type=float, metavar="NM", help="nanometres of a voxel at scale 0")


def _span(text: str) -> slice:
    start, colon, stop = text.partition(":")
    try:
        span = slice(int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 100:200") from None
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 100:200")
    return span


def _store(options: argparse.Namespace) -> DvidStore:
    return DvidStore(options.url, info=options.info, voxel_size=options.voxel_size, index=options.index)


def _run_info(options: argparse.Namespace) -> None:
    description = describe(_store(options).hierarchy, progress=True)
    print(json.dumps(description.to_json(), indent=2) if options.json else info_table(description))


def _run_slice(options: argparse.Namespace) -> None:
    import zarr

    from zarr_dvid.picture import save_label_image

    store = _store(options)
    levels = store.hierarchy.grid.shapes
    if options.scale not in levels:
        raise _UsageError(f"{options.url}: there is no scale {options.scale}, only {', '.join(map(str, levels))}")
    array = zarr.open_array(store, path=f"s{options.scale}/{options.view}", mode="r")
    depth, *plane = array.shape
    if not 0 <= options.z < depth:
        raise _UsageError(f"--z {options.z}: scale {options.scale} has planes 0 to {depth - 1}")
    rows, columns = (len(range(*span.indices(side))) for span, side in zip((options.y, options.x), plane, strict=True))
    if not rows or not columns:
        raise _UsageError(f"--y and --x leave nothing of a plane of {plane[0]} x {plane[1]} voxels (y, x)")
    if rows * columns > _MAX_PIXELS:
        raise _UsageError(
            f"a picture of {rows} x {columns} voxels is too large: take a higher --scale, or cut with --y and --x"
        )
    save_label_image(options.output, np.asarray(array[options.z, options.y, options.x]))
    print(f"{options.output}: {rows} x {columns} voxels (y, x) of s{options.scale}/{options.view}, z {options.z}")


def _run_index(options: argparse.Namespace) -> None:
    from zarr_dvid.index_builder import index_export

    if options.jobs is not None and options.jobs < 1:
        raise _UsageError(f"--jobs {options.jobs}: at least 1")
    if options.output is not None and "://" in options.output:
        raise _UsageError(f"-o {options.output}: an index is written to a local folder")
    summary = index_export(
        options.url,
        options.output,
        info=options.info,
        jobs=options.jobs,
        check_records=options.check == "records",
    )
    print(json.dumps(summary.to_json(), indent=2) if options.json else summary)


def _run_demo(options: argparse.Namespace) -> None:
    from zarr_dvid.demo import run_demo

    run_demo(options.directory)


def info_table(description: ExportDescription) -> str:
    """A description as a table for people."""
    size = description.voxel_size
    lines = [description.url, f"voxel size  {_join(size)} nm (z, y, x)" if size else "voxel size  not known", ""]
    head = ("scale", "shape (z, y, x)", "shards", "blocks", "occupancy", "on disk", "decoded", "shape from")
    rows = [head]
    for scale in description.scales:
        rows.append(
            (
                f"s{scale.level}",
                _join(scale.shape) if scale.shape else "not known",
                f"{scale.n_shards:,}",
                f"{scale.n_blocks:,}",
                "not known" if scale.occupancy is None else f"{scale.occupancy:.1%}",
                _size(scale.bytes_on_disk),
                _size(scale.bytes_decoded),
                scale.shape_from,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    for scale in description.scales:
        lines += [f"s{scale.level}  {n:,} shards: {dialect}" for dialect, n in scale.dialects.items()]
    problems = [
        *description.problems,
        *(_with_scale(scale.level, text) for scale in description.scales for text in scale.problems),
    ]
    if problems:
        lines += ["", "What is wrong, or could not be told:", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines)


def _with_scale(level: int, text: str) -> str:
    """A problem with its scale, which the path of a file in it names already."""
    return text if text.startswith((f"s{level}/", f"s{level}:")) else f"s{level}: {text}"


def _join(numbers: Sequence[float]) -> str:
    return " x ".join(f"{number:,g}" if isinstance(number, float) else f"{number:,}" for number in numbers)


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
