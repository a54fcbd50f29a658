"""A small made-up segmentation of brain tissue, for demonstrations and benchmarks without real data.

Processes are strings of balls, and a voxel belongs to the ball whose power (squared distance less squared radius) is
least there. Thick processes so keep their round outline, and thin ones share the room between them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.block import ShapeZYX

    Floats = npt.NDArray[np.float64]
    Floats32 = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.int64]
    Voxels = npt.NDArray[np.uint64]

_CENTER = np.array([0.5, 1.0, 0.85])  # of the tissue, (z, y, x), in units of the volume's size
_SEMI_AXES = np.array([1.6, 0.9, 0.75])
_MARGIN = 24.0  # voxels outside the volume in which processes run too
_TILE = 16  # voxels a side of the cubes that are filled at once
_MAX_POWER = 80.0  # voxels squared; where no ball's power is less, there is background
_MAX_RIPPLE = 2.5  # voxels
_SUB = 16  # positions are whole sixteenths of a voxel: float32 sums of them are exact, so no machine's order matters
_FIRST_ID = 10**10


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of process.

    Attributes:
        density: Processes per million voxels.
        radii: Thinnest and thickest, in voxels.
        length: Voxels, on average.
        wander: How much its course bends.
        rooted: Share of these that branch off a thicker process, and belong to its body.
    """

    density: float
    radii: tuple[float, float]
    length: float
    wander: float
    rooted: float


_KINDS = (
    _Kind(density=1.4, radii=(12, 23), length=500, wander=0.10, rooted=0.0),
    _Kind(density=8, radii=(6.5, 12), length=500, wander=0.15, rooted=0.4),
    _Kind(density=60, radii=(3.2, 6), length=400, wander=0.20, rooted=0.1),
)


@dataclass(frozen=True, slots=True)
class _Balls:
    """The balls that processes are made of."""

    center_zyx: Floats  # (n, 3), voxels
    radius: Floats  # (n,), voxels
    body: Ints  # (n,)
    supervoxel: Ints  # (n,), numbered over all bodies

    def where(self, keep: npt.NDArray[np.bool_] | Ints) -> _Balls:
        return _Balls(self.center_zyx[keep], self.radius[keep], self.body[keep], self.supervoxel[keep])

    def joined(self, other: _Balls) -> _Balls:
        return _Balls(
            np.concatenate([self.center_zyx, other.center_zyx]),
            np.concatenate([self.radius, other.radius]),
            np.concatenate([self.body, other.body]),
            np.concatenate([self.supervoxel, other.supervoxel]),
        )


def neurite_volume(shape_zyx: ShapeZYX, *, seed: int = 0) -> tuple[Voxels, dict[int, int]]:
    """Makes a segmentation that looks like brain tissue: winding, branching processes of all widths, closely packed.

    The tissue ends in a rounded surface, beyond which everything is 0; in a volume of 256^3 so are whole 64^3 chunks.
    The same shape and seed always give the same volume. A volume of 256^3 takes some three seconds.

    Args:
        shape_zyx: Voxels, (z, y, x).
        seed: Chooses another volume.

    Returns:
        The supervoxels, uint64 of that shape, and the body of each supervoxel that is not one on its own. Labels are
        `mapping.get(supervoxel, supervoxel)`. Ids are large and have gaps, as DVID's have.
    """
    rng = np.random.default_rng(seed)
    balls = _grow(rng, shape_zyx)
    owner = _fill(shape_zyx, balls, _ripples(rng, shape_zyx))
    kept = np.zeros(balls.radius.size + 1, bool)
    kept[owner] = True
    numbers, first = np.unique(balls.supervoxel[kept[1:]], return_index=True)
    bodies = balls.body[kept[1:]][first]
    ids = _FIRST_ID + np.cumsum(1 + (rng.random(numbers.size) * 5000).astype(np.int64))
    id_of_ball = np.zeros(kept.size, np.uint64)
    id_of_ball[1:][kept[1:]] = ids[np.searchsorted(numbers, balls.supervoxel[kept[1:]])]
    # As in DVID, a body goes by the id of one of its supervoxels.
    _, first, place, n_supervoxels = np.unique(bodies, return_index=True, return_inverse=True, return_counts=True)
    merged = n_supervoxels[place] > 1
    mapping = dict(zip(ids[merged].tolist(), ids[first[place]][merged].tolist(), strict=True))
    return id_of_ball[owner], mapping


