"""What an export's index tells of one scale, as far as its shards are what they were when it was made."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zarr_dvid.compact_index import MAX_CELLS, WORD_BYTES, CompactIndex
from zarr_dvid.errors import ExportWarning, MissingFileError, RecordError, ZarrDvidError
from zarr_dvid.index_tables import BLOCKS, WIDE, damaged, read_batch
from zarr_dvid.placement import Boxes
from zarr_dvid.record import RecordLayout
from zarr_dvid.shard import IndexedShard, notes_on
from zarr_dvid.shard_files import ShardFiles
from zarr_dvid.shard_index import MAX_CHUNKS_A_SIDE, ShardIndex, Units, WideIndex, from_keys
from zarr_dvid.volume import XYZ
from zarr_dvid.walk import Framing

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.index_tables import Table

    Ints = npt.NDArray[np.int64]

COMPACT, WIDE_FORM, BROKEN = 0, 1, 2  # forms of a shard
IS_FILE_FORMAT, IN_VOXELS, HAS_INDEX = 1, 2, 4  # flags of a shard


class BatchSource(Protocol):
    """The rest of the index."""

    @property
    def key(self) -> Hashable:
        """Equal for the same index only."""
        ...

    @property
    def dialects(self) -> Sequence[str]:
        """All that shards have."""
        ...

    @property
    def layouts(self) -> Sequence[RecordLayout]:
        """Likewise."""
        ...

    @property
    def problems(self) -> Sequence[ZarrDvidError]:
        """Why shards could not be indexed."""
        ...

    def read(self, form: int, offset: int, size: int) -> tuple[bytes, str]:
        """A part of the file of a form, and that file's path."""
        ...


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of the shards that an index covers.

    Attributes:
        n_records: Their records.
        n_chunks: The chunks that these claim.
        dialects: Shards of each dialect.
    """

    n_records: int
    n_chunks: int
    dialects: Mapping[str, int]


class ScaleIndex:
    """What an index tells of a scale's shards. Those that changed since, or came since, it says nothing of.

    Args:
        source: The index.
        rows: Of the scale, as in its table of shards.
        shards: That are there now.
    """

    def __init__(self, source: BatchSource, rows: Table, shards: Mapping[XYZ, ShardFiles]) -> None:
        self._source = source
        self._rows = rows
        self.key = source.key
        origins = np.stack([rows[f"origin_{axis}"] for axis in "xyz"], axis=1)
        names: list[XYZ] = [(x, y, z) for x, y, z in origins.tolist()]
        is_there = np.array([name in shards for name in names], bool)
        versions = rows["fingerprint"].tolist()
        self._row_of = {name: i for i, name in enumerate(names) if is_there[i] and shards[name].fingerprint == versions[i]}
        is_fresh = np.zeros(len(names), bool)
        is_fresh[list(self._row_of.values())] = True
        low, high = (
            np.stack([rows[f"{end}_{axis}"] for axis in "xyz"], axis=1).astype(np.int64) for end in ("low", "high")
        )
        boxes = Boxes(origins, low, high)
        is_broken = rows["form"] == BROKEN
        has_records = rows["n_records"] > 0
        self.n_changed = int((is_there & ~is_fresh).sum())
        self.n_gone = int((~is_there).sum())
        self.n_new = len(shards) - int(is_there.sum())
        self.is_complete = len(self._row_of) == len(shards)
        self.origins = frozenset(self._row_of)
        self.boxes = boxes.at(is_fresh & has_records & ~is_broken)
        self.broken = {name: source.problems[int(rows["problem"][i])] for name, i in self._row_of.items() if is_broken[i]}
        self.is_shared = bool((rows["n_streams"][is_fresh] > 1).any())
        self.n_further_writers = _n_further_writers({name: values[is_fresh & ~is_broken] for name, values in rows.items()})
        self._gone = boxes.at(~is_there & (has_records | is_broken))
        seen = boxes.high[has_records & (is_fresh | ~is_there)]
        self.end_xyz: Ints = seen.max(axis=0) + 1 if len(seen) else np.zeros(3, np.int64)

    def __contains__(self, origin: XYZ) -> bool:
        return origin in self._row_of

    def may_be_gone(self, chunks_xyz: Ints) -> npt.NDArray[np.bool_]:
        """Whether each chunk may have been in a shard that is no longer there."""
        may = np.zeros(len(chunks_xyz), bool)
        for low, high in zip(self._gone.low, self._gone.high, strict=True):
            may |= ((chunks_xyz >= low) & (chunks_xyz <= high)).all(axis=1)
        return may

    def require_none_gone(self, low_xyz: npt.ArrayLike, high_xyz: npt.ArrayLike) -> None:
        """Makes sure that no chunk of a box may have been in a shard that is no longer there.

        Raises:
            MissingFileError: One may.
        """
        gone = self._gone.origins_voxel[self._gone.meet(low_xyz, high_xyz)]
        if len(gone):
            raise MissingFileError(
                "a shard that the export had when it was indexed is missing, and may hold this chunk",
                path=f"s{self._rows['scale'][0]}/{'_'.join(map(str, gone[0].tolist()))}.arrow",
                advice="Restore it; or, if it was taken away on purpose, run `zarr-dvid index` again",
            )

    def reaches(self, origin: XYZ, grid_xyz: XYZ) -> bool:
        """Whether a shard has chunks past the end of a grid."""
        row = self._row_of[origin]
        return any(int(self._rows[f"high_{axis}"][row]) >= n for axis, n in zip("xyz", grid_xyz, strict=True))

    def totals(self) -> Totals:
        """Of all shards that could be indexed."""
        which = np.array([i for name, i in self._row_of.items() if name not in self.broken], np.int64)
        ordinals, counts = np.unique(self._rows["dialect"][which], return_counts=True)
        return Totals(
            int(self._rows["n_records"][which].sum()),
            int(self._rows["n_chunks"][which].sum()),
            {self._source.dialects[i]: n for i, n in zip(ordinals.tolist(), counts.tolist(), strict=True)},
        )

    def notes(self, shards: Mapping[XYZ, ShardFiles]) -> list[str]:
        """What should be known of shards that can be read, and is said of each when it is loaded."""
        rows = self._rows
        is_plain = (rows["n_streams"] == 1) & ((rows["flags"] & HAS_INDEX) > 0) & (rows["n_records"] > 0)
        odd = [(name, i) for name, i in self._row_of.items() if not is_plain[i] and name not in self.broken]
        return [note for name, i in odd for note in _notes(shards[name].path, self._row(i))]

    def _row(self, i: int) -> dict[str, int]:
        return {name: values[i].item() for name, values in self._rows.items()}

    def load(self, files: ShardFiles) -> IndexedShard:
        """A shard, with one read of the index.

        Raises:
            ShardError: As when it was indexed.
            ShardIndexError: Likewise; or the index is damaged.
        """
        row = self._row(self._row_of[files.origin_voxel])
        if row["form"] == BROKEN:
            raise self.broken[files.origin_voxel].located()  # a copy: what is raised holds the frames that it went through
        data, path = self._source.read(row["form"], row["batch_offset"], row["batch_bytes"])
        if zlib.crc32(data) != row["batch_crc32"]:
            raise damaged(
                path,
                f"the entries of {files.path} are not what was written",
                expected=f"checksum {row['batch_crc32']:08x}",
                found=f"{zlib.crc32(data):08x}",
            )
        try:
            index = (_compact if row["form"] == COMPACT else _wide)(data, row)
        except RecordError as error:
            raise damaged(path, f"{files.path}: {error.problem}", expected=error.expected, found=error.found) from None
        units: Units = "voxels" if row["flags"] & IN_VOXELS else "chunks"
        framing = Framing(
            files.path,
            row["arrow_bytes"],
            bool(row["flags"] & IS_FILE_FORMAT),
            self._source.layouts[row["schema"]],
            row["schema_at"],
            row["records_at"],
            row["records_end"],
            None,
        )
        for note in _notes(files.path, row):
            warnings.warn(note, ExportWarning, stacklevel=3)
        return IndexedShard(framing, units, self._source.dialects[row["dialect"]], index)


def _n_further_writers(rows: Table) -> int:
    """How many writers there were beyond one for each shard; a file that was exported twice had no more for that."""
    times = np.maximum(rows["n_records"], 1) // np.maximum(rows["n_chunks"], 1)
    return int((np.maximum(rows["n_streams"] // np.maximum(times, 1), 1) - 1).sum())


def _notes(path: str, row: Mapping[str, int]) -> list[str]:
    return notes_on(path, row["n_records"], has_index=bool(row["flags"] & HAS_INDEX), n_streams=row["n_streams"])


def _box(row: Mapping[str, int]) -> tuple[XYZ, XYZ]:
    low = (row["low_x"], row["low_y"], row["low_z"])
    high = (row["high_x"], row["high_y"], row["high_z"])
    if not all(0 <= first <= last < MAX_CHUNKS_A_SIDE for first, last in zip(low, high, strict=True)):
        raise RecordError("a shard's box is impossible", expected="its first chunk, then its last", found=(low, high))
    return low, high


def _compact(data: bytes, row: Mapping[str, int]) -> ShardIndex:
    table = read_batch(BLOCKS, data)
    low, high = _box(row)
    extent = (high[0] - low[0] + 1, high[1] - low[1] + 1, high[2] - low[2] + 1)
    n_cells = math.prod(extent)
    cells, sizes = table["cell"], table["size"].astype(np.int64)
    _require(len(cells) == row["n_records"], "the batch has another number of records", row["n_records"], len(cells))
    _require(n_cells <= MAX_CELLS, "a shard's box is too large", f"at most {MAX_CELLS} chunks", n_cells)
    order = np.argsort(cells, kind="stable")
    cells = cells[order]
    _require(bool((cells[1:] > cells[:-1]).all()), "a chunk occurs twice", "each once", "a repeat")
    _require(int(cells[-1]) < n_cells if len(cells) else True, "a chunk lies outside the box", n_cells, cells[-1:])
    _require(_fill(cells, extent), "the chunks do not reach the ends of their box", extent, None)
    ends = row["records_at"] // WORD_BYTES + np.cumsum(sizes)
    end = WORD_BYTES * int(ends[-1]) if len(ends) else row["records_at"]
    _require(bool((sizes > 0).all()), "a record has no length", "more than 0 bytes", 0)
    _require(
        row["records_at"] % WORD_BYTES == 0 and row["records_at"] >= 0 and end <= row["records_end"] <= row["arrow_bytes"],
        "records lie past the end of the shard",
        row["records_end"],
        end,
    )
    _require(end < WORD_BYTES << 32, "the shard is too large", WORD_BYTES << 32, end)
    return CompactIndex(low, extent, cells, (ends - sizes)[order].astype(np.uint32), table["size"][order].astype(np.uint16))


def _fill(cells: npt.NDArray[np.uint16], extent: XYZ) -> bool:
    """Whether cells reach both ends of their box along each axis, as those of no other box would."""
    rest, z = np.divmod(cells, np.uint32(extent[2]))
    x, y = np.divmod(rest, np.uint32(extent[1]))
    return all(n == 1 or (i.min() == 0 and i.max() == n - 1) for i, n in zip((x, y, z), extent, strict=True))


def _wide(data: bytes, row: Mapping[str, int]) -> ShardIndex:
    table = read_batch(WIDE, data)
    keys, offsets, sizes = table["key"], table["offset"], table["size"]
    _require(len(keys) == row["n_records"], "the batch has another number of records", row["n_records"], len(keys))
    if len(keys):
        low, high = _box(row)
        _require(bool((keys[1:] >= keys[:-1]).all()) and int(keys[0]) >= 0, "chunks are out of order", None, None)
        chunks = from_keys(keys)
        _require(bool(((chunks >= low) & (chunks <= high)).all()), "a chunk lies outside the box", (low, high), None)
        is_inside = (offsets >= 0) & (sizes > 0) & (sizes <= row["arrow_bytes"]) & (offsets <= row["arrow_bytes"] - sizes)
        _require(bool(is_inside.all()), "records lie past the end of the shard", row["arrow_bytes"], None)
        is_row = (table["row"] >= 0) & (table["row"] < table["n_rows"])
        _require(bool(is_row.all()), "a record lies outside its message", None, None)
    return WideIndex(*(np.array(table[name]) for name in WIDE))


def _require(condition: bool, problem: str, expected: object, found: object) -> None:  # noqa: FBT001
    if not condition:
        raise RecordError(problem, expected=expected, found=found)
