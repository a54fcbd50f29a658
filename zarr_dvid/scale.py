"""One scale of an export: its shards, and which of them may hold a chunk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.cache import ByteBoundedCache
from zarr_dvid.cubes import by_cube, corner, first_chunk, located_at
from zarr_dvid.errors import ExportError, ExportWarning, MissingFileError
from zarr_dvid.lazy import lazy
from zarr_dvid.occupied import met_first, shards_near
from zarr_dvid.placement import Placement, are_in_cubes, boxes_of, common_cube, join_boxes
from zarr_dvid.reader import Reader
from zarr_dvid.scale_index import ScaleIndex
from zarr_dvid.shard import IndexedShard, Shard, UndecidedUnitsError, load_shard
from zarr_dvid.shard_files import ShardFiles, odd_name, version_of
from zarr_dvid.shard_index import CHUNK_VOXELS, MAX_CHUNKS_A_SIDE, Found, Units, one_record
from zarr_dvid.survey import Known, check_cubes, find_units
from zarr_dvid.volume import XYZ, Sharding, grid_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

shard_cache: ByteBoundedCache[IndexedShard] = ByteBoundedCache(64 << 20)
"""Loaded shards of all exports of this process: of full ones some 250."""
_placement_cache: ByteBoundedCache[Placement] = ByteBoundedCache(16 << 20)


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Where the records of some chunks are, all in one shard.

    Attributes:
        shard: The shard.
        which: Positions among the chunks that were asked for, int64, ascending, shape (n,).
        found: The one record of each.
    """

    shard: Shard
    which: Ints
    found: Found


