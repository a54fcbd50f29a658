"""Which chunks go into which shard of an export that is to be written, and the `info` document that says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr_dvid.block import ShapeZYX, Window

BOX_CHUNKS = 4
"""Chunks a side of what is read at once: 256^3 voxels, 134 MB."""

_CHUNK = 64
_MAX_PRESHIFT_BITS = 9  # as is usual; for DVID only the sum with the minishard's bits counts


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """The part of a shard that lies in one box.

    Attributes:
        origin_zyx: First chunk of the box. Boxes start at multiples of their side, so that a box may hold several
            small shards, and sources with chunks of up to 256 voxels a side are read once.
        chunks_zyx: Chunks of the shard in this box.
    """

    origin_zyx: ShapeZYX
    chunks_zyx: tuple[ShapeZYX, ...]

    def window(self, shape_zyx: ShapeZYX) -> Window:
        """Voxels of the whole box, cut where the volume ends."""
        return _window([_CHUNK * n for n in self.origin_zyx], BOX_CHUNKS * _CHUNK, shape_zyx)

    def chunk_window(self, chunk_zyx: ShapeZYX, box_shape_zyx: ShapeZYX) -> Window:
        """Voxels of a chunk, counted from the box's first, cut where the box ends."""
        start = [_CHUNK * (n - first) for n, first in zip(chunk_zyx, self.origin_zyx, strict=True)]
        return _window(start, _CHUNK, box_shape_zyx)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard that is to be written.

    Attributes:
        scale: Scale that it belongs to.
        origin_zyx: First chunk of its cube.
        stop_zyx: First chunk behind it, cut where the volume ends.
    """

    scale: int
    origin_zyx: ShapeZYX
    stop_zyx: ShapeZYX

    @property
    def name(self) -> str:
        """Path of its files in the export, without suffix: the first voxel of its cube in x, y, z order."""
        z, y, x = self.origin_zyx
        return f"s{self.scale}/{_CHUNK * x}_{_CHUNK * y}_{_CHUNK * z}"

    @property
    def n_chunks(self) -> int:
        """Chunks that it can have."""
        z, y, x = (stop - start for start, stop in zip(self.origin_zyx, self.stop_zyx, strict=True))
        return z * y * x

    def boxes(self) -> Iterator[BoxPlan]:
        """What to read for it, box after box."""
        first_zyx = _zyx(n // BOX_CHUNKS * BOX_CHUNKS for n in self.origin_zyx)
        for box_zyx in _origins(first_zyx, self.stop_zyx, BOX_CHUNKS):
            start = _zyx(map(max, self.origin_zyx, box_zyx))
            stop = _zyx(min(end, n + BOX_CHUNKS) for end, n in zip(self.stop_zyx, box_zyx, strict=True))
            yield BoxPlan(box_zyx, tuple(_origins(start, stop, 1)))


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """A scale that is to be written.

    Attributes:
        scale: Its number, 0 for full resolution.
        shape_zyx: Voxels.
        shard_chunks: Chunks a side of a shard's cube; a power of two.
    """

    scale: int
    shape_zyx: ShapeZYX
    shard_chunks: int

    @property
    def grid_zyx(self) -> ShapeZYX:
        """Chunks along each axis."""
        return _zyx(-(-n // _CHUNK) for n in self.shape_zyx)

    @property
    def n_chunks(self) -> int:
        """Chunks of the whole grid."""
        z, y, x = self.grid_zyx
        return z * y * x

    def coarser(self) -> ScalePlan:
        """The next scale."""
        return ScalePlan(self.scale + 1, _zyx((n + 1) // 2 for n in self.shape_zyx), self.shard_chunks)

    def shards(self) -> Iterator[ShardPlan]:
        """All shards that may get blocks. Those that share a box follow one another."""
        group = max(self.shard_chunks, BOX_CHUNKS)
        for group_zyx in _origins((0, 0, 0), self.grid_zyx, group):
            group_stop = self._cut(group_zyx, group)
            for origin_zyx in _origins(group_zyx, group_stop, self.shard_chunks):
                yield ShardPlan(self.scale, origin_zyx, self._cut(origin_zyx, self.shard_chunks))

    def sharding(self) -> dict[str, str | int]:
        """The sharding specification by which DVID gives the same chunks to the same files.

        DVID hands out the bits that a shard spans to x, y, z in turn, skipping an axis whose chunks are all told apart
        already. With as many bits as all axes need for one cube together, each gets just its own, whatever the grid.
        """
        needed = [(n - 1).bit_length() for n in self.grid_zyx]
        cube = self.shard_chunks.bit_length() - 1
        spanned = sum(min(bits, cube) for bits in needed)
        preshift = min(spanned, _MAX_PRESHIFT_BITS)
        return {
            "@type": "neuroglancer_uint64_sharded_v1",
            "hash": "identity",
            "minishard_bits": spanned - preshift,
            "minishard_index_encoding": "gzip",
            "preshift_bits": preshift,
            "shard_bits": sum(needed) - spanned,
        }

    def _cut(self, origin_zyx: ShapeZYX, side: int) -> ShapeZYX:
        return _zyx(min(start + side, n) for start, n in zip(origin_zyx, self.grid_zyx, strict=True))


def info_document(scales: Sequence[ScalePlan], voxel_size_zyx: tuple[float, float, float] | None) -> dict[str, Any]:
    """The neuroglancer volume description of an export, as DVID's ``export-shards`` takes it.

    Args:
        scales: All scales, from 0 on.
        voxel_size_zyx: Nanometres at scale 0. Where it is None the document has no `resolution`: Neuroglancer asks for
            one, DVID does not, and a made-up one could not be told from a true one.
    """
    return {
        "@type": "neuroglancer_multiscale_volume",
        "data_type": "uint64",
        "num_channels": 1,
        "scales": [_info_scale(plan, voxel_size_zyx) for plan in scales],
        "type": "segmentation",
    }


def _info_scale(plan: ScalePlan, voxel_size_zyx: tuple[float, float, float] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "chunk_sizes": [[_CHUNK] * 3],
        "encoding": "compressed_segmentation",
        "key": f"s{plan.scale}",
        "sharding": plan.sharding(),
        "size": list(reversed(plan.shape_zyx)),
    }
    if voxel_size_zyx is not None:
        described["resolution"] = [size * 2**plan.scale for size in reversed(voxel_size_zyx)]
    return described


def _origins(start_zyx: ShapeZYX, stop_zyx: ShapeZYX, step: int) -> Iterator[ShapeZYX]:
    """First chunks of cubes of `step` chunks a side, x fastest."""
    z, y, x = (range(start, stop, step) for start, stop in zip(start_zyx, stop_zyx, strict=True))
    return product(z, y, x)


def _window(start_zyx: Sequence[int], side: int, shape_zyx: ShapeZYX) -> Window:
    z, y, x = (slice(start, min(start + side, n)) for start, n in zip(start_zyx, shape_zyx, strict=True))
    return z, y, x


def _zyx(numbers: Iterable[int]) -> ShapeZYX:
    z, y, x = numbers
    return z, y, x
