"""The comparison with other readers as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.operations import CUTOUT, FIRST, FRESH, INTO, RANDOM
from benchmarks.report import duration
from benchmarks.systems import (
    CloudVolume,
    TensorStorePrecomputed,
    TensorStoreZarr3,
    ZarrDvid,
    ZarrPython,
    ZarrPythonZarrs,
)
from benchmarks.targets import best_tensorstore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.peers import Measured

_COLORS = {
    ZarrDvid.name: "#d1390f",
    TensorStorePrecomputed.name: "#20262e",
    TensorStoreZarr3.name: "#8b95a1",
    ZarrPythonZarrs.name: "#2a6fbb",
    ZarrPython.name: "#8fc1f0",
    CloudVolume.name: "#3f9c5f",
}
_PANELS = {
    "sparse": (
        ("sparse", INTO, "whole volume, into given memory"),
        ("sparse", FRESH, "whole volume, into fresh memory"),
        ("sparse", RANDOM, "one random chunk"),
        ("sparse", CUTOUT, "64³ across 8 chunks"),
        ("sparse", "z plane", "one z plane"),
        ("wide", "z plane", "image of {1} by {2} voxels"),
        ("sparse", FIRST, "fresh process to the first chunk"),
    ),
    "dense": (
        ("dense", INTO, "whole volume, into given memory"),
        ("dense", FRESH, "whole volume, into fresh memory"),
        ("dense", RANDOM, "one random chunk"),
        ("dense", CUTOUT, "64³ across 8 chunks"),
        ("dense", "z plane", "one z plane"),
    ),
}
_TIMES = "\N{MULTIPLICATION SIGN}"
_TICKS = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32]
_TICK_NAMES = [f"1/{round(1 / tick)}" if tick < 1 else f"{tick}{_TIMES}" for tick in _TICKS]
_GRID = "#e4e7eb"
_TEXT = "#20262e"
_FAINT = "#8b95a1"


def absent() -> str:
    """Why no chart can be drawn here; empty if it can."""
    if not importlib.util.find_spec("matplotlib"):
        return "matplotlib is not installed"
    return TensorStorePrecomputed.absent()


def draw(all_measured: Sequence[Measured], machine: str, path: Path) -> None:
    """Draws how many times as fast as TensorStore's best form each system is.

    Args:
        all_measured: Volumes; what the chart shows of them and was not measured is left out.
        machine: Where, in words.
        path: PNG to write, 1600 pixels wide.

    Raises:
        ValueError: Nothing was measured that the chart shows.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    subjects = {measured.subject: measured for measured in all_measured}
    panels: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for panel, wanted in _PANELS.items():
        for subject, operation, name in wanted:
            if panel in subjects and subject in subjects:
                medians = subjects[subject].medians(operation)
                if best_tensorstore(medians) is not None:
                    label = name.format(*subjects[subject].shape_zyx)
                    panels.setdefault(_title(subjects[panel]), []).append((label, medians))
    if not panels:
        raise ValueError("a chart needs what TensorStore takes, which was not measured")

    shown = {name for lines in panels.values() for _, medians in lines for name in medians if name in _COLORS}
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": _TEXT}):
        heights = [len(lines) for lines in panels.values()]
        figure = Figure(figsize=(8, 1.95 + 0.34 * sum(heights) + 0.3 * len(heights)), dpi=200, facecolor="white")
        inch = 1 / figure.get_figheight()
        figure.subplots_adjust(left=0.33, right=0.9, top=1 - 1.25 * inch, bottom=0.8 * inch)
        grid = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights, "hspace": 0.25}
        )
        for axes, (title, lines) in zip(grid[:, 0], panels.items(), strict=True):
            _draw_panel(axes, title, lines)
        speeds = [speed for lines in panels.values() for _, medians in lines for speed in _speeds(medians).values()]
        grid[0, 0].set_xlim(min(0.5, *speeds) / 1.25, max(2, *speeds) * 2)
        grid[-1, 0].set_xlabel("times as fast as TensorStore's better form (logarithmic)", color=_TEXT, labelpad=6)
        figure.text(
            0.5, 1 - 0.12 * inch, "How fast the same labels are read, by each system in its own format",
            ha="center", va="top", fontsize=12, fontweight="bold",
        )  # fmt: skip
        figure.legend(
            handles=[
                Line2D([], [], linestyle="", marker="o", markersize=_size(name), color=color, label=name)
                for name, color in _COLORS.items()
                if name in shown
            ],
            ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.38 * inch), frameon=False, handletextpad=0.1,
            columnspacing=1.4, fontsize=9.5,
        )  # fmt: skip
        figure.text(
            0.5, 0.1 * inch, f"{machine}. Medians. Files in the page cache; no system keeps voxels.",
            ha="center", fontsize=8, color=_FAINT,
        )  # fmt: skip
        figure.savefig(path)


def _title(measured: Measured) -> str:
    return measured.title[0].upper() + measured.title[1:].replace("^3", "³")


def _speeds(medians: Mapping[str, float]) -> dict[str, float]:
    """Times as fast as TensorStore's best form, of the systems that the chart shows."""
    best = best_tensorstore(medians)
    return {} if best is None else {name: best / medians[name] for name in _COLORS if name in medians}


def _size(name: str) -> float:
    return 10 if name == ZarrDvid.name else 7.5


def _draw_panel(axes: Axes, title: str, lines: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=5)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, _TICK_NAMES)
    axes.minorticks_off()
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.set_ylim(len(lines) - 0.45, -0.55)
    axes.tick_params(length=0, labelcolor=_TEXT)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axvline(1, color=_FAINT, linewidth=1.2, zorder=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row, (_, medians) in enumerate(lines):
        speeds = _speeds(medians)
        slowest, fastest = min(speeds.values()), max(speeds.values())
        axes.plot([slowest, fastest], [row, row], color=_GRID, linewidth=3, zorder=1.5)
        for name, speed in reversed(speeds.items()):
            axes.plot(speed, row, "o", color=_COLORS[name], markersize=_size(name), markeredgecolor="white", zorder=3)
        if ZarrDvid.name in speeds:
            ours = {"color": _COLORS[ZarrDvid.name], "va": "center", "textcoords": "offset points"}
            axes.annotate(f"{speeds[ZarrDvid.name]:.1f}{_TIMES}", (fastest, row), (9, 0), fontweight="bold", **ours)
            right = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 9}
            axes.annotate(duration(medians[ZarrDvid.name]), (1, row), (52, 0), **right, **ours)
            if not row:
                axes.annotate("zarr-dvid takes", (1, row), (52, 21), **right, **ours)
