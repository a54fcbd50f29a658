"""Reads the same volumes with each system, in turns, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks.forms import Form, write_forms
from benchmarks.operations import FIRST, TITLES, Subject, random_boxes
from benchmarks.systems import SYSTEMS
from benchmarks.volumes import Tiled

if TYPE_CHECKING:
    from benchmarks.volumes import Box

ROUNDS = 5
_SECONDS_TO_END = 10
_CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was timed on one volume.

    Attributes:
        subject: Name of the volume.
        title: The volume in words.
        shape_zyx: Its voxels along each axis.
        forms: As which it lay on disk.
        seconds: Of each read, by operation and system.
        settings: Of each system.
    """

    subject: str
    title: str
    shape_zyx: tuple[int, ...]
    forms: list[Form]
    seconds: dict[str, dict[str, list[float]]]
    settings: dict[str, str]

    def medians(self, operation: str) -> dict[str, float]:
        """Median seconds of each system that was timed at an operation."""
        return {name: statistics.median(seconds) for name, seconds in self.seconds.get(operation, {}).items()}


def absent_systems() -> dict[str, str]:
    """Why systems can't be measured here, by name; those that can are not in it."""
    reasons = {name: system.absent() for name, system in SYSTEMS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def versions() -> dict[str, str]:
    """Versions of all packages that are measured."""
    packages = {package for name, system in SYSTEMS.items() if not system.absent() for package in system.packages}
    return {package: importlib.metadata.version(package) for package in sorted(packages)}


def measure(subjects: Sequence[Subject], say: Callable[[str], None]) -> list[Measured]:
    """Writes and measures volumes, in a temporary folder.

    Args:
        subjects: The volumes, and what is read of them.
        say: Is told what is being done.

    Raises:
        RuntimeError: A system failed, or read other voxels than were written.
    """
    names = [name for name in SYSTEMS if name not in absent_systems()]
    with tempfile.TemporaryDirectory(prefix="zarr-dvid-benchmark-") as folder:
        return [_measure_one(subject, Path(folder) / subject.name, names, say) for subject in subjects]


def _measure_one(subject: Subject, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> Measured:
    say(f"{subject.name}: writing")
    folder.mkdir()
    volume = Tiled(subject.make(), subject.n_tiles_zyx)
    volume.save(folder)
    forms = write_forms(volume, folder)
    seconds: dict[str, dict[str, list[float]]] = {}
    settings: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, folder, volume)) for name in names}
        for operation, n_calls in subject.n_calls.items():
            boxes = random_boxes(operation, volume.shape, n_calls * ROUNDS)
            rounds = [boxes[start : start + n_calls] for start in range(0, len(boxes), n_calls)]
            distinct = [box for number, box in enumerate(rounds[0]) if box not in rounds[0][:number]]
            able = [name for name in names if operation not in SYSTEMS[name].leaves_out]
            say(f"{subject.name}: {TITLES[operation]}")
            for name in able:
                settings[name] = workers[name].check(operation, distinct)
            seconds[operation] = {name: [] for name in able}
            for number, part in enumerate(rounds):
                # Each round begins with another system.
                begin = number % len(able)
                for name in able[begin:] + able[:begin]:
                    seconds[operation][name] += workers[name].time(operation, part)
    return Measured(
        subject=subject.name,
        title=subject.title,
        shape_zyx=volume.shape,
        forms=forms,
        seconds=seconds,
        settings=settings,
    )


class Worker:
    """The process of one system, which lives as long as one volume is measured.

    Only one works at a time; the others wait for their next request.
    """

    def __init__(self, name: str, folder: Path, volume: Tiled) -> None:
        self._name, self._folder, self._volume = name, folder, volume
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_CHECKOUT,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        # A closed pipe ends it, unless it hangs.
        with self._process:
            self._requests.close()
            try:
                self._process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()

    @property
    def _requests(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def check(self, operation: str, boxes: list[Box]) -> str:
        """Has it compare what it reads with what was written, and tell its setting.

        Raises:
            RuntimeError: It differs, or the process failed.
        """
        if operation == FIRST:
            self.time(operation, boxes)
        setting: str = self._ask("check", operation, boxes)["setting"]
        return setting

    def time(self, operation: str, boxes: list[Box]) -> list[float]:
        """Has it read boxes one after another; gives the seconds of each.

        Raises:
            RuntimeError: The process failed.
        """
        if operation == FIRST:
            return [self._time_fresh_process(box) for box in boxes]
        seconds: list[float] = self._ask("time", operation, boxes)["seconds"]
        return seconds

    def _ask(self, do: str, operation: str, boxes: list[Box]) -> dict[str, Any]:
        assert self._process.stdout is not None
        places = [[(part.start, part.stop) for part in box] for box in boxes]
        print(json.dumps({"do": do, "operation": operation, "boxes": places}), file=self._requests, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} failed, at {operation}; its process tells above why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _time_fresh_process(self, box: Box) -> float:
        """Seconds from the start of a process until it has read a box."""
        corner = [str(part.start) for part in box]
        command = [sys.executable, "-m", "benchmarks.first", self._name, str(self._folder), *corner]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_CHECKOUT) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
        expected = int(self._volume[box][0, 0, 0])
        if line != f"{expected}\n":
            raise RuntimeError(f"{self._name}: a fresh process gave {line!r} for the first voxel of {box}, not {expected}")
        return seconds
