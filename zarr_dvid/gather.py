"""Reads pieces of many chunks: plans the reads, and decodes what has arrived straight into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid._native import core
from zarr_dvid.block import CHUNK_SHAPE, Voxels
from zarr_dvid.errors import RecordError, ZarrDvidError
from zarr_dvid.fetch import Fetch, ShardRead, fetched, pack, read_fetch
from zarr_dvid.pieces import Pieces
from zarr_dvid.reads import PlannedRead, plan_reads
from zarr_dvid.record import RecordBatch, dvid_layouts
from zarr_dvid.scale import Located
from zarr_dvid.shard_index import CHUNK_VOXELS, Found, Place
from zarr_dvid.voxels import Values, decode_payload, decode_record

if TYPE_CHECKING:
    import numpy.typing as npt

    from zarr_dvid.export import Export
    from zarr_dvid.reader import Reader

    Ints = npt.NDArray[np.int64]

# Columns of the native core's table of jobs.
_SOURCE, _OFFSET, _SIZE, _X, _WINDOW, _SHAPE, _TARGET, _TO, _COLUMNS = 0, 1, 2, 3, 6, 9, 12, 13, 16
_FILL = -1
_REFUSED, _COMPRESSED_BODY = 1, 2  # states of a job when it was tried; 0 is done
_DONE = b"\0"

_MAX_FETCH_BYTES = 8 << 20
_GAP_BYTES = 16 << 10  # what takes a local file no longer to read than to ask again
_HANDED_OVER_AT_ONCE = 32  # pieces


def read_pieces(
    export: Export,
    level: int,
    pieces: Pieces,
    targets: Sequence[Voxels],
    *,
    values: Values,
    max_threads: int,
    max_in_flight_bytes: int,
    hand_over: Callable[[Ints], None] | None = None,
) -> npt.NDArray[np.bool_]:
    """Fills targets with pieces of chunks; those of chunks that the export does not have with 0.

    Args:
        export: The export.
        level: Scale.
        pieces: What to read and where to put it. No two of them may overlap in their target.
        targets: uint64 arrays (z, y, x), writable, aligned, contiguous along x; or whatever gives such an array when it is
            asked for one.
        values: "labels" or "supervoxels".
        max_threads: Threads that decode, over all calls of the process at once.
        max_in_flight_bytes: Compressed bytes held at any time, other than a single record batch that is larger.
        hand_over: Takes the positions of pieces that are in place, some 32 of them at a time.

    Returns:
        Whether the export has the chunk of each piece, shape (n,).

    Raises:
        ZarrDvidError: A chunk that the export should have can't be read, or whether it has one can't be told. What the
            targets hold then is undefined.
    """
    located, several = export.scales[level].locate(pieces.chunks_xyz)
    shards = _by_shard(located)
    work = _Work(pieces, targets, values, max_threads, shards, hand_over)
    present = np.zeros(len(pieces), bool)
    present[several] = True
    for shard in shards:
        present[shard.which] = True
    if len(pieces) == 1 and shards:
        work.decode_one(export.reader)
        return present
    work.fill(np.flatnonzero(~present))
    max_bytes = min(_MAX_FETCH_BYTES, max(1, max_in_flight_bytes // 2))
    reads = [read for i, shard in enumerate(shards) for read in _plan(shard, i, pieces, max_bytes)]
    # Reads that take long are made side by side; others cost less in one go.
    fetches = pack(reads, max_bytes if export.reader.concurrency == 1 else 0)
    for fetch, sources in fetched(export.reader, fetches, max_bytes=max_in_flight_bytes):
        work.decode(fetch, sources)
        del fetch, sources  # before the next ones are fetched
    for i in several.tolist():
        work.decode_several(export, level, i)
    return present


def _by_shard(located: Sequence[Located]) -> list[Located]:
    """One place for each shard: where chunks lie outside their files' cubes, one shard is found several times."""
    by_path: dict[str, list[Located]] = {}
    for place in located:
        by_path.setdefault(place.shard.path, []).append(place)
    return [same[0] if len(same) == 1 else _joined(same) for same in by_path.values()]


