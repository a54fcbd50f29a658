"""Index data of an export at full size, without its voxels: `python -m benchmarks.simulate FOLDER`.

What is made has the files of an export of DVID's, each with its true name and length. CSV indexes, `info` and `export.log`
are whole; of an `.arrow` file its schema, the head of its first record and its end mark are there, and a hole between
them: an index can be loaded from it, a block can't be read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from zarr_dvid.export_log import ScaleSummary, export_log
from zarr_dvid.export_plan import ScalePlan, info_document
from zarr_dvid.record import END_OF_STREAM, record_message, schema_message
from zarr_dvid.volume import XYZ, grid_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Depths = npt.NDArray[np.float32]

SIDE = 32  # chunks, of a shard's cube
FULL = SIDE**3

# Lengths of records are spread as those of a real shard are (their logarithm by 0.77), and make 4.3 TB in all.
_MEAN_RECORD_BYTES = 7323
_SPREAD = 0.77

# Of the tissue, as fractions of the volume: a brain, two optic lobes, a neck and a nerve cord, each (centre, radii).
_LOBES = (
    ((0.50, 0.40, 0.25), (0.22, 0.26, 0.17)),
    ((0.17, 0.42, 0.25), (0.13, 0.24, 0.11)),
    ((0.83, 0.42, 0.25), (0.13, 0.24, 0.11)),
    ((0.50, 0.60, 0.50), (0.05, 0.07, 0.22)),
    ((0.50, 0.62, 0.74), (0.17, 0.17, 0.17)),
)
_RIPPLES, _RIPPLES_HIGH = (40, 40, 60), 0.2  # they make as many shards partly full as the male CNS has
_OUTSIDE = np.float32(np.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tissue:
    """What is simulated.

    Attributes:
        sizes_xyz: Voxels of each scale.
        n_blocks: Of all scales together.
        n_shards: Likewise, or None for as many as it takes.
    """

    sizes_xyz: tuple[XYZ, ...]
    n_blocks: int
    n_shards: int | None = None

    def shrunk(self, factor: int) -> Tissue:
        """The same shape with so many times fewer voxels a side."""
        sizes = tuple((-(-x // factor), -(-y // factor), -(-z // factor)) for x, y, z in self.sizes_xyz)
        return replace(self, sizes_xyz=sizes, n_blocks=self.n_blocks // factor**3, n_shards=None)


MALE_CNS = Tissue(
    sizes_xyz=(
        (94088, 78317, 134576),
        (47044, 39159, 67288),
        (23522, 19580, 33644),
        (11761, 9790, 16822),
        (5881, 4895, 8411),
        (2941, 2448, 4206),
        (1471, 1224, 2103),
        (736, 612, 1052),
        (368, 306, 526),
        (184, 153, 263),
    ),
    n_blocks=587_173_098,
    n_shards=26_128,
)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard to be made.

    Attributes:
        level: Its scale.
        origin_chunk: First chunk (x, y, z) of its cube.
        n_blocks: Blocks that it has.
    """

    level: int
    origin_chunk: XYZ
    n_blocks: int

    @property
    def path(self) -> str:
        """Of its files, without their endings, relative to the export."""
        return f"s{self.level}/{'_'.join(str(64 * c) for c in self.origin_chunk)}"


def simulate(folder: Path, tissue: Tissue = MALE_CNS, *, seed: int = 0, jobs: int = 1) -> list[ShardPlan]:
    """Makes the export in a folder that is not there yet. The same arguments make the same bytes.

    Returns:
        Its shards.

    Raises:
        ValueError: The shape takes fewer shards than `tissue` says.
    """
    plans = plan_shards(tissue)
    folder.mkdir(parents=True)
    scales = [ScalePlan(level, (z, y, x), SIDE) for level, (x, y, z) in enumerate(tissue.sizes_xyz)]
    (folder / "info").write_text(json.dumps(info_document(scales, (8.0, 8.0, 8.0))))
    for level in sorted({plan.level for plan in plans}):
        (folder / f"s{level}").mkdir()
    arguments = [(folder, tissue, plan, seed) for plan in plans]
    if jobs == 1:
        sizes = [_write(argument) for argument in arguments]
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            sizes = list(pool.map(_write, arguments, chunksize=16))
    summaries = []
    for level, size in enumerate(tissue.sizes_xyz):
        mine = [i for i, plan in enumerate(plans) if plan.level == level]
        records = [plans[i].n_blocks for i in mine]
        if records:
            summaries.append(ScaleSummary(level, size[::-1], records, [sizes[i] for i in mine]))
    (folder / "export.log").write_text(export_log(summaries))
    return plans


