"""Makes the compact index of an export."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from zarr_dvid.errors import ShardIndexError, ZarrDvidError
from zarr_dvid.export import Export, InfoLike
from zarr_dvid.export_index import DIRECTORY, ExportIndex, IndexFiles, cache_directory, open_index, problem_to_json
from zarr_dvid.index_job import Entry, Task, broken_entry, check_shard, index_shard, run_check, run_index, start_worker
from zarr_dvid.index_journal import Journal, has_checksum, locked
from zarr_dvid.progress import progress_bar
from zarr_dvid.reader import LocalReader, Reader, open_reader
from zarr_dvid.scale import Scale
from zarr_dvid.scale_index import BROKEN
from zarr_dvid.shard import UndecidedUnitsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """What was indexed.

    Attributes:
        path: The index's folder.
        n_shards: Shards of the export.
        n_records: Records of those that could be indexed.
        n_broken: Shards that could not.
        n_done_before: Shards that an interrupted run, or an older index, had done already.
        n_checked: Records that were compared with their entries.
        nbytes: Length of all its files together.
        was_up_to_date: Whether there was nothing to do.
    """

    path: Path
    n_shards: int
    n_records: int
    n_broken: int
    n_done_before: int
    n_checked: int
    nbytes: int
    was_up_to_date: bool

    def to_json(self) -> dict[str, Any]:
        """The same for programs; sizes in bytes."""
        return {
            "path": str(self.path),
            "shards": self.n_shards,
            "records": self.n_records,
            "broken_shards": self.n_broken,
            "done_before": self.n_done_before,
            "up_to_date": self.was_up_to_date,
            "checked_records": self.n_checked,
            "bytes": self.nbytes,
        }

    def __str__(self) -> str:
        size = f"{self.nbytes:,} bytes"
        if self.n_records:
            size += f", {self.nbytes / self.n_records:.2f} a record"
        state = "was up to date already" if self.was_up_to_date else "is done"
        lines = [f"{self.path}: the index {state}: {self.n_records:,} records of {self.n_shards:,} shards in {size}"]
        if self.n_done_before and not self.was_up_to_date:
            lines.append(f"{self.n_done_before:,} shards had been indexed before")
        if self.n_broken:
            lines.append(f"{self.n_broken:,} shards can't be read; `zarr-dvid info` tells why")
        if self.n_checked:
            lines.append(f"{self.n_checked:,} entries agree with their records")
        return "\n".join(lines)


def index_export(
    url: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    info: InfoLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    check_records: bool = False,
    progress: bool = True,
) -> IndexSummary:
    """Makes the compact index of an export, which is found by itself when the export is opened.

    With it an export opens without reading any shard's own index, a shard costs one read of 4 bytes a block, and exports
    whose files hold chunks of one another's cubes, or several streams, can be read. Shards that can't be indexed are noted
    with their error, and raise it when they are read.

    What was interrupted is gone on with by calling this again. Only shards that changed since the last time are indexed
    anew. The same export always gives the same bytes.

    Args:
        url: The export's directory: a path, or a URL of any fsspec filesystem.
        destination: Local folder of the index; by default ``zarr-dvid-index`` in the export where that is local and can be
            written to, else a folder of the user's cache (``~/.cache/zarr-dvid``).
        info: A neuroglancer volume description: its path or URL, or the document itself.
        storage_options: Options of the URL's filesystem, in fsspec's terms.
        jobs: How many processes index shards; by default as many as there are processors. More than one are spawned, so
            that a script needs its ``if __name__ == "__main__":``.
        check_records: Whether to compare each entry with the record that it points to, for which the headers of all
            records are read.
        progress: Whether to show a bar, where stderr is a terminal and tqdm is installed.

    Raises:
        ExportError: There is no export, or the folder holds something else, or another process is writing to it.
        ShardIndexError: An entry is not what its record says (with `check_records`).
    """
    if destination is not None and "://" in os.fspath(destination):
        raise ValueError(f"an index is written to a local folder, not to {destination!r}; copy it there afterwards")
    jobs = max(1, os.cpu_count() or 1) if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    text = os.fspath(url)
    reader = open_reader(url, storage_options)
    export = Export(reader, info=info, index=False)
    folder = Path(destination) if destination is not None else default_folder(reader)
    builder = _Builder(text, storage_options, reader, export.scales, folder, jobs, progress)
    with locked(folder):
        was_up_to_date = builder.is_done()
        n_before = len(builder.tasks) if was_up_to_date else builder.build()
        n_checked = builder.check() if check_records else 0
    index = builder.index
    return IndexSummary(
        folder,
        len(builder.tasks),
        int(index.rows["n_records"].sum()),
        int((index.rows["form"] == BROKEN).sum()),
        n_before,
        n_checked,
        sum(path.stat().st_size for path in folder.iterdir()),
        was_up_to_date,
    )


def default_folder(reader: Reader) -> Path:
    """Where an export's index goes if nobody says where."""
    if isinstance(reader, LocalReader) and os.access(reader.url, os.W_OK):
        return Path(reader.url) / DIRECTORY
    return cache_directory(reader.url)


