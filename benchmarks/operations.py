"""What is timed against other systems: which boxes of which volumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.volumes import dense_volume, sparse_volume

if TYPE_CHECKING:
    from benchmarks.volumes import Box, Voxels

CHUNK = 64  # voxels a side
INTO, FRESH, RANDOM, CUTOUT, FIRST = "given memory", "fresh memory", "chunk", "cutout", "process"
PLANES = {"z plane": 0, "y plane": 1, "x plane": 2}
TITLES = {
    INTO: "the whole volume, into given memory",
    FRESH: "the whole volume, into fresh memory",
    RANDOM: "one random chunk of 64^3",
    CUTOUT: "64^3 voxels across 8 chunks, half a chunk off along each axis",
    **{name: f"one {name[0]} plane of the volume" for name in PLANES},
    FIRST: "a fresh process, from its start to its first chunk",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A volume that all systems read, and what they read of it.

    Attributes:
        name: Of its folder, and in tables.
        title: In words.
        make: Gives the tile that the volume is made of.
        n_tiles_zyx: See `Tiled`.
        n_calls: Reads of each operation by each system in each round. The operations are timed in this order.
    """

    name: str
    title: str
    make: Callable[[], Voxels]
    n_tiles_zyx: tuple[int, int, int]
    n_calls: dict[str, int]


_CALLS = {INTO: 2, FRESH: 2, RANDOM: 20, CUTOUT: 10, **dict.fromkeys(PLANES, 2)}
_QUICK_CALLS = {INTO: 1, FRESH: 1, RANDOM: 3, CUTOUT: 3, **dict.fromkeys(PLANES, 1)}
SUBJECTS = (
    Subject(
        name="sparse",
        title="sparse, 512^3 voxels, as scale 0 of the male CNS",
        make=lambda: sparse_volume(256),
        n_tiles_zyx=(2, 2, 2),
        n_calls={**_CALLS, FIRST: 1},
    ),
    Subject(
        name="dense",
        title="dense, 256^3 voxels, as scale 3 of the male CNS",
        make=lambda: dense_volume(256),
        n_tiles_zyx=(1, 1, 1),
        n_calls=_CALLS,
    ),
    Subject(
        name="wide",
        title="wide, 64 x 4096 x 4096 voxels, as sparse",
        make=lambda: sparse_volume(256)[:CHUNK],
        n_tiles_zyx=(1, 16, 16),
        n_calls={"z plane": 1},
    ),
)
QUICK_SUBJECTS = (
    Subject(
        name="sparse",
        title="sparse, 256^3 voxels: a trial",
        make=lambda: sparse_volume(128),
        n_tiles_zyx=(2, 2, 2),
        n_calls={**_QUICK_CALLS, FIRST: 1},
    ),
    Subject(
        name="dense",
        title="dense, 128^3 voxels: a trial",
        make=lambda: dense_volume(128),
        n_tiles_zyx=(1, 1, 1),
        n_calls=_QUICK_CALLS,
    ),
    Subject(
        name="wide",
        title="wide, 64 x 512 x 512 voxels: a trial",
        make=lambda: sparse_volume(128)[:CHUNK],
        n_tiles_zyx=(1, 4, 4),
        n_calls={"z plane": 1},
    ),
)


def whole(shape_zyx: tuple[int, ...]) -> Box:
    """The box of a whole volume."""
    z, y, x = (slice(0, n) for n in shape_zyx)
    return z, y, x


def random_boxes(operation: str, shape_zyx: tuple[int, ...], n: int, *, seed: int = 0) -> list[Box]:
    """Boxes that an operation reads, the same for the same arguments.

    Args:
        operation: One of `TITLES`.
        shape_zyx: Of the volume.
        n: How many.
        seed: Chooses others.

    Returns:
        Three slices each: whole volumes, chunks, cutouts of a chunk's size half a chunk off along each axis, or planes.
        No two are equal before all have had their turn.
    """
    if operation in (INTO, FRESH):
        return [whole(shape_zyx)] * n
    rng = np.random.default_rng([seed, sorted(TITLES).index(operation)])
    boxes: list[Box] = []
    while len(boxes) < n:
        boxes += _all_boxes(operation, shape_zyx, rng)
    return boxes[:n]


def _all_boxes(operation: str, shape_zyx: tuple[int, ...], rng: np.random.Generator) -> list[Box]:
    if operation in PLANES:
        axis = PLANES[operation]
        planes = []
        for at in rng.permutation(shape_zyx[axis]).tolist():
            parts = list(whole(shape_zyx))
            parts[axis] = slice(at, at + 1)
            planes.append((parts[0], parts[1], parts[2]))
        return planes
    offset, n_spare = (CHUNK // 2, 1) if operation == CUTOUT else (0, 0)
    grid = [n // CHUNK - n_spare for n in shape_zyx]
    boxes = []
    for number in rng.permutation(np.prod(grid)).tolist():
        starts = np.array(np.unravel_index(number, grid)) * CHUNK + offset
        z, y, x = (slice(start, start + CHUNK) for start in starts.tolist())
        boxes.append((z, y, x))
    return boxes