def _grow(rng: np.random.Generator, shape: ShapeZYX) -> _Balls:
    """Grows processes of each kind, thick ones first, in and a little around the volume."""
    size = np.array(shape, float)
    low, high = -_MARGIN, size + _MARGIN
    balls = _Balls(np.empty((0, 3)), np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
    for kind in _KINDS:
        n = 1 + int(kind.density * float(np.prod(high - low)) / 1e6)
        start = low + rng.random((n, 3)) * (high - low)
        body = np.arange(n) + balls.body.max(initial=-1) + 1
        if balls.body.size:
            root = (rng.random(n) * balls.body.size).astype(np.int64)
            rooted = rng.random(n) < kind.rooted
            start[rooted] = balls.center_zyx[root[rooted]]
            body[rooted] = balls.body[root[rooted]]
        inside = _depth(start, size) > 0
        first_supervoxel = int(balls.supervoxel.max(initial=-1)) + 1
        grown = _processes(rng, kind, start[inside], body[inside], first_supervoxel, size)
        near = ((grown.center_zyx > low) & (grown.center_zyx < high)).all(1) & (_depth(grown.center_zyx, size) > 0)
        balls = balls.joined(grown.where(near))
    return balls


def _depth(point_zyx: Floats, size: Floats) -> Floats:
    """How far inside the tissue points are: 1 at its centre, 0 at its surface, which is an ellipsoid."""
    depth: Floats = 1 - np.linalg.norm((point_zyx - _CENTER * size) / (_SEMI_AXES * size), axis=-1)
    return depth


def _unit(vectors: Floats) -> Floats:
    unit: Floats = vectors / (np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-9)
    return unit


def _processes(
    rng: np.random.Generator, kind: _Kind, start: Floats, body: Ints, first_supervoxel: int, size: Floats
) -> _Balls:
    """Lets a process of this kind wander from each start, shape (n, 3)."""
    n = len(start)
    thinnest, thickest = kind.radii
    radius = thinnest * (thickest / thinnest) ** rng.random(n)
    stride = np.maximum(0.8 * radius, 1.8)[:, None]
    n_steps = int(kind.length / max(1.8, 0.4 * (thinnest + thickest)))
    heading = _unit(rng.random((n, 3)) + rng.random((n, 3)) - 1)
    turn = np.zeros((n, 3))
    center = np.empty((n_steps, n, 3))
    here = start
    for step in range(n_steps):
        center[step] = here
        turn = 0.85 * turn + kind.wander * (stride / 2.5) * (rng.random((n, 3)) - 0.5)
        homing = np.maximum(0.1 - _depth(here, size), 0)[:, None]
        heading = _unit(heading + turn + 8 * homing * _unit(_CENTER * size - here))
        here = here + stride * heading
    along = np.arange(n_steps)[:, None] * stride[:, 0]
    phase = 2 * np.pi * rng.random((2, n))
    swelling = 1 + 0.18 * np.sin(along / (2.1 * radius) + phase[0]) + 0.12 * np.sin(along / (0.9 * radius) + phase[1])
    # Supervoxels are cut across, some fifteen diameters long.
    piece = (along / (30 * radius) + rng.random(n)).astype(np.int64)
    supervoxel = first_supervoxel + piece + np.arange(n) * (piece.max(initial=0) + 1)
    return _Balls(center.reshape(-1, 3), (radius * swelling).reshape(-1), np.tile(body, n_steps), supervoxel.reshape(-1))


def _ripples(rng: np.random.Generator, shape: ShapeZYX) -> list[Floats32]:
    """Shifts along z, y and x, each over the plane of the other two axes, that make straight borders curve.

    In units of 1 / _SUB voxel, whole numbers; shapes (y, x), (z, x) and (z, y), in whole tiles.
    """
    ripples = []
    for axis in range(3):
        rows, columns = (-(-size // _TILE) * _TILE for d, size in enumerate(shape) if d != axis)
        row, column = np.arange(rows)[:, None], np.arange(columns)
        shift = np.zeros((rows, columns))
        for angle, phase, length in rng.random((10, 3)):
            wavelength = 9 + 30 * length
            course = np.cos(2 * np.pi * angle) * row + np.sin(2 * np.pi * angle) * column
            shift += wavelength / 65 * np.sin(2 * np.pi * (course / wavelength + phase))
        ripples.append(np.rint(_SUB * np.clip(shift, -_MAX_RIPPLE, _MAX_RIPPLE)).astype(np.float32))
    return ripples


def _fill(shape: ShapeZYX, balls: _Balls, ripples: list[Floats32]) -> npt.NDArray[np.int32]:
    """Gives each voxel the ball it belongs to: its number plus 1, or 0 for background; int32, shape (z, y, x)."""
    center = np.rint(_SUB * balls.center_zyx)
    radius_squared = np.rint((_SUB * balls.radius) ** 2)
    background = _MAX_POWER * _SUB**2
    half = _SUB * (_TILE / 2 + _MAX_RIPPLE)
    reach = np.sqrt(radius_squared + background) + half
    ticks = (_SUB * (np.arange(_TILE) - _TILE // 2)).astype(np.float32)
    voxels = np.ones((5, _TILE, _TILE, _TILE), np.float32)  # z, y, x, 1, z^2 + y^2 + x^2
    owner = np.zeros([-(-size // _TILE) * _TILE for size in shape], np.int32)
    z_starts, y_starts, x_starts = (range(0, size, _TILE) for size in shape)
    for z, y in itertools.product(z_starts, y_starts):
        middle = _SUB * (np.array([z, y]) + _TILE // 2)
        near_row = np.flatnonzero((np.abs(center[:, :2] - middle) < reach[:, None]).all(1))
        for x in x_starts:
            near = near_row[np.abs(center[near_row, 2] - _SUB * (x + _TILE // 2)) < reach[near_row]]
            at = center[near] - (*middle, _SUB * (x + _TILE // 2))
            wins = (np.maximum(np.abs(at) - half, 0) ** 2).sum(1) - radius_squared[near] < background
            near, at = near[wins], at[wins]
            if near.size == 0:
                continue
            power = (at**2).sum(1) - radius_squared[near]
            # The powers of two balls differ linearly over the tile; whichever loses everywhere can be left out.
            best = power.argmin()
            wins = power - power[best] <= 2 * half * np.abs(at - at[best]).sum(1)
            near, at, power = near[wins], at[wins], power[wins]
            terms = np.zeros((5, near.size + 1), np.float32)
            terms[3, 0] = background
            terms[:3, 1:], terms[3, 1:], terms[4, 1:] = -2 * at.T, power, 1
            tile = slice(z, z + _TILE), slice(y, y + _TILE), slice(x, x + _TILE)
            voxels[0] = ticks[:, None, None] + ripples[0][tile[1], tile[2]]
            voxels[1] = ticks[:, None] + ripples[1][tile[0], None, tile[2]]
            voxels[2] = ticks + ripples[2][tile[0], tile[1], None]
            voxels[4] = (voxels[:3] ** 2).sum(0)
            winner = (voxels.reshape(5, -1).T @ terms).argmin(1)
            owner[tile] = np.concatenate(([0], near + 1))[winner].reshape(voxels.shape[1:])
    z, y, x = shape
    return owner[:z, :y, :x]
