"""The part of indexing that is done shard by shard, each by itself, in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from zarr_dvid.compact_index import WORD_BYTES, CompactIndex
from zarr_dvid.errors import ExportWarning, ShardIndexError, ZarrDvidError
from zarr_dvid.export_index import ExportIndex, IndexFiles, open_index, problem_to_json
from zarr_dvid.index_tables import BLOCKS, WIDE, batch_message
from zarr_dvid.reader import LocalReader, Reader, open_reader
from zarr_dvid.scale_index import BROKEN, COMPACT, HAS_INDEX, IN_VOXELS, IS_FILE_FORMAT, WIDE_FORM
from zarr_dvid.shard import IndexedShard, UndecidedUnitsError, load_shard, load_streams, to_chunks
from zarr_dvid.shard_files import ShardFiles
from zarr_dvid.shard_index import CHUNK_VOXELS, MAX_CHUNKS_A_SIDE, ShardIndex, Units, WideIndex, wide_index
from zarr_dvid.walk import read_framing, walk_records, walk_streams

if TYPE_CHECKING:
    from zarr_dvid.index_tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A shard that is to be indexed.

    Attributes:
        level: Its scale.
        files: Its files.
        cube_voxels: Side of the scale's cubes (or a multiple of it), or 0 where it is not known.
        units: What coordinates count, where that is known.
    """

    level: int
    files: ShardFiles
    cube_voxels: int
    units: Units | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What an index says of a shard.

    Attributes:
        row: Of the table of shards, without what depends on other shards.
        dialect: Of the shard, or "" of one that could not be indexed.
        schema: Its schema message, likewise.
        problem: Why it could not be indexed, or nothing.
        message: Its batch of entries.
    """

    row: dict[str, int]
    dialect: str = ""
    schema: bytes = b""
    problem: dict[str, Any] = field(default_factory=dict)
    message: bytes = b""


def index_shard(reader: Reader, task: Task) -> Entry:
    """Indexes a shard. One that can't be is an entry too.

    Raises:
        UndecidedUnitsError: Other shards of its scale have to tell whether coordinates count chunks or voxels.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)  # who reads the shard by the index is warned
        try:
            shard = load_shard(reader, task.files, units=task.units, side_voxels=task.cube_voxels)
            found: IndexedShard | ZarrDvidError = shard
            n_streams = 1
        except ZarrDvidError as error:
            found, n_streams = load_streams(reader, task.files, error, units=task.units)
    return _entry(task, found, n_streams) if isinstance(found, IndexedShard) else broken_entry(task, found, n_streams)


def _base_row(task: Task, n_streams: int) -> dict[str, int]:
    x, y, z = task.files.origin_voxel
    return {
        "scale": task.level,
        "origin_x": x,
        "origin_y": y,
        "origin_z": z,
        "fingerprint": task.files.fingerprint,
        "arrow_bytes": task.files.arrow.size_bytes if task.files.arrow else 0,
        "n_streams": n_streams,
    }