class _Builder:
    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        reader: Reader,
        scales: Mapping[int, Scale],
        folder: Path,
        jobs: int,
        progress: bool,  # noqa: FBT001
    ) -> None:
        self._open = (url, storage_options)
        self._reader = reader
        self._scales = scales
        self._folder = folder
        self._jobs = jobs
        self._progress = progress
        self.tasks = [
            Task(level=level, files=files, cube_voxels=scale.cube_voxels)
            for level, scale in sorted(scales.items())
            for files in scale.shards.values()
        ]

    @property
    def index(self) -> ExportIndex:
        """The index as it is in its folder."""
        return open_index(IndexFiles(LocalReader(self._folder)))

    @property
    def _parameters(self) -> dict[str, Any]:
        return {"cubes_voxels": {str(level): scale.cube_voxels for level, scale in sorted(self._scales.items())}}

    def is_done(self) -> bool:
        """Whether the index is there, whole, and of the shards as they are."""
        old = _OldIndex.open(self._folder, self._parameters)
        return old is not None and old.is_of(self.tasks)

    def build(self) -> int:
        """Makes the index; how many shards did not have to be read."""
        old = _OldIndex.open(self._folder, self._parameters)
        journal = Journal(self._folder, self._parameters, self.tasks)
        n_before = journal.n_done
        label = f"Indexing {self._reader.url.rstrip('/').rsplit('/', 1)[-1]}"
        try:
            with progress_bar(len(self.tasks), label, enabled=self._progress) as advance:
                advance(n_before)
                for entry, is_old in self._entries(self.tasks[n_before:], old):
                    journal.append(entry)
                    n_before += is_old
                    advance(1)
            journal.finish(self._reader.url)
        finally:
            journal.close()
        return n_before

    def check(self) -> int:
        """Compares all entries with their records; how many there are."""
        index = self.index
        broken = {
            (scale, (x, y, z))
            for scale, x, y, z in zip(
                *(index.rows[name][index.rows["form"] == BROKEN].tolist() for name in ("scale", *_ORIGIN)), strict=True
            )
        }
        tasks = [task for task in self.tasks if (task.level, task.files.origin_voxel) not in broken]
        n_checked = 0
        with (
            progress_bar(len(tasks), "Checking records", enabled=self._progress) as advance,
            ExitStack() as stack,
        ):
            run: Callable[[Task], Future[int]] = self._runner(
                stack, run_check, lambda task: self._check(task, index), index
            )
            for future in _in_order(run, tasks, 2 * self._jobs):
                n_checked += future.result()
                advance(1)
        return n_checked

    def _check(self, task: Task, index: ExportIndex) -> int:
        return check_shard(self._reader, task, index)

    def _entries(self, tasks: list[Task], old: _OldIndex | None) -> Iterator[tuple[Entry, bool]]:
        """The entries of shards, in their order; and whether they come from the index that was there before."""
        units: dict[int, Any] = {}
        with ExitStack() as stack:
            run = self._runner(stack, run_index, self._index_shard, None)

            def start(task: Task) -> tuple[Task, Entry | Future[Entry | None]]:
                known = old.entry(task) if old is not None else None
                return task, known or run(replace(task, units=units.get(task.level)))

            for task, started in _in_order(start, tasks, 2 * self._jobs):
                if isinstance(started, Entry):
                    yield started, True
                    continue
                entry = started.result()
                if entry is None:
                    try:
                        units[task.level] = self._scales[task.level].units
                        entry = index_shard(self._reader, replace(task, units=units[task.level]))
                    except ZarrDvidError as error:
                        entry = broken_entry(task, error)
                yield entry, False

    def _index_shard(self, task: Task) -> Entry | None:
        try:
            return index_shard(self._reader, task)
        except UndecidedUnitsError:
            return None

    def _runner(
        self, stack: ExitStack, job: Callable[[Task], T], here: Callable[[Task], T], index: ExportIndex | None
    ) -> Callable[[Task], Future[T]]:
        """Runs jobs in worker processes, or in this one where one is enough."""
        if self._jobs == 1:
            return lambda task: _done(here(task))
        pool = ProcessPoolExecutor(
            self._jobs,
            multiprocessing.get_context("spawn"),
            start_worker,
            (*self._open, None if index is None else str(self._folder)),
        )
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        return lambda task: pool.submit(job, task)


