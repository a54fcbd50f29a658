"""What was measured against other systems: as text for people, and as values for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.forms import SETTINGS
from benchmarks.operations import TITLES
from benchmarks.peers import ROUNDS, Measured
from benchmarks.systems import SYSTEMS
from benchmarks.table import aligned
from benchmarks.targets import TARGETS, Target, best_tensorstore


def render_volume(measured: Measured) -> str:
    """A table of systems and operations: medians, and how many times as fast as TensorStore's best form they are."""
    cells = [["", *measured.seconds]]
    for name in SYSTEMS:
        if name in measured.settings:
            cells.append([name, *(_cell(measured.medians(operation), name) for operation in measured.seconds)])
    sizes = [f"{form.name} {form.n_bytes / 1e6:.1f} MB in {form.n_files} files" for form in measured.forms]
    return "\n".join([measured.title, f"on disk: {', '.join(sizes)}", *aligned(cells)])


def _cell(medians: Mapping[str, float], name: str) -> str:
    if name not in medians:
        return "-"
    best = best_tensorstore(medians)
    return duration(medians[name]) + (
        "" if best is None else f" {best / medians[name]:6.{_decimals(best / medians[name])}f}x"
    )


def _decimals(number: float) -> int:
    """How many make three digits."""
    return 0 if number >= 99.95 else 1 if number >= 9.995 else 2


def duration(seconds: float) -> str:
    """Seconds with three digits, and a unit that suits them."""
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * factor
    return f"{value:.{_decimals(value)}f} {unit}"


def render_settings(all_measured: Sequence[Measured], absent: Mapping[str, str]) -> str:
    """What the tables say: what is read, by which systems with what settings, in which forms."""
    settings = {name: setting for measured in all_measured for name, setting in measured.settings.items()}
    operations = {operation for measured in all_measured for operation in measured.seconds}
    lines = [
        f'Medians of {ROUNDS} reads or more, each by a process of its own, one at a time. "x": times as fast as '
        "TensorStore's best form.",
        "All have read the same voxels.",
        "",
        *aligned([[name, title] for name, title in TITLES.items() if name in operations], left=2),
        "",
        *aligned([[name, settings[name]] for name in SYSTEMS if name in settings], left=2),
        "",
        *aligned([[name, setting] for name, setting in SETTINGS.items()], left=2),
        *(f"left out: {name}: {reason}" for name, reason in absent.items()),
    ]
    return "\n".join(lines)


def render_targets(all_measured: Sequence[Measured]) -> str:
    """Each target, and whether it is met."""
    cells = [["", "", "", "ratio", "target", ""]]
    for target, ratio in target_ratios(all_measured):
        met = "not measured" if ratio is None else "met" if target.is_met(ratio) else "MISSED"
        place = f"{target.subject}, {target.operation}"
        bound = f"{'<=' if target.reference else '>='} {target.bound:.2f}"
        cells.append([place, target.system, target.ratio_of, "" if ratio is None else f"{ratio:.2f}", bound, met])
    return "\n".join(aligned(cells, left=3))


def target_ratios(all_measured: Sequence[Measured]) -> Iterator[tuple[Target, float | None]]:
    """Each target, with its ratio: None where it was not measured."""
    subjects = {measured.subject: measured for measured in all_measured}
    for target in TARGETS:
        measured = subjects.get(target.subject)
        yield target, None if measured is None else target.ratio(measured.medians(target.operation))


def as_json(all_measured: Sequence[Measured], absent: Mapping[str, str]) -> dict[str, Any]:
    """All of it, with the seconds of each read."""
    return {
        "absent": dict(absent),
        "forms": SETTINGS,
        "volumes": [
            {
                "name": measured.subject,
                "title": measured.title,
                "shape_zyx": measured.shape_zyx,
                "forms": [asdict(form) for form in measured.forms],
                "settings": measured.settings,
                "operations": {
                    operation: {
                        name: {"median_seconds": statistics.median(seconds), "seconds": seconds}
                        for name, seconds in systems.items()
                    }
                    for operation, systems in measured.seconds.items()
                },
            }
            for measured in all_measured
        ],
        "targets": [
            {**asdict(target), "ratio": ratio, "met": None if ratio is None else target.is_met(ratio)}
            for target, ratio in target_ratios(all_measured)
        ],
    }