def _joined(same: Sequence[Located]) -> Located:
    columns = ("n_records", "offset_bytes", "size_bytes", "row", "n_rows")
    found = Found(*(np.concatenate([getattr(place.found, column) for place in same]) for column in columns))
    return Located(same[0].shard, np.concatenate([place.which for place in same]), found)


def _plan(place: Located, shard: int, pieces: Pieces, max_bytes: int) -> Iterable[ShardRead]:
    planned = plan_reads(place.found.offset_bytes, place.found.size_bytes, gap_bytes=_GAP_BYTES, max_bytes=max_bytes)
    for read in planned:
        yield ShardRead(place.shard.path, read, pieces.chunk_xyz(int(place.which[read.which[0]])), shard)


class _Work:
    """The pieces of one selection as jobs of the native core."""

    def __init__(
        self,
        pieces: Pieces,
        targets: Sequence[Voxels],
        values: Values,
        max_threads: int,
        shards: Sequence[Located],
        hand_over: Callable[[Ints], None] | None,
    ) -> None:
        self._pieces, self._targets, self._shards = pieces, targets, shards
        self._values, self._max_threads, self._hand_over = values, max_threads, hand_over
        self._jobs = np.empty((len(pieces), _COLUMNS), np.int64)
        self._jobs[:, _SOURCE] = _FILL
        self._jobs[:, _WINDOW:_SHAPE] = pieces.start_zyx
        self._jobs[:, _SHAPE:_TARGET] = pieces.shape_zyx
        self._jobs[:, _TARGET] = pieces.target
        self._jobs[:, _TO:] = pieces.to_zyx

    def fill(self, which: Ints) -> None:
        """Fills the pieces of chunks that are absent."""
        for some in self._portions(which):
            self._run((), self._jobs[some], dvid_layouts()[0].native)
            self._done(some)

    def decode_one(self, reader: Reader) -> None:
        """Reads and decodes the only piece there is, with less on the way than there is for many."""
        [place] = self._shards
        found, shard, jobs = place.found, place.shard, self._jobs
        size = int(found.size_bytes[0])
        planned = PlannedRead(int(found.offset_bytes[0]), size, np.zeros(1, np.int64))
        fetch = Fetch((ShardRead(shard.path, planned, self._pieces.chunk_xyz(0), 0),))
        sources = read_fetch(reader, fetch)
        jobs[0, _SOURCE], jobs[0, _OFFSET], jobs[0, _SIZE] = 0, 0, size
        jobs[0, _X:_WINDOW] = self._pieces.chunks_xyz[0] * (CHUNK_VOXELS if shard.units == "voxels" else 1)
        if found.n_rows[0] != 1 or self._run(sources, jobs, shard.framing.layout.native) != _DONE:
            self.decode(fetch, sources)  # which says why, or has Python decode it
        else:
            self._done(np.zeros(1, np.int64))

    def decode(self, fetch: Fetch, sources: Sequence[bytes]) -> None:
        """Decodes all records that reads brought."""
        by_layout: dict[core.Layout, list[tuple[Ints, Ints, Ints]]] = {}
        for source, read in enumerate(fetch.reads):
            place, at = self._shards[read.shard], read.planned.which
            which = place.which[at]
            jobs = self._jobs[which]
            jobs[:, _SOURCE] = source
            jobs[:, _OFFSET] = place.found.offset_bytes[at] - read.planned.offset_bytes
            jobs[:, _SIZE] = place.found.size_bytes[at]
            jobs[:, _X:_WINDOW] = self._pieces.chunks_xyz[which] * (CHUNK_VOXELS if place.shard.units == "voxels" else 1)
            is_alone = place.found.n_rows[at] == 1
            if not is_alone.all():
                self._decode_batches(place, at[~is_alone], sources[source], jobs[~is_alone])
                jobs, at, which = jobs[is_alone], at[is_alone], which[is_alone]
            by_layout.setdefault(place.shard.framing.layout.native, []).append((jobs, at, which))
        for layout, parts in by_layout.items():
            jobs, at, which = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            # As they lie in the target, so that those that share its pages go to one thread.
            order = np.lexsort((jobs[:, _TO + 2], jobs[:, _TO + 1], jobs[:, _TO], jobs[:, _TARGET]))
            for some in self._portions(order):
                status = self._run(sources, jobs[some], layout)
                for i in np.flatnonzero(np.frombuffer(status, np.uint8)).tolist():
                    self._settle(status[i], fetch, sources, jobs[some[i]], int(at[some[i]]))
                self._done(which[some])

    def _portions(self, which: Ints) -> Iterable[Ints]:
        if self._hand_over is None:
            return [which] if len(which) else []
        return [which[i : i + _HANDED_OVER_AT_ONCE] for i in range(0, len(which), _HANDED_OVER_AT_ONCE)]

    def _done(self, which: Ints) -> None:
        if self._hand_over is not None:
            self._hand_over(which)

    def _settle(self, status: int, fetch: Fetch, sources: Sequence[bytes], job: Ints, at: int) -> None:
        """Has Python decode what the core left to it, or say what is wrong with what the core refused."""
        if status not in (_REFUSED, _COMPRESSED_BODY):
            raise MemoryError("not enough memory to decompress a block")
        place = self._shards[fetch.reads[int(job[_SOURCE])].shard]
        self._decode_record(place, at, _batch(place, at, sources[int(job[_SOURCE])], job, self._pieces))
        if status == _REFUSED:
            chunk_xyz = self._pieces.chunk_xyz(int(place.which[at]))
            raise RecordError("the native core refuses the record", path=place.shard.path, chunk_xyz=chunk_xyz)

    def _decode_batches(self, place: Located, at: Ints, source: bytes, jobs: Ints) -> None:
        """Decodes records of messages that hold several, as converters make them; each message is parsed once."""
        batch, offset = None, -1
        for i in np.argsort(jobs[:, _OFFSET], kind="stable").tolist():
            if batch is None or jobs[i, _OFFSET] != offset:
                batch, offset = _batch(place, int(at[i]), source, jobs[i], self._pieces), jobs[i, _OFFSET]
            self._decode_record(place, int(at[i]), batch)
            self._done(place.which[at[i : i + 1]])

    def _decode_record(self, place: Located, at: int, batch: RecordBatch) -> None:
        i = int(place.which[at])
        chunk_xyz = self._pieces.chunk_xyz(i)
        record = place.shard.record(batch, _place(place.found, at), chunk_xyz)
        try:
            decode_record(
                record, values=self._values, shape=CHUNK_SHAPE, window=self._pieces.window(i), out=self._target(i)
            )
        except ZarrDvidError as error:
            raise error.located(path=place.shard.path, chunk_xyz=chunk_xyz) from None

    def decode_several(self, export: Export, level: int, i: int) -> None:
        """Decodes a piece of a chunk that several records claim, once they are known to be equal."""
        payload = export.read_chunk(level, self._pieces.chunk_xyz(i))
        assert payload is not None
        try:
            decode_payload(
                payload, values=self._values, shape=CHUNK_SHAPE, window=self._pieces.window(i), out=self._target(i)
            )
        except ZarrDvidError as error:
            raise error.located(path=payload.path, chunk_xyz=payload.chunk_xyz) from None
        self._done(np.array([i]))

    def _target(self, i: int) -> Voxels:
        return self._targets[int(self._pieces.target[i])][self._pieces.place(i)]

    def _run(self, sources: Sequence[bytes], jobs: Ints, layout: core.Layout) -> bytes:
        if len(self._targets) == 1:
            targets = [self._targets[0]]
        else:
            used, jobs[:, _TARGET] = np.unique(jobs[:, _TARGET], return_inverse=True)
            targets = [self._targets[i] for i in used.tolist()]
        return core.decode_batch(sources, jobs, targets, layout, self._values == "labels", self._max_threads)


def _place(found: Found, at: int) -> Place:
    return Place(*(int(column[at]) for column in (found.offset_bytes, found.size_bytes, found.row, found.n_rows)))


def _batch(place: Located, at: int, source: bytes, job: Ints, pieces: Pieces) -> RecordBatch:
    message = source[int(job[_OFFSET]) : int(job[_OFFSET] + job[_SIZE])]
    return place.shard.batch(message, _place(place.found, at), pieces.chunk_xyz(int(place.which[at])))
