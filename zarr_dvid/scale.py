"""One scale of an export: its shards, and which of them may hold a chunk."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.cache import ByteBoundedCache
from zarr_dvid.errors import ExportError, ExportWarning, ShardIndexError, ZarrDvidError
from zarr_dvid.reader import FileInfo, Reader
from zarr_dvid.shard import Cube, Shard, ShardFiles, load_shard, read_index_rows, to_chunks, units_of
from zarr_dvid.shard_index import CHUNK_VOXELS, chunk_key, from_keys, to_keys
from zarr_dvid.volume import XYZ, Sharding, grid_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_SHARD_NAME = re.compile(r"(0|[1-9]\d{0,9})_(0|[1-9]\d{0,9})_(0|[1-9]\d{0,9})")
_INDEX_ENDINGS = ("-offsets.csv", ".csv", ".json")

# Up to so many bytes of index files, all of a scale's are read before a chunk is said to be absent; above, a sample.
_CHECK_ALL_BYTES = 256 << 20
_SAMPLE_SHARDS = 16

shard_cache: ByteBoundedCache[Shard] = ByteBoundedCache(256 << 20)
"""Loaded shards of all exports of this process."""


def group_files(directory: str, files: Sequence[FileInfo]) -> tuple[dict[XYZ, ShardFiles], list[str]]:
    """Sorts a scale directory's files into shards, by the voxel origin (x, y, z) in their names; and names the rest."""
    arrows: dict[XYZ, FileInfo] = {}
    indexes: dict[XYZ, list[FileInfo]] = {}
    others = []
    for file in files:
        ending = next((end for end in (".arrow", *_INDEX_ENDINGS) if file.name.endswith(end)), "")
        match = _SHARD_NAME.fullmatch(file.name.removesuffix(ending)) if ending and not file.is_dir else None
        if match is None:
            others.append(file.name)
            continue
        origin = (int(match[1]), int(match[2]), int(match[3]))
        if ending == ".arrow":
            arrows[origin] = file
        else:
            indexes.setdefault(origin, []).append(file)
    shards = {}
    for origin in sorted(arrows.keys() | indexes.keys()):
        found = tuple(sorted(indexes.get(origin, ()), key=lambda file: file.name))
        shards[origin] = ShardFiles(directory, origin, arrows.get(origin), found)
    return shards, sorted(others)


