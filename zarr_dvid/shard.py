"""A shard: an Arrow file of records with an index beside it, checked against each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.compact_index import build_index
from zarr_dvid.errors import ExportWarning, RecordError, ShardError, ShardIndexError, ZarrDvidError
from zarr_dvid.placement import are_in_cubes, proves_chunks
from zarr_dvid.reader import Reader
from zarr_dvid.reconcile import (
    Places,
    check_against_records,
    check_same_chunks,
    places_by_offset,
    records_by_place,
    wrong_end,
)
from zarr_dvid.record import Record, RecordBatch, parse_batch
from zarr_dvid.shard_files import ShardFiles
from zarr_dvid.shard_index import MAX_CHUNKS_A_SIDE, Place, ShardIndex, Units, to_keys
from zarr_dvid.sidecar import IndexRows, parse_csv, parse_json
from zarr_dvid.walk import (
    Framing,
    Walk,
    is_end_mark,
    n_rows_of_first,
    n_whole_records,
    read_framing,
    walk_records,
    walk_streams,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_INDEX_BYTES_A_RECORD = 160  # seven numbers of 20 digits, or a JSON key and a number with its white space
_SMALLEST_RECORD_BYTES = 32  # of one in a batch of many


class UndecidedUnitsError(Exception):
    """All coordinates of a shard are multiples of 64: others have to tell whether they count chunks or voxels."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What has to be known of a shard to read a record from a place in it.

    Attributes:
        framing: How its file is laid out.
        units: What its records' coordinates count.
        dialect: Of its index and its blocks, in words.
    """

    framing: Framing
    units: Units
    dialect: str

    @property
    def path(self) -> str:
        """Of the file, relative to the export's root."""
        return self.framing.path

    def parse(self, message: bytes, place: Place, chunk_xyz: tuple[int, int, int]) -> Record:
        """Parses a message that was read from `place`, and checks that its row is the chunk that was asked for.

        Raises:
            RecordError: The message is torn, or holds another chunk.
        """
        return self.record(self.batch(message, place, chunk_xyz), place, chunk_xyz)

    def batch(self, message: bytes, place: Place, chunk_xyz: tuple[int, int, int]) -> RecordBatch:
        """Parses a message that was read from `place`, for one of its chunks.

        Raises:
            RecordError: The message is torn, or has other rows than the index says.
        """
        try:
            batch = parse_batch(message, self.framing.layout)
            if batch.n_rows != place.n_rows:
                raise RecordError(
                    "the record batch has another number of rows than the index says",
                    expected=place.n_rows,
                    found=batch.n_rows,
                )
        except RecordError as error:
            raise self._at(error, place, chunk_xyz) from None
        return batch

    def record(self, batch: RecordBatch, place: Place, chunk_xyz: tuple[int, int, int]) -> Record:
        """The record of `place`, checked to be the chunk that was asked for.

        Raises:
            RecordError: It is torn, or holds another chunk.
        """
        try:
            record = batch.record(place.row)
        except RecordError as error:
            raise self._at(error, place, chunk_xyz) from None
        step = 64 if self.units == "voxels" else 1
        if record.chunk_xyz != tuple(step * c for c in chunk_xyz):
            raise RecordError(
                "the index points to the record of another chunk",
                path=self.path,
                chunk_xyz=chunk_xyz,
                offset_bytes=place.offset_bytes,
                expected=tuple(step * c for c in chunk_xyz),
                found=record.chunk_xyz,
                advice="The shard was probably exported twice into one directory; export it again into an empty one",
            )
        return record

    def _at(self, error: RecordError, place: Place, chunk_xyz: tuple[int, int, int]) -> RecordError:
        """An error in a message as one in the shard."""
        error.offset_bytes = place.offset_bytes + (error.offset_bytes or 0)
        return error.located(path=self.path, chunk_xyz=chunk_xyz)


@dataclass(frozen=True, slots=True, eq=False)
class IndexedShard(Shard):
    """A shard that is ready to be read.

    Attributes:
        index: Which record holds which chunk.
    """

    index: ShardIndex

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.index.nbytes + 2048

    def trimmed(self) -> IndexedShard:
        """The same without the file's bytes that its framing holds."""
        return IndexedShard(self.framing.trimmed(), self.units, self.dialect, self.index)

    def without_index(self) -> Shard:
        """The same without its largest part, for those who have their places already."""
        return Shard(self.framing, self.units, self.dialect)


