"""Exports that are being written: what was begun, what is done, and how to go on after an interruption.

While an export is written its folder holds a file ``.writing.jsonl``. The first line tells the parameters that define
the output; each further line names a shard that was looked at and has no block, since such a shard leaves no files. The
file is made before anything else, and removed after everything else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from zarr_dvid.errors import ExportError

STATE_NAME = ".writing.jsonl"
_PART = ".part"  # with the dot in front, no reader takes such a file for a shard or an index


@dataclass(frozen=True, slots=True)
class UnfinishedExport:
    """An export that is being written into `folder`. One process at a time may do so.

    Attributes:
        folder: The export's folder.
        empty: Names of shards that are known to have no block.
    """

    folder: Path
    empty: set[str]

    @classmethod
    def begin(cls, folder: Path, parameters: dict[str, Any]) -> Self:
        """Begins an export, or goes on with one that was begun with the same parameters.

        Args:
            folder: The export's folder; made where it does not exist.
            parameters: All that defines the output, as JSON values.

        Raises:
            ExportError: The folder is none, or holds a finished export, or one begun with other parameters.
        """
        if folder.exists() and not folder.is_dir():
            raise ExportError("an export is a folder, and this is a file", path=str(folder), advice="Choose a folder")
        folder.mkdir(parents=True, exist_ok=True)
        state = folder / STATE_NAME
        if state.exists():
            # Only whole lines count, and those to come must not join a torn one.
            content = state.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            first, *names = whole.splitlines() or [b""]
            _check_parameters(state, first, parameters)
            os.truncate(state, len(whole))
            for part in [*folder.glob(f".*{_PART}"), *folder.glob(f"s*/.*{_PART}")]:
                part.unlink()
            return cls(folder, {name.decode() for name in names})
        found = sorted(path.name for path in folder.iterdir() if _belongs_to_export(path.name))
        if found:
            raise ExportError(
                "this folder holds an export already, and nothing tells how it was made",
                path=str(folder),
                expected="a folder without one",
                found=", ".join(found),
                advice="Choose another folder, or remove that export first",
            )
        replace_file(state, f"{json.dumps(parameters)}\n".encode())
        return cls(folder, set())

    def is_done(self, name: str) -> bool:
        """Whether the shard `name` was written, or has nothing to write."""
        return name in self.empty or all((self.folder / f"{name}{suffix}").exists() for suffix in (".arrow", ".csv"))

    def note_empty(self, name: str) -> None:
        """Remembers that the shard `name` has no block."""
        self.empty.add(name)
        with (self.folder / STATE_NAME).open("ab") as state:
            state.write(f"{name}\n".encode())

    def finish(self) -> None:
        """Declares the export whole."""
        (self.folder / STATE_NAME).unlink()


def _belongs_to_export(name: str) -> bool:
    return name in ("info", "export.log") or (name[:1] == "s" and name[1:].isdecimal())


def _check_parameters(state: Path, line: bytes, parameters: dict[str, Any]) -> None:
    try:
        begun = json.loads(line)
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise ExportError(
            "the note on what is being written here can't be read",
            path=str(state),
            advice="Remove the whole folder and write the export again",
        )
    differing = [name for name in {**parameters, **begun} if parameters.get(name) != begun.get(name)]
    if differing:
        raise ExportError(
            "the export that was begun here was begun with other parameters",
            path=str(state.parent),
            expected=", ".join(f"{name}={begun.get(name)}" for name in differing),
            found=", ".join(f"{name}={parameters.get(name)}" for name in differing),
            advice="Give the same ones to go on with it, or write to another folder",
        )


def part_path(path: Path) -> Path:
    """Where to write what is to become the file `path`."""
    return path.with_name(f".{path.name}{_PART}")


def replace_file(path: Path, content: bytes) -> None:
    """Makes a file, or replaces it, so that it is never seen in part."""
    part = part_path(path)
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the folder's entries are on the disk: a file's own fsync does not include its name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