def plan_shards(tissue: Tissue) -> list[ShardPlan]:
    """Which shards there are, and how many blocks each has: just as many as `tissue` says.

    Raises:
        ValueError: The shape takes fewer shards than that.
    """
    sampled = [_sample(size) for size in tissue.sizes_xyz]
    counts = _fill(sampled, tissue.n_blocks)
    room = np.concatenate([_room(size).ravel() for size in tissue.sizes_xyz])
    natural = np.minimum(np.concatenate([count.ravel() for count in counts]), room)
    n_natural = int((natural > 0).sum())
    n_shards = n_natural if tissue.n_shards is None else tissue.n_shards
    if n_natural < n_shards:
        raise ValueError(f"the shape takes {n_natural} shards, which are fewer than {n_shards}")
    kept = np.sort(np.argsort(-natural / room, kind="stable")[:n_shards])  # the emptiest are left out
    n_blocks = _adjust(natural[kept], room[kept], tissue.n_blocks)
    places = [(level, np.array(xyz)) for level, count in enumerate(counts) for xyz in np.ndindex(*count.shape)]
    plans = []
    for i, n in zip(kept.tolist(), n_blocks.tolist(), strict=True):
        level, cell = places[i]
        x, y, z = (SIDE * cell).tolist()
        plans.append(ShardPlan(level, (x, y, z), n))
    return plans


def _depth(*at: Depths) -> Depths:
    """How far out of the tissue a place of the volume is: the smaller, the deeper within."""
    nearest: Any = _OUTSIDE
    for centre, radii in _LOBES:
        square = sum(((u - np.float32(c)) / np.float32(r)) ** 2 for u, c, r in zip(at, centre, radii, strict=True))
        nearest = np.minimum(nearest, square)
    waves = sum(np.sin(np.float32(n) * u + np.float32(i)) for i, (n, u) in enumerate(zip(_RIPPLES, at, strict=True)))
    depth: Depths = np.sqrt(nearest) + np.float32(_RIPPLES_HIGH) * waves
    return depth


def _depth_of_chunks(size_xyz: XYZ, *chunks: npt.NDArray[Any]) -> Depths:
    """`_depth` at chunks' middles, given along x, y and z, and infinite past the end of the volume."""
    at = [((64 * c + 32) / side).astype(np.float32) for c, side in zip(chunks, size_xyz, strict=True)]
    depth = _depth(*np.meshgrid(*at, indexing="ij", sparse=True))
    for axis, (c, n) in enumerate(zip(chunks, grid_of(size_xyz), strict=True)):
        np.moveaxis(depth, axis, 0)[c >= n] = _OUTSIDE
    return depth


