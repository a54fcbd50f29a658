"""What was measured, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        name: What was timed.
        microseconds: Median time of one operation.
        ratio: It, or what `ratio_of` says, over a time it is held against.
        ratio_of: The two, in words.
        target: The ratio that it should not exceed.
    """

    name: str
    microseconds: float
    ratio: float | None = None
    ratio_of: str = ""
    target: float | None = None


def render(title: str, rows: Sequence[Row]) -> str:
    """Renders rows below a title, as aligned columns."""
    cells = [("", "time", "ratio", "target", "", "ratio of")]
    for row in rows:
        met = "" if row.ratio is None or row.target is None else "met" if row.ratio <= row.target else "MISSED"
        cells.append((row.name, _time(row.microseconds), _number(row.ratio), _number(row.target), met, row.ratio_of))
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    lines = [title]
    for name, *numbers, met, ratio_of in cells:
        fields = [name.ljust(widths[0])]
        fields += [number.rjust(width) for number, width in zip(numbers, widths[1:4], strict=True)]
        lines.append("  ".join([*fields, met.ljust(widths[4]), ratio_of]).rstrip())
    return "\n".join(lines)


def aligned(cells: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of a table whose first `left` columns begin, and whose others end, at the same place in each line."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for cell in cells:
        fields = [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(cell, widths, strict=True))
        ]
        lines.append("  ".join(fields).rstrip())
    return lines


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms" if microseconds >= 10_000 else f"{microseconds:.1f} us"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