class Scale:
    """One scale of an export.

    Args:
        reader: Of the export's files.
        level: Its number.
        shards: Its shards by voxel origin (x, y, z).
        size_xyz: Voxels of its volume, or None where no document tells.
        sharding: From the volume description, or None.
        n_logged_shards: Files that export.log says were written, or None.
        index: What an index of the export tells of the scale, or None.
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
        index: ScaleIndex | None = None,
    ) -> None:
        self.level = level
        self.shards = shards
        self.index = index
        self._reader = reader
        self._documented_size = size_xyz
        self._sharding = sharding
        self.cube_voxels = common_cube(shards)
        if self.cube_voxels % CHUNK_VOXELS:
            raise odd_name(shards)
        self._n_logged_shards = n_logged_shards
        self._placement: Placement | None = None
        self._saw_strays = False
        self._looked_at: set[XYZ] = set()
        self._undecided: set[XYZ] = set()
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
        if self.index is not None:
            ends = np.maximum(ends, self.index.end_xyz)
        # The last chunk along an axis lies in one of the shards that are last along it, unless shards are no cubes.
        last = [max(origin[axis] for origin in self.shards) for axis in range(3)]
        is_scattered = self.placement.is_scattered
        for origin in self.shards:
            if self.index is not None and origin in self.index and origin not in self.index.broken:
                continue
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

    def load(self, origin: XYZ) -> IndexedShard:
        """A shard, from the process's cache, the export's index, or its files.

        Raises:
            ShardError: Its file can't be read.
            ShardIndexError: Its index can't be trusted.
        """
        try:
            shard = self._load(origin, self.units if origin in self._undecided else None)
        except UndecidedUnitsError:
            shard = self._load(origin, self.units)
            self._undecided.add(origin)
        if origin not in self._looked_at:  # once for each shard, not for each of its chunks
            if self.index is None or origin not in self.index:
                self._saw_strays |= not are_in_cubes([(origin, self._within_volume(shard))], self.cube_voxels)
            self._warn_past_the_end(origin, shard)
            self._looked_at.add(origin)
        return shard

    def _within_volume(self, shard: IndexedShard) -> Ints:
        """A shard's chunks that the volume has. DVID puts those past its end into other cubes' files; none is read."""
        chunks = shard.index.chunks_xyz()
        if self._documented_size is None:
            return chunks
        return chunks[(chunks < np.array(grid_of(self._documented_size))).all(axis=1)]

    def _load(self, origin: XYZ, units: Units | None) -> IndexedShard:
        files, index = self.shards[origin], self.index
        if index is not None and origin in index:
            return shard_cache.get((self._reader.key, files.path, files.version, index.key), lambda: index.load(files))
        key = (self._reader.key, files.path, files.version, units, self.cube_voxels)
        return shard_cache.get(
            key, lambda: load_shard(self._reader, files, units=units, side_voxels=self.cube_voxels).trimmed()
        )

    @lazy
    def units(self) -> Units:
        """What coordinates count in shards that do not tell by themselves."""
        grid = None if self._documented_size is None else grid_of(self._documented_size)
        return find_units(self.level, self.shards, self._reader, cube_voxels=self.cube_voxels, grid_xyz=grid)

    def find(self, chunk_xyz: XYZ) -> list[IndexedShard]:
        """The shards that hold records of a chunk; none if the export does not have it.

        Raises:
            ShardError: A shard that may hold it can't be read.
            ShardIndexError: The index of one can't be trusted, or no index can say that there is none.
        """
        if not all(0 <= c < MAX_CHUNKS_A_SIDE for c in chunk_xyz):
            return []
        origin = corner(chunk_xyz, self.cube_voxels)
        found = self._holding(chunk_xyz, [origin] if origin in self.shards else [])
        # Elsewhere a chunk is looked for only if it is not there, or if shards were seen to hold others' chunks.
        if found and not self._looks_everywhere:
            return found
        placement = self.placement
        found += self._holding(
            chunk_xyz, [other for other in placement.shards_near(chunk_xyz, chunk_xyz) if other != origin]
        )
        if not found:
            self._require_absence(placement, chunk_xyz)
        return found

    def _holding(self, chunk_xyz: XYZ, origins: list[XYZ]) -> list[IndexedShard]:
        return [shard for shard in map(self.load, origins) if shard.index.places(chunk_xyz)]

    def locate(self, chunks_xyz: Ints) -> tuple[list[Located], Ints]:
        """What `find` tells, of many chunks at once.

        Args:
            chunks_xyz: Chunks, int64, shape (n, 3).

        Returns:
            Those that one record of one shard claims, shard by shard; and the positions of those that several claim, which
            have to be read one by one and compared. What is in neither is absent.

        Raises:
            ShardError: As `find`, with the first of the chunks that it is about.
            ShardIndexError: Likewise.
        """
        if len(chunks_xyz) == 1:
            return self._locate_one(first_chunk(chunks_xyz, np.zeros(1, np.int64)))
        where = np.flatnonzero(((chunks_xyz >= 0) & (chunks_xyz < MAX_CHUNKS_A_SIDE)).all(axis=1))
        chunks = chunks_xyz[where]
        n_records = np.zeros(len(chunks), np.int64)
        cubes = by_cube(chunks, self.cube_voxels)
        looked_up = []
        for some in cubes:
            origin = corner(first_chunk(chunks, some), self.cube_voxels)
            if origin in self.shards:
                looked_up.append(self._look_up(origin, chunks, some, n_records))
        if len(chunks) and (self._looks_everywhere or not n_records.all()):
            # As in `find`; what is learned from any of the shards holds for all chunks.
            absent = np.flatnonzero(n_records == 0)
            with located_at(first_chunk(chunks, absent if len(absent) else np.arange(1))):
                placement = self.placement
            for some in cubes if placement.is_scattered else ():
                origin = corner(first_chunk(chunks, some), self.cube_voxels)
                near = placement.shards_near(chunks[some].min(axis=0), chunks[some].max(axis=0))
                looked_up += [self._look_up(other, chunks, some, n_records) for other in near if other != origin]
            absent = np.flatnonzero(n_records == 0)
            for some in by_cube(chunks[absent], self._spec_cube_voxels or 0) if len(absent) else ():
                self._require_absence_of_all(placement, chunks[absent[some]])
        located = []
        for part in looked_up:
            is_only = (n_records[part.which] == 1) & (part.found.n_records == 1)
            if is_only.any():
                located.append(Located(part.shard, where[part.which[is_only]], part.found.at(is_only)))
        return located, where[n_records > 1]

    def _locate_one(self, chunk_xyz: XYZ) -> tuple[list[Located], Ints]:
        """`locate` of one chunk: arithmetic on tables would take longer than decoding it."""
        with located_at(chunk_xyz):
            shards = self.find(chunk_xyz)
        found = [(shard, place) for shard in shards for place in shard.index.places(chunk_xyz)]
        if len(found) != 1:
            return [], np.zeros(min(len(found), 1), np.int64)
        [(shard, place)] = found
        return [Located(shard.without_index(), np.zeros(1, np.int64), one_record(place))], np.zeros(0, np.int64)

    def _look_up(self, origin: XYZ, chunks: Ints, some: Ints, n_records: Ints) -> Located:
        """Looks some of the chunks up in a shard, and counts their records."""
        with located_at(first_chunk(chunks, some)):
            shard = self.load(origin)
        found = shard.index.look_up(chunks[some])
        n_records[some] += found.n_records
        return Located(shard.without_index(), some, found)

    @property
    def _looks_everywhere(self) -> bool:
        """Whether shards are known to hold others' chunks, as far as this is known without reading anything for it."""
        if self.index is not None and self.index.is_complete:
            return self._has_known_strays
        return self._saw_strays or (self._placement is not None and self._placement.is_scattered)

    @lazy
    def _has_known_strays(self) -> bool:
        return not self._known.boxes.are_in_cubes(self.cube_voxels).all()

    def _require_absence_of_all(self, placement: Placement, chunks_xyz: Ints) -> None:
        """`_require_absence` of chunks of one cube of the spec."""
        doubtful = chunks_xyz[:1]
        if self.index is not None:
            doubtful = np.concatenate([doubtful, chunks_xyz[self.index.may_be_gone(chunks_xyz)][:1]])
        for x, y, z in doubtful.tolist():
            with located_at((x, y, z)):
                self._require_absence(placement, (x, y, z))

    def _require_absence(self, placement: Placement, chunk_xyz: XYZ) -> None:
        """Before a chunk is called absent: it may be in a shard that can't be read, or in one that was lost.

        Which one was lost only the spec tells for certain: the names that are left may have a larger divisor.
        """
        if placement.broken_may_hold_any:
            raise placement.broken[0].located()  # a copy: what is raised holds the frames that it went through
        if self.index is not None:
            self.index.require_none_gone(chunk_xyz, chunk_xyz)
        if placement.is_scattered or self._n_logged_shards is None or self._n_found >= self._n_logged_shards:
            return
        if self._spec_cube_voxels is None or corner(chunk_xyz, self._spec_cube_voxels) not in self.shards:
            raise MissingFileError(
                "shards are missing, and one of them may hold this chunk",
                path=f"s{self.level}",
                expected=f"{self._n_logged_shards} shards, as export.log says",
                found=self._n_found,
                advice="Restore them; or, if this is meant to be a part of the export, remove export.log",
            )

    @lazy
    def _n_found(self) -> int:
        """Shards that are there, each as often as the index tells that a writer wrote to it: export.log counts writers."""
        n_extra = self.index.n_further_writers if self.index is not None else 0
        return n_extra + sum(files.arrow is not None for files in self.shards.values())

    def occupied(self, low_xyz: XYZ = (0, 0, 0), high_xyz: XYZ | None = None) -> Iterator[Ints]:
        """The chunks (x, y, z) that exist, from the index alone: int64 of shape (n, 3), shard by shard, each once.

        Chunks past the end of the volume are left out.

        Args:
            low_xyz: First chunk along each axis.
            high_xyz: Last one; by default the volume's. Only shards that may have one in between are loaded.

        Raises:
            ShardIndexError: The index of such a shard can't be trusted.
            MissingFileError: Such a shard is gone since the export was indexed.
        """
        last = np.array(self.grid_xyz) - 1 if self.shards else np.full(3, -1)
        low, high = np.array(low_xyz), last if high_xyz is None else np.minimum(last, high_xyz)
        if self.index is not None:
            self.index.require_none_gone(low, high)
        # Without a placement, which may have to be looked for, where all shards are loaded anyway.
        is_whole = not low.any() and (high == last).all()
        for origin in self.shards if is_whole else shards_near(self.placement, self.shards, low, high, self.cube_voxels):
            chunks = self.load(origin).index.chunks_xyz()
            chunks = chunks[((chunks >= low) & (chunks <= high)).all(axis=1)]
            is_sound = are_in_cubes([(origin, chunks)], self.cube_voxels)
            yield chunks if is_sound else chunks[met_first(self, chunks, origin)]

    @property
    def _spec_cube_voxels(self) -> int | None:
        """Side of the cubes that the spec cuts the volume into, or None where it is not known or does none."""
        if self._sharding is None or self._documented_size is None:
            return None
        return self._sharding.cube_voxels(self._documented_size)

    @property
    def placement(self) -> Placement:
        """Whether chunks lie in the cubes of their files; looked into once, when a chunk is first said to be absent.

        They do not where an export's spec has shards that are no cubes or share their names, nor in files of DVID's
        first, never released exporter. There a file's name does not tell what it lacks.
        """
        if self._placement is None:
            index_key = self.index.key if self.index is not None else None
            version = version_of(self.shards.values())
            key = (self._reader.key, self.level, version, index_key, self._documented_size, self._sharding)
            self._placement = _placement_cache.get(key, self._check_cubes)
        return self._placement

    def _check_cubes(self) -> Placement:
        return check_cubes(
            self.level,
            self.shards,
            lambda origin: self._within_volume(self.load(origin)),
            self._known,
            cube_voxels=self.cube_voxels,
            spec_cube_voxels=self._spec_cube_voxels,
        )

    @lazy
    def _known(self) -> Known:
        """What the index tells, without the chunks past the end of the volume."""
        index = self.index
        if index is None:
            return Known()
        boxes = index.boxes
        if self._documented_size is not None:
            grid = np.array(grid_of(self._documented_size))
            is_doubtful = ~boxes.are_in_cubes(self.cube_voxels) & (boxes.high >= grid).any(axis=1)
            origins = [(x, y, z) for x, y, z in boxes.origins_voxel[is_doubtful].tolist()]
            exact = boxes_of((origin, self._within_volume(self.load(origin))) for origin in origins)
            boxes = join_boxes(boxes.at(~is_doubtful), exact)
        return Known(origins=index.origins, boxes=boxes, broken=tuple(index.broken.values()), is_shared=index.is_shared)

    def _warn_past_the_end(self, origin: XYZ, shard: IndexedShard) -> None:
        if self._warned_past_the_end or self._documented_size is None:
            return
        if self.index is not None and origin in self.index and not self.index.reaches(origin, self.grid_xyz):
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
