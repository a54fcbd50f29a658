"""One scale of an export: its shards, and which of them may hold a chunk."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.cache import ByteBoundedCache
from zarr_dvid.errors import ExportError, ExportWarning, MissingFileError, ShardIndexError, ZarrDvidError
from zarr_dvid.lazy import lazy
from zarr_dvid.placement import Placement, are_in_cubes, common_cube, in_cubes, scattered, tell_units
from zarr_dvid.reader import FileInfo, Reader
from zarr_dvid.shard import Shard, ShardFiles, UndecidedUnitsError, load_shard, raw_coordinates
from zarr_dvid.shard_index import CHUNK_VOXELS, MAX_CHUNKS_A_SIDE, Units, chunk_key
from zarr_dvid.volume import XYZ, Sharding, grid_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_SHARD_NAME = re.compile(r"(0|[1-9][0-9]{0,9})_(0|[1-9][0-9]{0,9})_(0|[1-9][0-9]{0,9})")
_INDEX_ENDINGS = ("-offsets.csv", ".csv", ".json")

# Up to so many bytes of index files, all of a scale's are read before a chunk is said to be absent; above, a sample.
_CHECK_ALL_BYTES = 32 << 20
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


_placement_cache: ByteBoundedCache[Placement] = ByteBoundedCache(256 << 20)


class Scale:
    """One scale of an export.

    Args:
        reader: Of the export's files.
        level: Its number.
        shards: Its shards by voxel origin (x, y, z).
        size_xyz: Voxels of its volume, or None where no document tells.
        sharding: From the volume description, or None.
        n_logged_shards: Files that export.log says were written, or None.
    """

    def __init__(
        self,
        reader: Reader,
        level: int,
        shards: Mapping[XYZ, ShardFiles],
        *,
        size_xyz: XYZ | None,
        sharding: Sharding | None,
        n_logged_shards: int | None,
    ) -> None:
        self.level = level
        self.shards = shards
        self._reader = reader
        self._documented_size = size_xyz
        self._sharding = sharding
        self._cube_voxels = common_cube(shards)
        if self._cube_voxels % CHUNK_VOXELS:
            origin = next(o for o in shards if any(side % CHUNK_VOXELS for side in o))
            raise ExportError(
                "a shard's name is no place of a chunk",
                path=f"{shards[origin].directory}/{shards[origin].names[0]}",
                expected="multiples of 64 voxels",
                found=origin,
                advice="Take the file out of the export",
            )
        self._n_logged_shards = n_logged_shards
        self._placement: Placement | None = None
        self._saw_strays = False
        self._looked_at: set[XYZ] = set()
        self._warned_past_the_end = False

    @lazy
    def size_xyz(self) -> XYZ:
        """Voxels of the volume, (x, y, z): from its documents, else up to the end of the last chunk along each axis."""
        if self._documented_size is not None:
            return self._documented_size
        if not self.shards:
            raise ExportError(
                "the scale has no shards, and no document tells its size",
                path=f"s{self.level}",
                expected="an info document, export.log, or shards",
                found="none of them",
                advice="Give a neuroglancer volume description as info=, or remove the empty directory",
            )
        ends = np.ones(3, np.int64)
        # The last chunk along an axis lies in one of the shards that are last along it, unless shards are no cubes.
        last = [max(origin[axis] for origin in self.shards) for axis in range(3)] if self.shards else []
        is_scattered = self._checked_placement().is_scattered
        for origin in self.shards:
            if is_scattered or any(origin[axis] == last[axis] for axis in range(3)):
                chunks = self.load(origin).index.chunks_xyz()
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
        try:
            shard = self._load(origin, None)
        except UndecidedUnitsError:
            shard = self._load(origin, self._units)
        if origin not in self._looked_at:  # once for each shard, not for each of its chunks
            self._saw_strays |= not are_in_cubes([(origin, self._within_volume(shard))], self._cube_voxels)
            self._warn_past_the_end(shard)
            self._looked_at.add(origin)
        return shard

    def _within_volume(self, shard: Shard) -> Ints:
        """A shard's chunks that the volume has. DVID puts those past its end into other cubes' files; none is read."""
        chunks = shard.index.chunks_xyz()
        if self._documented_size is None:
            return chunks
        return chunks[(chunks < np.array(grid_of(self._documented_size))).all(axis=1)]

    def _load(self, origin: XYZ, units: Units | None) -> Shard:
        files = self.shards[origin]
        key = (self._reader.key, files.path, files.version, units, self._cube_voxels)
        return shard_cache.get(key, lambda: load_shard(self._reader, files, units=units, side_voxels=self._cube_voxels))

    @lazy
    def _units(self) -> Units:
        """What coordinates count, where a shard alone does not tell: a scale counts the same in all its shards."""
        files = list(self.shards.values())
        if sum(file.index_bytes for file in files) > _CHECK_ALL_BYTES:
            files = _sample(files)
        tables = []
        for file in files:
            with contextlib.suppress(ZarrDvidError):  # a broken shard proves nothing
                tables.append((file.origin_voxel, raw_coordinates(self._reader, file)))
        grid = None if self._documented_size is None else grid_of(self._documented_size)
        units = tell_units(tables, side_voxels=self._cube_voxels, grid_xyz=grid)
        if units is None:
            some = next(xyz[xyz.any(axis=1)][0] for _, xyz in tables if xyz.any())
            raise ShardIndexError(
                "whether coordinates count chunks or voxels can't be told",
                path=f"s{self.level}",
                expected="one of them to fit the files' names and the volume",
                found=f"{tuple(some.tolist())}, which fits as both or as neither",
                advice="Give the volume's size with info=, which tells them apart",
            )
        return units

    def find(self, chunk_xyz: XYZ) -> list[Shard]:
        """The shards that hold records of a chunk; none if the export does not have it.

        Raises:
            ShardError: A shard that may hold it can't be read.
            ShardIndexError: The index of one can't be trusted, or no index can say that there is none.
        """
        if not all(0 <= c < MAX_CHUNKS_A_SIDE for c in chunk_xyz):
            return []
        own = self._own_shard(chunk_xyz)
        # Elsewhere a chunk is looked for only if it is not there, or if shards were seen to hold others' chunks.
        if own and not self._saw_strays and not (self._placement and self._placement.is_scattered):
            return own
        placement = self._checked_placement()
        if not placement.is_scattered:
            if not own:
                self._require_all_shards(chunk_xyz)
            return own
        origins = placement.shards_of(chunk_xyz)
        if not origins and placement.broken:
            raise placement.broken[0].located()  # a copy: what is raised holds the frames that it went through
        return [self.load(origin) for origin in origins]

    def _own_shard(self, chunk_xyz: XYZ) -> list[Shard]:
        """The shard whose cube a chunk lies in, if that lists it."""
        origin = _corner(chunk_xyz, self._cube_voxels)
        if origin not in self.shards:
            return []
        shard = self.load(origin)
        return [shard] if shard.index.places(chunk_xyz) else []

    def _require_all_shards(self, chunk_xyz: XYZ) -> None:
        """Before a chunk is called absent: its own shard may not be one that was lost.

        Which one that would be only the spec tells for certain: the names that are left may have a larger divisor.
        """
        n_found = sum(files.arrow is not None for files in self.shards.values())
        if self._n_logged_shards is None or n_found >= self._n_logged_shards:
            return
        if self._spec_cube_voxels is None or _corner(chunk_xyz, self._spec_cube_voxels) not in self.shards:
            raise MissingFileError(
                "shards are missing, and one of them may hold this chunk",
                path=f"s{self.level}",
                expected=f"{self._n_logged_shards} shards, as export.log says",
                found=n_found,
                advice="Restore them; or, if this is meant to be a part of the export, remove export.log",
            )

    def occupied(self) -> Iterator[Ints]:
        """The chunks (x, y, z) that exist, from the index alone: int64 of shape (n, 3), shard by shard.

        Chunks past the end of the volume are left out.

        Raises:
            ShardIndexError: The index of a shard can't be trusted.
        """
        strays: set[int] = set()
        for origin in self.shards:
            chunks = self.load(origin).index.chunks_xyz()
            chunks = chunks[(chunks < np.array(self.grid_xyz)).all(axis=1)]
            if not are_in_cubes([(origin, chunks)], self._cube_voxels):
                is_first = [self._is_first(tuple(chunk), origin, strays) for chunk in chunks.tolist()]
                chunks = chunks[np.array(is_first, bool)]
            yield chunks

    def _is_first(self, chunk_xyz: XYZ, origin: XYZ, strays: set[int]) -> bool:
        """Whether a chunk of a scattered scale is met for the first time, and not listed in its own cube's shard too."""
        if _corner(chunk_xyz, self._cube_voxels) == origin:
            return True
        key = chunk_key(chunk_xyz)
        if key in strays or self._own_shard(chunk_xyz):
            return False
        strays.add(key)
        return True

    @property
    def _spec_cube_voxels(self) -> int | None:
        """Side of the cubes that the spec cuts the volume into, or None where it is not known or does none."""
        if self._sharding is None or self._documented_size is None:
            return None
        return self._sharding.cube_voxels(self._documented_size)

    def _checked_placement(self) -> Placement:
        """Whether chunks lie in the cubes of their files; looked into once, when a chunk is first said to be absent.

        They do not where an export's spec has shards that are no cubes or share their names, nor in files of DVID's
        first, never released exporter. There a file's name does not tell what it lacks.
        """
        if self._placement is None:
            versions = tuple(files.version for files in self.shards.values())
            key = (self._reader.key, self.level, versions, self._documented_size, self._sharding)
            self._placement = _placement_cache.get(key, self._check_cubes)
        return self._placement

    def _check_cubes(self) -> Placement:
        """Looks at all shards; or, where they are too many, at a sample: then the spec has to say that they are cubes."""
        by_spec = self._spec_cube_voxels
        files = list(self.shards.values())
        is_sample = sum(file.index_bytes for file in files) > _CHECK_ALL_BYTES
        if is_sample:
            files = _sample(files)
        tables, broken = [], []
        for file in files:
            try:
                tables.append((file.origin_voxel, self._within_volume(self.load(file.origin_voxel))))
            except ZarrDvidError as error:
                # It is kept for long: without the frames, and all that they hold, of whoever came to read first.
                broken.append(error.located().with_traceback(None))
        if by_spec is not None and are_in_cubes(tables, by_spec):
            return in_cubes(broken)
        if are_in_cubes(tables, self._cube_voxels):
            if is_sample or broken:
                self._warn_of_doubt(len(tables))
            return in_cubes(broken)
        if is_sample and len(files) < len(self.shards):
            raise ShardIndexError(
                "shards hold chunks outside the cubes that they are named for, and are too many to index them all",
                path=f"s{self.level}",
                expected=f"chunks within {by_spec or self._cube_voxels} voxels of a file's name",
                found=f"others, in a sample of {len(files)} shards",
                advice="Export it again with a spec whose shards are cubes",
            )
        return scattered(tables, broken)

    def _warn_of_doubt(self, n_seen: int) -> None:
        warnings.warn(
            f"s{self.level}: a chunk that its own shard does not list, or that has no shard, is taken to be absent: that"
            f" chunks lie in the shards that they belong to was seen in {n_seen} of {len(self.shards)} shards; give the"
            " export's spec as info= to be sure of the others",
            ExportWarning,
            stacklevel=2,
        )

    def _warn_past_the_end(self, shard: Shard) -> None:
        if self._warned_past_the_end or self._documented_size is None:
            return
        chunks = shard.index.chunks_xyz()
        outside = chunks[(chunks >= np.array(self.grid_xyz)).any(axis=1)]
        if len(outside):
            self._warned_past_the_end = True
            warnings.warn(
                f"{shard.path}: {len(outside)} chunks lie past the end of the volume of {self.grid_xyz} chunks (x, y, z),"
                f" {tuple(outside[0].tolist())} for one; no array reaches them",
                ExportWarning,
                stacklevel=2,
            )


def _corner(chunk_xyz: XYZ, side_voxels: int) -> XYZ:
    """The first voxel of the cube that a chunk lies in, of those that start at voxel 0; side 0 is one cube for all."""
    x, y, z = ((CHUNK_VOXELS * c) // side_voxels * side_voxels if side_voxels else 0 for c in chunk_xyz)
    return x, y, z


def _sample(files: list[ShardFiles]) -> list[ShardFiles]:
    return files[:: -(-len(files) // _SAMPLE_SHARDS)] if files else files
