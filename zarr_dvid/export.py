"""An export: what is on disk, and the record of any chunk."""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from zarr_dvid.block import CHUNK_SHAPE, decode_into, plain_block
from zarr_dvid.errors import AmbiguousChunkError, ExportError, ExportWarning, MissingFileError, ShardError, ZarrDvidError
from zarr_dvid.export_index import DIRECTORY, ExportIndex, IndexFiles, find_index, open_index, out_of_date
from zarr_dvid.lazy import lazy
from zarr_dvid.reader import FileInfo, Reader, open_reader
from zarr_dvid.record import Record, RecordBytes, record_message
from zarr_dvid.scale import Scale
from zarr_dvid.shard import Shard
from zarr_dvid.shard_files import group_files
from zarr_dvid.shard_index import Place
from zarr_dvid.unfinished import STATE_NAME
from zarr_dvid.volume import XYZ, LoggedScale, VolumeInfo, parse_export_log, parse_info

InfoLike = str | os.PathLike[str] | Mapping[str, Any]

_SCALE_NAME = re.compile(r"s(0|[1-9][0-9]?)")
_MAX_DOCUMENT_BYTES = 16 << 20


class Export:
    """What DVID's `export-shards` wrote into a directory.

    Nothing is read before it is needed: scales when they are first asked for, shards' indexes when a chunk of theirs is.

    Args:
        reader: Of the export's files.
        info: A neuroglancer volume description: its URL or path, or the document itself.
        index: Of the directory of its compact index; None to look for one beside the export and in the user's cache, False
            to do without.
    """

    def __init__(
        self, reader: Reader, *, info: InfoLike | None = None, index: Reader | Literal[False] | None = None
    ) -> None:
        self.reader = reader
        self._info_argument = info
        self._index_argument = index

    @lazy
    def _root(self) -> dict[str, FileInfo]:
        try:
            return {entry.name: entry for entry in self.reader.list("")}
        except MissingFileError as error:
            raise ExportError(
                "there is no export here", path=self.reader.url, expected="a directory with s0, s1, …", found=error.found,
                advice="Give the directory that export-shards was told to write to",
            ) from None  # fmt: skip

    @lazy
    def info(self) -> VolumeInfo | None:
        """The volume description: the one given, else `info` in the export, else None.

        Raises:
            ExportError: It can't be read or used.
        """
        argument = self._info_argument
        if isinstance(argument, Mapping):
            return parse_info(argument, "info=")
        if argument is not None:
            return parse_info(_read_document(os.fspath(argument)), os.fspath(argument))
        if "info" in self._root and not self._root["info"].is_dir:
            return parse_info(self._read_whole("info"), "info")
        return None

    @lazy
    def log(self) -> dict[int, LoggedScale]:
        """What `export.log` tells of each scale; nothing where it is missing or tells none."""
        if "export.log" not in self._root:
            return {}
        return parse_export_log(self._read_whole("export.log").decode("utf-8", "replace"))

    @lazy
    def index(self) -> ExportIndex | None:
        """The compact index, if there is one.

        Raises:
            ShardIndexError: It is damaged, of a later version, or not where it was said to be.
        """
        if self._index_argument is False:
            return None
        if self._index_argument is not None:
            return open_index(IndexFiles(self._index_argument))
        beside = self._root.get(DIRECTORY)
        return find_index(self.reader, is_beside=beside is not None and beside.is_dir)

    @lazy
    def scales(self) -> dict[int, Scale]:
        """The scales that are there, by number.

        Raises:
            ExportError: There are none, or the volume description does not fit them.
        """
        levels = sorted(int(m[1]) for name, e in self._root.items() if e.is_dir and (m := _SCALE_NAME.fullmatch(name)))
        if not levels:
            raise ExportError(
                "there is no export here", path=self.reader.url, expected="directories s0, s1, …",
                found=", ".join(sorted(self._root)[:8]) or "an empty directory",
                advice="Give the directory that export-shards was told to write to",
            )  # fmt: skip
        if STATE_NAME in self._root:
            warnings.warn(
                f"{self.reader.url}: the export is still being written: chunks that are not written yet read as 0",
                ExportWarning,
                stacklevel=2,
            )
        info = self.info
        if info is not None and levels[-1] >= len(info.sizes_xyz):
            raise ExportError(
                "the volume description has fewer scales than the export", path=info.source,
                expected=f"at least {levels[-1] + 1} scales", found=len(info.sizes_xyz),
                advice="Give the neuroglancer spec that the export was made with, as info=",
            )  # fmt: skip
        scales = {level: self._scale(level, info) for level in levels}
        if self.index is not None:
            message = out_of_date(self.index, [scale.index for scale in scales.values() if scale.index is not None])
            if message is not None:
                warnings.warn(message, ExportWarning, stacklevel=2)
        return scales

    def _scale(self, level: int, info: VolumeInfo | None) -> Scale:
        logged = self.log.get(level)
        size = info.sizes_xyz[level] if info is not None else logged.size_xyz if logged is not None else None
        if info is not None and logged is not None and logged.size_xyz != size:
            warnings.warn(
                f"s{level}: export.log gives the volume {logged.size_xyz} voxels (x, y, z), but {info.source} {size};"
                " the latter is used",
                ExportWarning,
                stacklevel=2,
            )
        shards, _ = group_files(f"s{level}", self.reader.list(f"s{level}"))
        sharding = info.shardings[level] if info is not None else None
        return Scale(
            self.reader,
            level,
            shards,
            size_xyz=size,
            sharding=sharding,
            n_logged_shards=None if logged is None else logged.n_shards,
            index=None if self.index is None else self.index.scale(level, shards),
        )

    def read_chunk(self, level: int, chunk_xyz: XYZ) -> RecordBytes | None:
        """The payload of a chunk: its record-batch message, byte for byte as in the file where that holds one row.

        Args:
            level: Scale.
            chunk_xyz: Chunk at that scale.

        Returns:
            The message, or None where a sound index says that the export does not have the chunk.

        Raises:
            ZarrDvidError: Its shard or index is missing or broken, or its record is not what the index promises.
        """
        chunk_xyz = _plain_integers(chunk_xyz)
        scale = self.scales.get(level)
        if scale is None:
            raise ExportError(
                "there is no such scale", path=f"s{level}", expected=f"one of {list(self.scales)}", found=level
            )
        try:
            shards = scale.find(chunk_xyz)
        except ZarrDvidError as error:
            raise error.located(chunk_xyz=chunk_xyz) from None
        found = [self._read_place(shard, place, chunk_xyz) for shard in shards for place in shard.index.places(chunk_xyz)]
        if not found:
            return None
        first = found[0]
        for shard, record, _ in found[1:]:
            if not _same_voxels(first[1], record):
                raise AmbiguousChunkError(
                    "several records claim this chunk, and differ",
                    path=shard.path,
                    chunk_xyz=chunk_xyz,
                    expected="one record, or equal ones",
                    found=f"{len(found)} records",
                )
        return RecordBytes(first[2], path=first[0].path, chunk_xyz=chunk_xyz)

    def payload_nbytes(self, level: int, chunk_xyz: XYZ) -> int | None:
        """Length of a chunk's payload, or None where that is not known before it is made."""
        chunk_xyz = _plain_integers(chunk_xyz)
        for shard in self.scales[level].find(chunk_xyz):
            place = shard.index.places(chunk_xyz)[0]
            if place.n_rows == 1 and shard.framing.layout.is_dvid:
                return place.size_bytes
        return None

    def _read_place(self, shard: Shard, place: Place, chunk_xyz: XYZ) -> tuple[Shard, Record, bytes]:
        """A record, and a message of one row that holds it."""
        try:
            message = self.reader.read_ranges(shard.path, [(place.offset_bytes, place.size_bytes)])[0]
        except ShardError as error:
            raise error.located(chunk_xyz=chunk_xyz) from None
        record = shard.parse(message, place, chunk_xyz)
        if place.n_rows == 1 and shard.framing.layout.is_dvid:
            return shard, record, message
        return shard, record, reframe(record)

    def _read_whole(self, path: str) -> bytes:
        size = self._root[path].size_bytes
        if size > _MAX_DOCUMENT_BYTES:
            raise ExportError(
                "the document is too large", path=path, expected=f"at most {_MAX_DOCUMENT_BYTES} bytes", found=size
            )
        return self.reader.read_ranges(path, [(0, size)])[0] if size else b""


