"""An index that is being made: what of it lies on the disk already, and how to go on after an interruption.

While an index is made its folder holds a folder ``unfinished``: the tables as far as they are written, and a journal with
a line for each shard that is done. The first line tells the parameters. A shard's entries are written before its line, so
that what the journal names is whole.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zarr_dvid.errors import ExportError
from zarr_dvid.export_index import FORMAT, MANIFEST, VERSION, manifest_crc32
from zarr_dvid.index_job import Entry, Task
from zarr_dvid.index_tables import BLOCKS, SHARDS, WIDE, schema_message, write_table
from zarr_dvid.record import END_OF_STREAM
from zarr_dvid.scale_index import COMPACT, WIDE_FORM
from zarr_dvid.unfinished import replace_file, sync_folder

if TYPE_CHECKING:
    from zarr_dvid.index_tables import Table

UNFINISHED = "unfinished"
_LOCK = ".lock"
_JOURNAL = "journal.jsonl"
_DATA_NAME = re.compile(r"(shards|blocks|wide)-[0-9a-f]{8}\.arrow")
_TABLES = {"blocks": BLOCKS, "wide": WIDE}
_FORMS = {COMPACT: "blocks", WIDE_FORM: "wide"}
_COPY_BYTES = 1 << 20


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes an index's folder, and keeps other processes from writing to it; a process that dies lets go of it.

    Raises:
        ExportError: Another one is writing there, or the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ExportError("an index is a folder, and this is a file", path=str(folder), advice="Choose a folder")
    folder.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in folder.iterdir() if not _is_ours(path.name)]
    if others:
        raise ExportError(
            "this folder holds something else than an index",
            path=str(folder),
            found=", ".join(sorted(others)[:8]),
            advice="Choose an empty folder, or a new one",
        )
    path = folder / _LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it a moment ago has removed the file; somebody else may have made a new one by now.
        is_mine = path.exists() and path.stat().st_ino == os.fstat(handle).st_ino
    except BlockingIOError:
        is_mine = False
    if not is_mine:
        os.close(handle)
        raise ExportError("another process is making an index here", path=str(folder), advice="Wait until it is done")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, UNFINISHED, _LOCK, f".{MANIFEST}.part") or _DATA_NAME.fullmatch(name) is not None


class Journal:
    """The index in `folder` that is being made, which this process has locked.

    Args:
        folder: Of the index.
        parameters: All that defines the output beside the shards, as JSON values.
        tasks: All shards, in the order of the output.
    """

    def __init__(self, folder: Path, parameters: dict[str, Any], tasks: Sequence[Task]) -> None:
        self._folder = folder
        self._unfinished = folder / UNFINISHED
        self._parameters = parameters
        self._tasks = tasks
        self.n_done = 0
        self._dialects: dict[str, int] = {}
        self._schemas: dict[bytes, int] = {}
        self._problems: list[dict[str, Any]] = []
        self._rows: Table = {name: np.zeros(len(tasks), kind) for name, kind in SHARDS.items()}
        self._sizes: dict[str, int] = {}
        self._crcs: dict[str, int] = {}
        if not self._resume():
            self._begin()
        self._files = {name: (self._unfinished / name).open("ab") for name in (*_TABLES, _JOURNAL)}

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files.values():
            file.close()

    def append(self, entry: Entry) -> None:
        """Adds the next shard."""
        n_schemas = len(self._schemas)
        row = {**entry.row, **self._ordinals(entry)}
        if entry.message:
            table = _FORMS[row["form"]]
            row |= {
                "batch_offset": self._sizes[table],
                "batch_bytes": len(entry.message),
                "batch_crc32": zlib.crc32(entry.message),
            }
            self._write(table, entry.message)
        line = {
            "row": row,
            "dialect": entry.dialect,
            "schema": base64.b64encode(entry.schema).decode() if len(self._schemas) > n_schemas else "",
            "problem": entry.problem,
            "sizes": self._sizes,
            "crc32": self._crcs,
        }
        self._files[_JOURNAL].write(f"{json.dumps(line)}\n".encode())
        self._files[_JOURNAL].flush()
        self._take(row)

    def finish(self, url: str) -> dict[str, Any]:
        """Puts the whole index in the place of what was there before, and gives its manifest."""
        for table in _TABLES:
            self._write(table, END_OF_STREAM)
            os.fsync(self._files[table].fileno())
        self.close()
        shards = write_table(SHARDS, self._rows)
        self._sizes["shards"], self._crcs["shards"] = len(shards), zlib.crc32(shards)
        replace_file(self._unfinished / "shards", shards)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "url": url,
            **self._parameters,
            "files": {
                name: {
                    "name": f"{name}-{self._crcs[name]:08x}.arrow",
                    "size_bytes": self._sizes[name],
                    "crc32": self._crcs[name],
                }
                for name in ("shards", *_TABLES)
            },
            "dialects": list(self._dialects),
            "schemas": [base64.b64encode(schema).decode() for schema in self._schemas],
            "problems": self._problems,
        }
        manifest["crc32"] = manifest_crc32(manifest)
        for name, file in manifest["files"].items():
            (self._unfinished / name).replace(self._folder / file["name"])
        sync_folder(self._folder)
        replace_file(self._folder / MANIFEST, f"{json.dumps(manifest, indent=1)}\n".encode())
        names = {file["name"] for file in manifest["files"].values()}
        for path in self._folder.iterdir():
            if _DATA_NAME.fullmatch(path.name) and path.name not in names:
                path.unlink()
        shutil.rmtree(self._unfinished)
        return manifest

    def _write(self, table: str, data: bytes) -> None:
        self._files[table].write(data)
        self._files[table].flush()
        self._sizes[table] += len(data)
        self._crcs[table] = zlib.crc32(data, self._crcs[table])

    def _ordinals(self, entry: Entry) -> dict[str, int]:
        if entry.problem:
            self._problems.append(entry.problem)
            return {"problem": len(self._problems) - 1, "schema": -1, "dialect": -1}
        return {
            "problem": -1,
            "schema": self._schemas.setdefault(entry.schema, len(self._schemas)),
            "dialect": self._dialects.setdefault(entry.dialect, len(self._dialects)),
        }

    def _take(self, row: dict[str, int]) -> None:
        for name, value in row.items():
            self._rows[name][self.n_done] = value
        self.n_done += 1

    def _begin(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir()
        for table, columns in _TABLES.items():
            schema = schema_message(columns)
            (self._unfinished / table).write_bytes(schema)
            self._sizes[table], self._crcs[table] = len(schema), zlib.crc32(schema)
        (self._unfinished / _JOURNAL).write_text(f"{json.dumps(self._parameters)}\n")

    def _resume(self) -> bool:
        """Takes over what an interrupted run left, up to the first shard that changed; whether there was anything."""
        path = self._unfinished / _JOURNAL
        if not path.exists():
            return False
        with path.open("rb") as journal:
            line = journal.readline()
            end = len(line)
            if _parsed(line) != self._parameters:
                return False
            state: dict[str, Any] = {}
            for line in journal:
                entry = _parsed(line)
                if entry is None or self.n_done == len(self._tasks) or not self._is_of_next_task(entry["row"]):
                    break
                schema = base64.b64decode(entry["schema"])
                if not schema and not entry["problem"]:
                    schema = list(self._schemas)[entry["row"]["schema"]]
                self._ordinals(Entry(row={}, dialect=entry["dialect"], schema=schema, problem=entry["problem"]))
                self._take(entry["row"])
                state, end = entry, end + len(line)
        tables = {self._unfinished / table: (state["sizes"][table], state["crc32"][table]) for table in _TABLES if state}
        if not self.n_done or not all(has_checksum(path, *facts, may_go_on=True) for path, facts in tables.items()):
            self.n_done, self._dialects, self._schemas, self._problems = 0, {}, {}, []
            for values in self._rows.values():
                values[:] = 0
            return False
        self._sizes, self._crcs = state["sizes"], state["crc32"]
        for table in _TABLES:
            os.truncate(self._unfinished / table, self._sizes[table])
        os.truncate(path, end)
        return True

    def _is_of_next_task(self, row: dict[str, int]) -> bool:
        task = self._tasks[self.n_done]
        origin = (row["origin_x"], row["origin_y"], row["origin_z"])
        return (row["scale"], origin, row["fingerprint"]) == (
            task.level,
            task.files.origin_voxel,
            task.files.fingerprint,
        )


def has_checksum(path: Path, size_bytes: int, crc32: int, *, may_go_on: bool = False) -> bool:
    """Whether a file has these first bytes, and no others unless it may."""
    if not path.exists() or (path.stat().st_size != size_bytes and not may_go_on):
        return False
    left, found = size_bytes, 0
    with path.open("rb") as file:
        while left and (part := file.read(min(left, _COPY_BYTES))):
            left, found = left - len(part), zlib.crc32(part, found)
    return left == 0 and found == crc32


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the journal, or None where it is torn."""
    try:
        document = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
