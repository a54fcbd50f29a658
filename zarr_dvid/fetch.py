"""Reads in flight: the next ones are made while those that came are decoded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.reader import Reader
from zarr_dvid.reads import PlannedRead

MAX_THREADS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead:
    """A range of a shard.

    Attributes:
        path: Of the shard.
        planned: The range.
        chunk_xyz: The first chunk in it, for messages.
        shard: Which of the shards that a selection touches it is.
    """

    path: str
    planned: PlannedRead
    chunk_xyz: tuple[int, int, int]
    shard: int


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Reads that are made one after another, and decoded together."""

    reads: tuple[ShardRead, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that they bring."""
        return sum(read.planned.size_bytes for read in self.reads)


def pack(reads: Sequence[ShardRead], max_bytes: int) -> list[Fetch]:
    """Puts reads together, in their order: as many as fit into a number of bytes, one where none does."""
    packed: list[Fetch] = []
    first = nbytes = 0
    for i, read in enumerate(reads):
        if i > first and nbytes + read.planned.size_bytes > max_bytes:
            packed.append(Fetch(tuple(reads[first:i])))
            first, nbytes = i, 0
        nbytes += read.planned.size_bytes
    if first < len(reads):
        packed.append(Fetch(tuple(reads[first:])))
    return packed


def fetched(reader: Reader, fetches: Sequence[Fetch], *, max_bytes: int) -> Iterator[tuple[Fetch, list[bytes]]]:
    """Makes reads, and gives them as they come.

    Args:
        reader: Of the export's files.
        fetches: What to read.
        max_bytes: Bytes in flight at any time, other than a single fetch that is larger. What was given counts until the
            next is asked for; the caller must have let it go by then.

    Yields:
        A fetch, and the bytes of each of its reads.

    Raises:
        ZarrDvidError: A read fails; the error names the shard and the first chunk of the read.
    """
    if len(fetches) == 1:  # there is nothing to do meanwhile
        yield fetches[0], read_fetch(reader, fetches[0])
        return
    waiting = list(reversed(fetches))
    in_flight: dict[Future[list[bytes]], Fetch] = {}
    nbytes = 0
    try:
        while waiting or in_flight:
            while (
                waiting
                and len(in_flight) < 2 * reader.concurrency
                and (not in_flight or nbytes + waiting[-1].nbytes <= max_bytes)
            ):
                fetch = waiting.pop()
                in_flight[_threads.pool().submit(read_fetch, reader, fetch)] = fetch
                nbytes += fetch.nbytes
            for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                yield in_flight[future], future.result()
                nbytes -= in_flight.pop(future).nbytes
            del future
    finally:
        for future in in_flight:
            future.cancel()
        wait(in_flight)


def read_fetch(reader: Reader, fetch: Fetch) -> list[bytes]:
    """Makes the reads of a fetch, and gives the bytes of each.

    Raises:
        ZarrDvidError: One fails; the error names the shard and the first chunk of the read.
    """
    sources: list[bytes] = []
    for path, reads in itertools.groupby(fetch.reads, key=lambda read: read.path):
        same = list(reads)
        ranges = [(read.planned.offset_bytes, read.planned.size_bytes) for read in same]
        try:
            sources += reader.read_ranges(path, ranges)
        except ZarrDvidError as error:
            at = next((read for read in same if read.planned.offset_bytes == error.offset_bytes), same[0])
            raise error.located(path=path, chunk_xyz=at.chunk_xyz) from None
    return sources


class _Threads:
    """Threads that read, the process's own."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._drop)

    def _drop(self) -> None:
        self._pool = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="zarr-dvid-read")
        return self._pool


_threads = _Threads()