def load_shard(reader: Reader, files: ShardFiles, *, units: Units | None, side_voxels: int) -> IndexedShard:
    """Reads a shard's framing and index, and checks all that can be checked without reading its records.

    Args:
        reader: Of the export's files.
        files: The shard's.
        units: What its coordinates count, or None to tell from them.
        side_voxels: Side of the scale's cubes (or a multiple of it), or 0 where it is not known.

    Raises:
        UndecidedUnitsError: They do not tell.
        ShardError: The shard is missing, empty, torn, or no shard.
        ShardIndexError: Its index is empty, cut, or contradicts the shard or itself.
    """
    framing = _framing(reader, files)
    try:
        sources = read_index_rows(reader, files, footer=framing.footer)
    except ShardIndexError as error:  # whoever exported it will want to know what is left
        n_records = n_whole_records(reader, framing)
        advice = f"The shard itself starts with {n_records} whole records. {error.advice}"
        raise ShardIndexError(error.problem, **{**error.facts, "advice": advice}) from None
    by_offset = bool(sources) and sources[0].offset_bytes is not None
    walk = None if by_offset else _walk(reader, framing, sources)
    if walk is None:
        xyz, places = sources[0].xyz, _places_by_offset(reader, framing, sources)
    else:
        xyz, places = walk.xyz, Places(walk.offset_bytes, walk.size_bytes, walk.row)
    if units is None:
        if not proves_chunks(xyz):
            raise UndecidedUnitsError
        units = "chunks"
    chunks_xyz = to_chunks(xyz, units, files.path)
    # The records have to bear an index with offsets out where it says what DVID's never say: voxels, or chunks outside the
    # file's cube; and where rows that it lacks would not show: those of a batch of many.
    if walk is None and (
        units == "voxels"
        or not are_in_cubes([(files.origin_voxel, chunks_xyz)], side_voxels)
        or places.row.any()
        or n_rows_of_first(reader, framing) > 1
    ):
        walk = walk_records(reader, framing)
        check_against_records(sources[0], records_by_place(places, walk, sources[0].path), walk)
    for note in notes_on(files.path, len(xyz), has_index=bool(sources)):
        warnings.warn(note, ExportWarning, stacklevel=3)
    index = build_index(chunks_xyz, places.offset_bytes, places.size_bytes, places.row)
    return IndexedShard(framing, units, _dialect(framing, sources, walk), index)


def raw_coordinates(reader: Reader, files: ShardFiles) -> Ints:
    """A shard's coordinates as its index has them, or its records where it has none: int64, shape (n, 3).

    Raises:
        ShardError: The shard can't be read.
        ShardIndexError: Its index can't.
    """
    if files.indexes:
        return read_index_rows(reader, files, footer=None)[0].xyz
    return walk_records(reader, _framing(reader, files)).xyz


def _framing(reader: Reader, files: ShardFiles) -> Framing:
    if files.arrow is None:
        raise ShardError(
            "the shard is missing, though its index is there", path=files.path, expected="a file", found=files.names[0]
        )
    return read_framing(reader, files.path, files.arrow.size_bytes)


def _places_by_offset(reader: Reader, framing: Framing, sources: list[IndexRows]) -> Places:
    """Places from an index that has offsets. They must fill the shard; other indexes must name the same chunks."""
    rows = sources[0]
    places = places_by_offset(rows, framing)
    end = places.end or framing.records_at
    if end != framing.records_end and not is_end_mark(reader, framing, end):
        raise wrong_end(rows, end, framing)
    for other in sources[1:]:
        check_same_chunks(rows, other)
    return places


def _walk(reader: Reader, framing: Framing, sources: list[IndexRows]) -> Walk:
    """All records of a shard without offsets, checked against whatever index there is."""
    walk = walk_records(reader, framing)
    for rows in sources:
        assert rows.record is not None
        check_against_records(rows, rows.record, walk)
    if not sources and not walk.has_end_mark and not framing.is_file_format:
        raise ShardIndexError(
            "the shard has no index and no end mark: whether it is whole can't be told",
            path=framing.path,
            expected="an index file, or FFFFFFFF 00000000 at the end",
            found=f"{len(walk.xyz)} whole records and neither",
        )
    return walk