def _plain_integers(chunk_xyz: XYZ) -> XYZ:
    """Coordinates as Python's integers; numpy's would overflow in a key."""
    x, y, z = map(operator.index, chunk_xyz)
    return x, y, z


def reframe(record: Record) -> bytes:
    """A record of a batch of many, or of other columns, as a message of one row in DVID's layout.

    Raises:
        BlockError: The record does not say how long its block is, and the block is broken.
    """
    size = record.uncompressed_size
    if size is None:
        size = len(plain_block(record.block, expected_shape=CHUNK_SHAPE))
    return record_message(
        record.chunk_xyz,
        labels=record.labels,
        supervoxels=record.supervoxels,
        block=record.block,
        uncompressed_size=size,
    )


def _same_voxels(one: Record, other: Record) -> bool:
    if one == other:
        return True
    return all(
        np.array_equal(
            decode_into(one.block, labels=one_labels, expected_shape=CHUNK_SHAPE),
            decode_into(other.block, labels=other_labels, expected_shape=CHUNK_SHAPE),
        )
        for one_labels, other_labels in (
            (None, None),
            (np.frombuffer(one.labels, "<u8"), np.frombuffer(other.labels, "<u8")),
        )
    )


def _read_document(url: str) -> bytes:
    directory, _, name = url.rpartition("/")
    reader = open_reader(directory or ("/" if url.startswith("/") else "."))
    try:
        size = reader.size(name)
        if size > _MAX_DOCUMENT_BYTES:
            raise ExportError(
                "the document is too large", path=url, expected=f"at most {_MAX_DOCUMENT_BYTES} bytes", found=size
            )
        return reader.read_ranges(name, [(0, size)])[0]
    except MissingFileError as error:
        raise ExportError("the volume description is missing", path=url, found=error.found, advice="Check info=") from None