_ORIGIN = ("origin_x", "origin_y", "origin_z")


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _in_order(start: Callable[[Task], T], tasks: list[Task], n_at_once: int) -> Iterator[T]:
    """Starts tasks a few ahead of what is taken, so that memory stays flat."""
    ahead: deque[T] = deque()
    for task in tasks:
        ahead.append(start(task))
        if len(ahead) >= n_at_once:
            yield ahead.popleft()
    yield from ahead


class _OldIndex:
    """The index that was made before; shards that did not change since are taken over from it."""

    def __init__(self, index: ExportIndex, folder: Path) -> None:
        self._index = index
        self._folder = folder
        rows = index.rows
        names = zip(*(rows[name].tolist() for name in ("scale", *_ORIGIN, "fingerprint")), strict=True)
        self._row_of = {name: i for i, name in enumerate(names)}

    @classmethod
    def open(cls, folder: Path, parameters: Mapping[str, Any]) -> _OldIndex | None:
        """The index in a folder, unless there is none that can be used."""
        try:
            index = open_index(IndexFiles(LocalReader(folder)))
        except ShardIndexError:
            return None
        return cls(index, folder) if index.parameters == parameters else None

    def is_of(self, tasks: list[Task]) -> bool:
        """Whether it has just these shards, as they are, and all its files are what was written."""
        is_same = len(tasks) == len(self._row_of) and all(_version(task) in self._row_of for task in tasks)
        return is_same and all(has_checksum(self._folder / name, *facts) for name, facts in self._index.checksums.items())

    def entry(self, task: Task) -> Entry | None:
        """A shard's entry, if it has not changed and is whole."""
        at = self._row_of.get(_version(task))
        if at is None:
            return None
        row = {name: values[at].item() for name, values in self._index.rows.items()}
        schema, dialect, problem = (row.pop(name) for name in ("schema", "dialect", "problem"))
        offset, size, crc32 = (row.pop(name) for name in ("batch_offset", "batch_bytes", "batch_crc32"))
        if row["form"] == BROKEN:
            return Entry(row=row, problem=problem_to_json(self._index.problems[problem]))
        try:
            message, _ = self._index.read(row["form"], offset, size)
        except ShardIndexError:
            return None
        if zlib.crc32(message) != crc32:
            return None
        return Entry(row=row, dialect=self._index.dialects[dialect], schema=self._index.schemas[schema], message=message)


def _version(task: Task) -> tuple[int, ...]:
    return (task.level, *task.files.origin_voxel, task.files.fingerprint)