def common_cube(origins_voxel: Iterator[XYZ]) -> int:
    """A side that every shard's cube has, or a multiple of it: the greatest common divisor of all names; 0 if all are 0.

    Names are multiples of one side D for each scale. A multiple of D serves as well to find a chunk's file: the files
    that are there all start at its borders.
    """
    return math.gcd(*(side for origin in origins_voxel for side in origin))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Whether the chunks of a scale lie in the cubes of their files; and if not, which files they lie in.

    Attributes:
        keys: Of all chunks, ascending; empty where they lie in their cubes.
        origins: The shard of each.
        broken: Why the shards that could not be indexed could not; what they hold is not known.
        is_scattered: Whether some lie outside.
    """

    keys: Ints
    origins: list[XYZ]
    broken: tuple[ZarrDvidError, ...]
    is_scattered: bool

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.keys.nbytes + 8 * len(self.origins)


_IN_CUBES = Placement(np.empty(0, np.int64), [], (), is_scattered=False)
_placement_cache: ByteBoundedCache[Placement] = ByteBoundedCache(256 << 20)


class Scale:
    """One scale of an export.

    Args:
        reader: Of the export's files.
        level: Its number.
        shards: Its shards by voxel origin (x, y, z).
        size_xyz: Voxels of its volume, or None where no document tells.
        sharding: From the volume description, or None.
    """

    def __init__(
        self,
        reader: Reader,
        level: int,
        shards: Mapping[XYZ, ShardFiles],
        *,
        size_xyz: XYZ | None,
        sharding: Sharding | None,
    ) -> None:
        self.level = level
        self.shards = shards
        self._reader = reader
        self._documented_size = size_xyz
        self._sharding = sharding
        self._cube = Cube(common_cube(iter(shards)), None if size_xyz is None else grid_of(size_xyz))
        if self._cube.side_voxels % CHUNK_VOXELS:
            origin = next(o for o in shards if any(side % CHUNK_VOXELS for side in o))
            raise ExportError(
                "a shard's name is no place of a chunk",
                path=shards[origin].path,
                expected="multiples of 64",
                found=origin,
            )
        self._placement: Placement | None = None
        self._warned_of_stray = False

    @cached_property
    def size_xyz(self) -> XYZ:
        """Voxels of the volume, (x, y, z): from its documents, else up to the end of the last chunk along each axis."""
        if self._documented_size is not None:
            return self._documented_size
        ends = np.ones(3, np.int64)
        # The last chunk along an axis lies in one of the shards that are last along it, unless shards are no cubes.
        last = [max(origin[axis] for origin in self.shards) for axis in range(3)] if self.shards else []
        is_scattered = self._checked_placement().is_scattered
        for origin, files in self.shards.items():
            if is_scattered or any(origin[axis] == last[axis] for axis in range(3)):
                chunks = self._chunks_of(files)
                if len(chunks):
                    ends = np.maximum(ends, chunks.max(axis=0) + 1)
        x, y, z = (CHUNK_VOXELS * ends).tolist()
        return x, y, z

    @property
    def grid_xyz(self) -> XYZ:
        """Chunks along each axis."""
        return grid_of(self.size_xyz)

    def load(self, origin: XYZ) -> Shard:
        """A shard, from the process's cache or its files.

        Raises:
            ShardError: Its file can't be read.
            ShardIndexError: Its index can't be trusted.
        """
        files = self.shards[origin]
        key = (self._reader.key, files.path, files.version, self._cube)
        shard = shard_cache.get(key, lambda: load_shard(self._reader, files, self._cube))
        self._warn_of_stray_chunks(shard)
        return shard

    def find(self, chunk_xyz: XYZ) -> list[Shard]:
        """The shards that hold records of a chunk; none if the export does not have it.

        Raises:
            ShardError: A shard that may hold it can't be read.
            ShardIndexError: The index of one can't be trusted, or no index can say that there is none.
        """
        if self._placement is None or not self._placement.is_scattered:
            side = self._cube.side_voxels
            x, y, z = ((CHUNK_VOXELS * c) // side * side if side else 0 for c in chunk_xyz)
            if (x, y, z) in self.shards:
                shard = self.load((x, y, z))
                if shard.index.places(chunk_xyz):
                    return [shard]
        placement = self._checked_placement()
        if not placement.is_scattered:
            return []
        first, last = np.searchsorted(placement.keys, [chunk_key(chunk_xyz), chunk_key(chunk_xyz) + 1])
        if first == last and placement.broken:
            raise placement.broken[0].located(chunk_xyz=chunk_xyz)
        return [self.load(origin) for origin in dict.fromkeys(placement.origins[first:last])]

    def occupied(self) -> Iterator[Ints]:
        """The chunks (x, y, z) that exist, from the index alone: int64 of shape (n, 3), shard by shard.

        Chunks past the end of the volume are left out.

        Raises:
            ShardIndexError: The index of a shard can't be trusted.
        """
        placement = self._checked_placement()
        if placement.is_scattered:
            if placement.broken:
                raise placement.broken[0]
            tables: Iterator[Ints] = iter([from_keys(np.unique(placement.keys))])
        else:
            tables = (np.unique(self._chunks_of(files), axis=0) for files in self.shards.values())
        for chunks in tables:
            yield chunks[(chunks < np.array(self.grid_xyz)).all(axis=1)]

    def _checked_placement(self) -> Placement:
        """Whether chunks lie in the cubes of their files; looked into once, when a chunk is first said to be absent.

        They do not where an export's spec has shards that are no cubes or share their names, nor in files of DVID's
        first, never released exporter. There a file's name does not tell what it lacks.
        """
        if self._placement is None:
            versions = tuple(files.version for files in self.shards.values())
            key = (self._reader.key, self.level, versions, self._cube)
            self._placement = _placement_cache.get(key, self._check_cubes)
        return self._placement

    def _check_cubes(self) -> Placement:
        files = list(self.shards.values())
        in_all = sum(file.index_bytes for file in files) <= _CHECK_ALL_BYTES
        if not in_all:
            files = files[:: -(-len(files) // _SAMPLE_SHARDS)]
        side = self._cube.side_voxels
        by_spec = self._sharding.cube_voxels(self.size_xyz) if self._sharding and self._documented_size else None
        keys: list[Ints] = []
        origins: list[XYZ] = []
        broken: list[ZarrDvidError] = []
        is_sound = True
        for file in files:
            try:
                chunks = self._chunks_of(file)
            except ZarrDvidError as error:
                broken.append(error)
                continue
            low = np.array(file.origin_voxel)
            high = low + (side if in_all or by_spec is None else by_spec)
            is_sound &= not side or bool(((chunks * CHUNK_VOXELS >= low) & (chunks * CHUNK_VOXELS < high)).all())
            keys.append(to_keys(chunks))
            origins += [file.origin_voxel] * len(chunks)
        if is_sound:
            if not in_all and by_spec is None:
                warnings.warn(
                    f"s{self.level}: that chunks lie in the cubes of their files was seen in {len(files)} of"
                    f" {len(self.shards)} shards; give the export's spec as info= to be sure of all",
                    ExportWarning,
                    stacklevel=2,
                )
            return _IN_CUBES
        if not in_all:
            raise ShardIndexError(
                "the shards hold chunks outside the cubes that they are named for, and are too many to index them all",
                path=f"s{self.level}",
                expected=f"chunks within {by_spec or side} voxels of a file's name",
                found=f"others, in a sample of {len(files)} shards",
                advice="Export it again with a spec whose shards are cubes",
            )
        all_keys = np.concatenate(keys)
        order = np.argsort(all_keys, kind="stable")
        return Placement(all_keys[order], [origins[i] for i in order], tuple(broken), is_scattered=True)

    def _chunks_of(self, files: ShardFiles) -> Ints:
        """The chunks (x, y, z) that a shard's index files name; its records are only looked at where there is none."""
        if files.arrow is not None and files.indexes:
            rows = read_index_rows(self._reader, files, footer=None)[0]
            return to_chunks(rows.xyz, units_of(rows.xyz, files, self._cube), files.path)
        return self.load(files.origin_voxel).index.chunks_xyz()

    def _warn_of_stray_chunks(self, shard: Shard) -> None:
        if self._warned_of_stray or self._documented_size is None:
            return
        chunks = shard.index.chunks_xyz()
        outside = chunks[(chunks >= np.array(self.grid_xyz)).any(axis=1)]
        if len(outside):
            self._warned_of_stray = True
            warnings.warn(
                f"{shard.path}: {len(outside)} chunks lie past the end of the volume of {self.grid_xyz} chunks (x, y, z),"
                f" {tuple(outside[0].tolist())} for one; no array reaches them",
                ExportWarning,
                stacklevel=2,
            )
