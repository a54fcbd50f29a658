"""Reads pieces of many chunks: plans the reads, keeps some in flight, and decodes what has arrived straight into place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid._native import core
from zarr_dvid.block import CHUNK_SHAPE, Voxels
from zarr_dvid.errors import RecordError, ZarrDvidError
from zarr_dvid.pieces import Pieces
from zarr_dvid.reads import PlannedRead, plan_reads
from zarr_dvid.record import dvid_layouts
from zarr_dvid.scale import Located
from zarr_dvid.shard_index import CHUNK_VOXELS, Place
from zarr_dvid.voxels import Values, decode_payload, decode_record

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.export import Export
    from zarr_dvid.reader import Reader

    Ints = npt.NDArray[np.int64]

# Columns of the native core's table of jobs.
_SOURCE, _OFFSET, _SIZE, _X, _WINDOW, _SHAPE, _TARGET, _TO, _COLUMNS = 0, 1, 2, 3, 6, 9, 12, 13, 16
_FILL = -1
_REFUSED, _COMPRESSED_BODY = 1, 2

_MAX_BATCH_BYTES = 8 << 20
_GAP_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """Reads that are made one after another, and decoded together."""

    reads: tuple[tuple[Located, PlannedRead], ...]

    @property
    def nbytes(self) -> int:
        return sum(read.size_bytes for _, read in self.reads)


def read_pieces(
    export: Export,
    level: int,
    pieces: Pieces,
    targets: Sequence[Voxels],
    *,
    values: Values,
    max_threads: int,
    max_in_flight_bytes: int,
) -> npt.NDArray[np.bool_]:
    """Fills targets with pieces of chunks; those of chunks that the export does not have with 0.

    Args:
        export: The export.
        level: Scale.
        pieces: What to read and where to put it. No two of them may overlap in their target.
        targets: uint64 arrays (z, y, x), writable, aligned, contiguous along x.
        values: "labels" or "supervoxels".
        max_threads: Threads that decode, over all calls of the process at once.
        max_in_flight_bytes: Compressed bytes held at any time, other than a single record batch that is larger.

    Returns:
        Whether the export has the chunk of each piece, shape (n,).

    Raises:
        ZarrDvidError: A chunk that the export should have can't be read, or whether it has one can't be told. What the
            targets hold then is undefined.
    """
    work = _Work(export, pieces, targets, values, max_threads)
    located, several = export.scales[level].locate(pieces.chunks_xyz)
    present = np.zeros(len(pieces), bool)
    present[several] = True
    for place in located:
        present[place.which] = True
    work.fill(np.flatnonzero(~present))
    max_bytes = min(_MAX_BATCH_BYTES, max(1, max_in_flight_bytes // 2))
    reads = [(place, read) for place in located for read in _plan(place, max_bytes)]
    # Reads that take long are made side by side; others cost less in one go.
    fetches = _pack(reads, max_bytes if export.reader.concurrency == 1 else 0)
    for fetch, sources in _fetched(export.reader, fetches, pieces, max_in_flight_bytes):
        work.decode(fetch, sources)
        del fetch, sources  # before the next ones are fetched
    for i in several.tolist():
        work.decode_several(level, i)
    return present


def _plan(place: Located, max_bytes: int) -> list[PlannedRead]:
    found = place.found
    return plan_reads(found.offset_bytes, found.size_bytes, gap_bytes=_GAP_BYTES, max_bytes=max_bytes)


def _pack(reads: Sequence[tuple[Located, PlannedRead]], max_bytes: int) -> list[_Fetch]:
    """Puts reads together, in their order, as many as fit into a number of bytes."""
    packed: list[_Fetch] = []
    batch: list[tuple[Located, PlannedRead]] = []
    nbytes = 0
    for read in reads:
        if batch and nbytes + read[1].size_bytes > max_bytes:
            packed.append(_Fetch(tuple(batch)))
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += read[1].size_bytes
    if batch:
        packed.append(_Fetch(tuple(batch)))
    return packed


def _fetched(
    reader: Reader, fetches: Sequence[_Fetch], pieces: Pieces, max_in_flight_bytes: int
) -> Iterator[tuple[_Fetch, list[bytes]]]:
    """Makes reads, the next ones while the caller is busy with those that came, and gives them as they come."""
    if len(fetches) == 1:  # nothing to do meanwhile
        yield fetches[0], _fetch(reader, fetches[0], pieces)
        return
    waiting = list(reversed(fetches))
    in_flight: dict[Future[list[bytes]], _Fetch] = {}
    try:
        while waiting or in_flight:
            nbytes = sum(fetch.nbytes for fetch in in_flight.values())
            while waiting and (not in_flight or nbytes + waiting[-1].nbytes <= max_in_flight_bytes):
                fetch = waiting.pop()
                in_flight[_readers.pool().submit(_fetch, reader, fetch, pieces)] = fetch
                nbytes += fetch.nbytes
            done, _ = wait(in_flight, return_when=FIRST_COMPLETED)
            for future in done:
                # It counts as in flight until the caller has decoded it and comes back.
                yield in_flight[future], future.result()
                del in_flight[future]
            del done, future
    finally:
        for future in in_flight:
            future.cancel()
        wait(in_flight)


def _fetch(reader: Reader, fetch: _Fetch, pieces: Pieces) -> list[bytes]:
    sources: list[bytes] = []
    for place, read in fetch.reads:
        try:
            sources += reader.read_ranges(place.shard.path, [(read.offset_bytes, read.size_bytes)])
        except ZarrDvidError as error:
            first = int(place.which[read.which[0]])
            raise error.located(path=place.shard.path, chunk_xyz=pieces.chunk_xyz(first)) from None
    return sources


class _Readers:
    """Threads that read, the process's own."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._drop)

    def _drop(self) -> None:
        self._pool = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(16, thread_name_prefix="zarr-dvid-read")
        return self._pool