def load_streams(
    reader: Reader, files: ShardFiles, error: ZarrDvidError, *, units: Units | None
) -> tuple[IndexedShard | ZarrDvidError, int]:
    """Indexes a shard that `load_shard` refused, where it only holds several streams; its index files are no help then.

    Args:
        reader: Of the export's files.
        files: The shard's.
        error: Why it was refused.
        units: What its coordinates count, or None to tell from them.

    Returns:
        The shard, or why it can't be indexed; and how many streams it has, as far as that is known.

    Raises:
        UndecidedUnitsError: The coordinates do not tell what they count.
    """
    try:
        framing = _framing(reader, files)
        streams = walk_streams(reader, framing)
        if streams.n_streams == 1:
            return error, 1
        if streams.error is not None:
            return streams.error, streams.n_streams
        walk = streams.walk
        if units is None:
            if not proves_chunks(walk.xyz):
                raise UndecidedUnitsError
            units = "chunks"
        chunks_xyz = to_chunks(walk.xyz, units, files.path)
        _check_repeats(chunks_xyz, files.path)
    except ShardError:
        return error, 1
    except ShardIndexError as impossible:
        return impossible, streams.n_streams
    index = build_index(chunks_xyz, walk.offset_bytes, walk.size_bytes, walk.row)
    dialect = f"{_dialect(framing, [], walk)}, several streams"
    return IndexedShard(framing, units, dialect, index), streams.n_streams


def _check_repeats(chunks_xyz: Ints, path: str) -> None:
    """Checks that all chunks of several streams occur equally often: once each, or in every export into the file.

    Raises:
        ShardIndexError: Some were exported the first time only, or the second; which of the two holds nobody can tell.
    """
    counts = np.unique(to_keys(chunks_xyz), return_counts=True)[1]
    if len(counts) and counts.min() != counts.max():
        raise ShardIndexError(
            "the shard was exported several times, and not with the same chunks",
            path=path,
            expected="all chunks equally often",
            found=f"{int((counts < counts.max()).sum())} of {len(counts)} chunks less often than others",
            advice="Export it again into an empty directory",
        )


def notes_on(path: str, n_records: int, *, has_index: bool, n_streams: int = 1) -> list[str]:
    """What should be known of a shard that can be read."""
    notes = []
    if n_streams > 1:
        notes.append(f"{path}: the shard holds {n_streams} streams; it was indexed from all their {n_records} records")
    elif not has_index:
        notes.append(f"{path}: the shard has no index; it was indexed from its {n_records} records")
    if not n_records:
        notes.append(f"{path}: the shard is whole but holds no record, as a cancelled export leaves it; it reads as 0")
    return notes


def read_index_rows(reader: Reader, files: ShardFiles, *, footer: tuple[int, int] | None) -> list[IndexRows]:
    """Reads and parses a shard's index files and footer, the ones with offsets first.

    Raises:
        ShardIndexError: One of them is empty, cut or of unknown form.
    """
    arrow_bytes = files.arrow.size_bytes if files.arrow else 0
    limit = _INDEX_BYTES_A_RECORD * (arrow_bytes // _SMALLEST_RECORD_BYTES) + (1 << 16)
    sources = []
    for file in files.indexes:
        path = f"{files.directory}/{file.name}"
        if file.size_bytes > limit:
            raise ShardIndexError(
                "the index is larger than any index of this shard",
                path=path,
                expected=f"at most {limit} bytes",
                found=file.size_bytes,
            )
        data = reader.read_ranges(path, [(0, file.size_bytes)])[0] if file.size_bytes else b""
        sources.append(parse_json(data, path) if file.name.endswith(".json") else parse_csv(data, path))
    if footer is not None:
        sources.append(parse_json(reader.read_ranges(files.path, [footer])[0], files.path, dialect="json footer"))
    return sorted(sources, key=lambda rows: rows.offset_bytes is None)


def to_chunks(xyz: Ints, units: Units, path: str) -> Ints:
    """Coordinates as chunks.

    Raises:
        ShardIndexError: Some can't be any chunk's.
    """
    chunks: Ints = xyz // 64 if units == "voxels" else xyz
    if len(chunks) and not (chunks.min() >= 0 and chunks.max() < MAX_CHUNKS_A_SIDE):
        worst = chunks[((chunks < 0) | (chunks >= MAX_CHUNKS_A_SIDE)).any(axis=1)][0]
        raise ShardIndexError(
            "the index has an impossible chunk",
            path=path,
            expected=f"0 to {MAX_CHUNKS_A_SIDE - 1}",
            found=tuple(worst.tolist()),
        )
    return chunks


def _dialect(framing: Framing, sources: list[IndexRows], walk: Walk | None) -> str:
    parts = ["Arrow file" if framing.is_file_format else "Arrow stream"]
    parts += sorted({rows.dialect for rows in sources}) or ["no index"]
    parts.append("zstd blocks" if framing.layout.says_zstd else "raw blocks")
    if walk is not None and walk.n_batches and walk.n_batches < len(walk.xyz):
        parts.append("several rows a batch")
    return ", ".join(parts)