def broken_entry(task: Task, error: ZarrDvidError, n_streams: int = 1) -> Entry:
    """The entry of a shard that can't be indexed; its box is its cube."""
    row = _base_row(task, n_streams) | {"form": BROKEN}
    side = task.cube_voxels // CHUNK_VOXELS or MAX_CHUNKS_A_SIDE
    for axis, voxel in zip("xyz", task.files.origin_voxel, strict=True):
        low = min(voxel // CHUNK_VOXELS, MAX_CHUNKS_A_SIDE - 1)
        row |= {f"low_{axis}": low, f"high_{axis}": min(low + side, MAX_CHUNKS_A_SIDE) - 1}
    return Entry(row=row, problem=problem_to_json(error))


def _entry(task: Task, shard: IndexedShard, n_streams: int) -> Entry:
    framing, index = shard.framing, shard.index
    blocks = _file_order(index, framing.records_at)
    has_index = bool(task.files.indexes) or framing.footer is not None
    row = _base_row(task, n_streams) | {
        "form": WIDE_FORM if blocks is None else COMPACT,
        "flags": IS_FILE_FORMAT * framing.is_file_format + IN_VOXELS * (shard.units == "voxels") + HAS_INDEX * has_index,
        "schema_at": framing.schema_at,
        "records_at": framing.records_at,
        "records_end": framing.records_end,
        "n_records": len(index),
        "n_chunks": index.n_chunks,
    }
    if len(index):
        chunks = index.chunks_xyz()
        for end, values in (("low", chunks.min(axis=0)), ("high", chunks.max(axis=0))):
            row |= {f"{end}_{axis}": value for axis, value in zip("xyz", values.tolist(), strict=True)}
    message = batch_message(WIDE, _wide_table(index.table())) if blocks is None else batch_message(BLOCKS, blocks)
    return Entry(row=row, dialect=shard.dialect, schema=framing.schema, message=message)


def _file_order(index: ShardIndex, records_at: int) -> Table | None:
    """The entries of a compact index as its records stand in the file, or None where they leave gaps."""
    if not isinstance(index, CompactIndex):
        return None
    order = np.argsort(index.offset_words)
    sizes = index.size_words[order]
    starts = np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])[:-1] + records_at // WORD_BYTES
    is_contiguous = records_at % WORD_BYTES == 0 and (index.offset_words[order] == starts).all()
    return {"cell": index.cells[order], "size": sizes} if is_contiguous else None


def _wide_table(index: WideIndex) -> Table:
    return dict(zip(WIDE, (index.keys, index.offset_bytes, index.size_bytes, index.row, index.n_rows), strict=True))


def check_shard(reader: Reader, task: Task, index: ExportIndex) -> int:
    """Compares each of a shard's entries with the record that it points to.

    Returns:
        How many there are.

    Raises:
        ShardIndexError: One is not what the record says, or there are others than the shard has records.
        ShardError: The shard can't be read.
    """
    scale = index.shard(task.level, task.files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        shard = scale.load(task.files)
    framing = read_framing(reader, task.files.path, shard.framing.size_bytes)
    if scale.is_shared:
        streams = walk_streams(reader, framing)
        if streams.error is not None:
            raise streams.error
        walk = streams.walk
    else:
        walk = walk_records(reader, framing)
    chunks = to_chunks(walk.xyz, shard.units, task.files.path)
    expected = wide_index(chunks, walk.offset_bytes, walk.size_bytes, walk.row)
    one, other = _sorted_rows(expected), _sorted_rows(shard.index.table())
    n_same = min(len(one), len(other))
    wrong = np.flatnonzero((one[:n_same] != other[:n_same]).any(axis=1))
    if len(wrong) or len(one) != len(other):
        at = int(wrong[0]) if len(wrong) else n_same
        raise ShardIndexError(
            "the export's index does not agree with the shard's records",
            path=task.files.path,
            expected=f"{len(one)} records; at {at} (key, offset, size, row, rows) {one[at : at + 1].tolist()}",
            found=f"{len(other)} entries; {other[at : at + 1].tolist()}",
            advice="Delete the index and run `zarr-dvid index` again; if that does not help, export the shard again",
        )
    return len(one)


def _sorted_rows(index: WideIndex) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = np.stack([values.astype(np.int64) for values in _wide_table(index).values()], axis=1)
    return rows[np.lexsort((index.row, index.offset_bytes, index.keys))]


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker process has open."""

    reader: Reader
    index: ExportIndex | None


_worker: Worker | None = None


def start_worker(url: str, storage_options: Mapping[str, Any] | None, folder: str | None) -> None:
    """Opens in a new process what its jobs need: the export, and the index if that is to be checked."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    index = open_index(IndexFiles(LocalReader(folder))) if folder is not None else None
    _worker = Worker(open_reader(url, storage_options), index)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_index(task: Task) -> Entry | None:
    """`index_shard` in a worker process; None where units are undecided."""
    assert _worker is not None
    try:
        return index_shard(_worker.reader, task)
    except UndecidedUnitsError:
        return None


def run_check(task: Task) -> int:
    """`check_shard` in a worker process."""
    assert _worker is not None
    assert _worker.index is not None
    return check_shard(_worker.reader, task, _worker.index)
