"""A process of one system, which reads what it is asked to, one request at a time.

Started as ``python -m benchmarks.worker SYSTEM FOLDER``. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.operations import INTO
from benchmarks.systems import SYSTEMS, System
from benchmarks.volumes import Tiled

if TYPE_CHECKING:
    from benchmarks.volumes import Box, Voxels

_COMPARED_AT_ONCE = 64  # planes


class WrongVoxelsError(Exception):
    """A system has read other voxels than were written."""


def times(system: System, volume: Tiled, operation: str, boxes: list[Box]) -> list[float]:
    """Seconds of each read. Fresh memory is given back after the clock has stopped."""
    seconds = []
    out = _given_memory(boxes[0]) if operation == INTO else None
    for box in boxes:
        system.prepare(box, volume)
        voxels: Voxels | None = None
        start = time.perf_counter()
        if out is None:
            voxels = system.read(box)
        else:
            system.read_into(box, out)
        seconds.append(time.perf_counter() - start)
        del voxels
    return seconds


def check(system: System, volume: Tiled, operation: str, boxes: list[Box]) -> None:
    """Compares what a system reads with what was written.

    Raises:
        WrongVoxelsError: It differs.
    """
    for box in boxes:
        system.prepare(box, volume)
        if operation == INTO:
            voxels = _given_memory(box)
            system.read_into(box, voxels)
        else:
            voxels = system.read(box)
        if voxels.shape != tuple(part.stop - part.start for part in box):
            raise WrongVoxelsError(f"{system.name}: {operation} of {box} gave voxels of shape {voxels.shape}")
        planes, *rest = box
        for start in range(planes.start, planes.stop, _COMPARED_AT_ONCE):
            stop = min(start + _COMPARED_AT_ONCE, planes.stop)
            written = volume[slice(start, stop), rest[0], rest[1]]
            if not np.array_equal(voxels[start - planes.start : stop - planes.start], written):
                raise WrongVoxelsError(f"{system.name}: {operation} of {box} gave other voxels than were written")


def _given_memory(box: Box) -> Voxels:
    """Memory for a box, which has been touched. It is not zero, so that voxels that are not written show."""
    return np.full([part.stop - part.start for part in box], 1, np.uint64)


def answer(system: System, volume: Tiled, request: dict[str, Any]) -> dict[str, Any]:
    """Does what a request says."""
    boxes: list[Box] = [(slice(*z), slice(*y), slice(*x)) for z, y, x in request["boxes"]]
    if request["do"] == "time":
        return {"seconds": times(system, volume, request["operation"], boxes)}
    if system.gives_voxels:
        check(system, volume, request["operation"], boxes)
    return {"setting": system.setting}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system, volume = SYSTEMS[name](folder), Tiled.load(folder)
    gc.disable()
    for line in sys.stdin:
        print(json.dumps(answer(system, volume, json.loads(line))), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