def _sample(size_xyz: XYZ) -> tuple[Depths, int]:
    """Depths (x, y, z) of every chunk of a scale's cubes, or of every 4th along each axis of a large one; and which."""
    grid = grid_of(size_xyz)
    step = 1 if max(grid) <= 4 * SIDE else 4
    x, y, z = (np.arange(-(-n // SIDE) * SIDE // step) * step + (step - 1) / 2 for n in grid)
    # Slab by slab, to keep temporary arrays small.
    slabs = [_depth_of_chunks(size_xyz, part, y, z) for part in np.split(x, len(x) * step // SIDE)]
    return np.concatenate(slabs), step


def _fill(sampled: Sequence[tuple[Depths, int]], n_blocks: int) -> list[Ints]:
    """How many chunks of each cube lie within the depth that makes about `n_blocks` of all."""
    low, high = -1.0, 10.0
    for _ in range(40):
        limit = np.float32((low + high) / 2)
        found = sum(int(np.count_nonzero(depth < limit)) * step**3 for depth, step in sampled)
        low, high = (low, float(limit)) if found > n_blocks else (float(limit), high)
    counts = []
    for depth, step in sampled:
        n = SIDE // step
        x, y, z = (side // n for side in depth.shape)
        counts.append((depth < np.float32(low)).reshape(x, n, y, n, z, n).sum(axis=(1, 3, 5)) * step**3)
    return counts


def _room(size_xyz: XYZ) -> Ints:
    """How many chunks the volume has of each cube of a scale, shape (x, y, z)."""
    sides = [np.minimum(SIDE, n - np.arange(0, n, SIDE)) for n in grid_of(size_xyz)]
    room: Ints = np.einsum("i,j,k->ijk", *sides)
    return room


def _adjust(n_blocks: Ints, room: Ints, total: int) -> Ints:
    """Numbers of blocks near those given, from 1 to what there is room for, that make up a total.

    Raises:
        ValueError: There is no room for so many.
    """
    missing = total - int(n_blocks.sum())
    leeway = room - n_blocks if missing > 0 else n_blocks - 1
    if abs(missing) > leeway.sum():
        raise ValueError(f"{len(room)} shards can't have {total} blocks")
    if missing == 0:
        return n_blocks
    change = leeway * abs(missing) // int(leeway.sum())
    rest = abs(missing) - int(change.sum())
    left = leeway - change
    change += np.clip(rest - (np.cumsum(left) - left), 0, left)
    adjusted: Ints = n_blocks + int(math.copysign(1, missing)) * change
    return adjusted


def _write(arguments: tuple[Path, Tissue, ShardPlan, int]) -> int:
    """Writes a shard's files, and gives the length of its `.arrow`."""
    folder, tissue, plan, seed = arguments
    rng = np.random.default_rng([seed, plan.level, *plan.origin_chunk])
    chunks_xyz = _chunks(plan, tissue.sizes_xyz[plan.level])
    chunks_xyz = chunks_xyz[rng.permutation(plan.n_blocks)]  # DVID writes a strip's chunks as its threads come by them
    size_bytes = _record_sizes(rng, plan.n_blocks)
    x, y, z = chunks_xyz[0].tolist()
    head = _head((x, y, z), int(size_bytes[0]))
    size_bytes[0] += len(schema_message())  # which DVID counts with the first record
    offset_bytes = np.cumsum(size_bytes) - size_bytes
    end = int(size_bytes.sum())
    with (folder / f"{plan.path}.arrow").open("wb") as arrow:
        arrow.write(head)
        arrow.truncate(end)
        arrow.seek(end)
        arrow.write(END_OF_STREAM)
    columns = [*chunks_xyz.T, offset_bytes, size_bytes, np.zeros(plan.n_blocks, np.int64)]
    table = pa.table(dict(zip("xyzosb", (pa.array(np.ascontiguousarray(column)) for column in columns), strict=True)))
    with (folder / f"{plan.path}.csv").open("wb") as csv:
        csv.write(b"# schema_size=0\nx,y,z,offset,size,batch_idx\n")
        pa.csv.write_csv(table, csv, pa.csv.WriteOptions(include_header=False, batch_size=FULL))
    return end + len(END_OF_STREAM)


def _chunks(plan: ShardPlan, size_xyz: XYZ) -> Ints:
    """The shard's chunks (x, y, z): the deepest of its cube."""
    axes = [c + np.arange(SIDE) for c in plan.origin_chunk]
    if plan.n_blocks == FULL:
        cells = np.arange(FULL)
    else:
        depth = _depth_of_chunks(size_xyz, *axes).ravel()
        cells = np.argpartition(depth, plan.n_blocks - 1)[: plan.n_blocks]
        assert depth[cells].max() < _OUTSIDE, plan
    chunks_xyz: Ints = np.stack(np.unravel_index(cells, (SIDE,) * 3), axis=1) + np.array(plan.origin_chunk)
    return chunks_xyz


def _record_sizes(rng: np.random.Generator, n: int) -> Ints:
    """Lengths of records in bytes, multiples of 8."""
    drawn = rng.lognormal(math.log(_MEAN_RECORD_BYTES) - _SPREAD**2 / 2, _SPREAD, n)
    return np.maximum(8 * np.rint(drawn / 8).astype(np.int64), len(_record((0, 0, 0), 0)))


def _head(chunk_xyz: XYZ, size_bytes: int) -> bytes:
    """The start of a shard: its schema, and of its first record all but the block."""
    message = _record(chunk_xyz, size_bytes - len(_record(chunk_xyz, 0)))
    assert len(message) == size_bytes
    return schema_message() + message[: len(_record(chunk_xyz, 0))]


def _record(chunk_xyz: XYZ, block_bytes: int) -> bytes:
    label = np.zeros(1, np.uint64)
    return record_message(
        chunk_xyz, labels=label, supervoxels=label, block=bytes(block_bytes), uncompressed_size=block_bytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="so many times fewer voxels a side")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    arguments = parser.parse_args()
    tissue = MALE_CNS if arguments.shrink == 1 else MALE_CNS.shrunk(arguments.shrink)
    start = time.monotonic()
    plans = simulate(arguments.folder, tissue, jobs=arguments.jobs)
    n_blocks = sum(plan.n_blocks for plan in plans)
    print(f"{n_blocks:,} blocks in {len(plans):,} shards: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