_readers = _Readers()


class _Work:
    """The pieces of one selection as jobs of the native core."""

    def __init__(self, export: Export, pieces: Pieces, targets: Sequence[Voxels], values: Values, max_threads: int) -> None:
        self._export, self._pieces, self._targets = export, pieces, targets
        self._values, self._max_threads = values, max_threads
        self._jobs = np.empty((len(pieces), _COLUMNS), np.int64)
        self._jobs[:, _SOURCE] = _FILL
        self._jobs[:, _WINDOW:_SHAPE] = pieces.start_zyx
        self._jobs[:, _SHAPE:_TARGET] = pieces.shape_zyx
        self._jobs[:, _TARGET] = pieces.target
        self._jobs[:, _TO:] = pieces.to_zyx

    def fill(self, which: Ints) -> None:
        """Fills the pieces of chunks that are absent."""
        if len(which):
            self._run((), self._jobs[which], dvid_layouts()[0].native)

    def decode(self, fetch: _Fetch, sources: Sequence[bytes]) -> None:
        """Decodes all records that reads brought."""
        by_layout: dict[core.Layout, list[tuple[Ints, Ints]]] = {}
        for source, (place, read) in enumerate(fetch.reads):
            which = place.which[read.which]
            jobs = self._jobs[which]
            jobs[:, _SOURCE] = source
            jobs[:, _OFFSET] = place.found.offset_bytes[read.which] - read.offset_bytes
            jobs[:, _SIZE] = place.found.size_bytes[read.which]
            jobs[:, _X:_WINDOW] = self._pieces.chunks_xyz[which] * (CHUNK_VOXELS if place.shard.units == "voxels" else 1)
            is_alone = place.found.n_rows[read.which] == 1
            for i in np.flatnonzero(~is_alone).tolist():  # of messages of many, which converters make
                self._decode_in_python(place, int(read.which[i]), sources[source], jobs[i])
            layout = place.shard.framing.layout.native
            by_layout.setdefault(layout, []).append((jobs[is_alone], read.which[is_alone]))
        for layout, parts in by_layout.items():
            jobs, at = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            # As they lie in the target, so that those that share its pages go to one thread.
            order = np.lexsort((jobs[:, _TO + 2], jobs[:, _TO + 1], jobs[:, _TO], jobs[:, _TARGET]))
            jobs = jobs[order]
            status = np.frombuffer(self._run(sources, jobs, layout), np.uint8)
            for job in np.flatnonzero(status).tolist():
                source = int(jobs[job, _SOURCE])
                self._settle(status[job], fetch.reads[source][0], int(at[order[job]]), sources[source], jobs[job])

    def _settle(self, status: int, place: Located, at: int, source: bytes, job: Ints) -> None:
        """Has Python decode what the core left to it, or say what is wrong with what the core refused."""
        if status not in (_REFUSED, _COMPRESSED_BODY):
            raise MemoryError("not enough memory to decompress a block")
        self._decode_in_python(place, at, source, job)
        if status == _REFUSED:
            chunk_xyz = self._pieces.chunk_xyz(int(place.which[at]))
            raise RecordError("the native core refuses the record", path=place.shard.path, chunk_xyz=chunk_xyz)

    def _decode_in_python(self, place: Located, at: int, source: bytes, job: Ints) -> None:
        """Decodes one record with all that Python knows of it."""
        i = int(place.which[at])
        found = place.found
        chunk_xyz = self._pieces.chunk_xyz(i)
        where = Place(*(int(column[at]) for column in (found.offset_bytes, found.size_bytes, found.row, found.n_rows)))
        message = source[int(job[_OFFSET]) : int(job[_OFFSET] + job[_SIZE])]
        record = place.shard.parse(message, where, chunk_xyz)
        try:
            decode_record(
                record, values=self._values, shape=CHUNK_SHAPE, window=self._pieces.window(i), out=self._target(i)
            )
        except ZarrDvidError as error:
            raise error.located(path=place.shard.path, chunk_xyz=chunk_xyz) from None

    def decode_several(self, level: int, i: int) -> None:
        """Decodes a piece of a chunk that several records claim, once they are known to be equal."""
        payload = self._export.read_chunk(level, self._pieces.chunk_xyz(i))
        assert payload is not None
        try:
            decode_payload(
                payload, values=self._values, shape=CHUNK_SHAPE, window=self._pieces.window(i), out=self._target(i)
            )
        except ZarrDvidError as error:
            raise error.located(path=payload.path, chunk_xyz=payload.chunk_xyz) from None

    def _target(self, i: int) -> Voxels:
        return self._targets[int(self._pieces.target[i])][self._pieces.place(i)]

    def _run(self, sources: Sequence[bytes], table: Ints, layout: core.Layout) -> bytes:
        return core.decode_batch(
            sources, np.ascontiguousarray(table), self._targets, layout, self._values == "labels", self._max_threads
        )
