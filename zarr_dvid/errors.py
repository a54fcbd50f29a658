"""What can be wrong with an export, as exceptions that carry the facts beside the message.

A message has four parts: the file, the chunk, what was expected against what was found, and what to do next. All of it is
kept through pickling, so that an error raised in a worker process arrives whole.
"""

from __future__ import annotations

from typing import Any, Self

_MAX_FACT = 400  # characters


class ZarrDvidError(Exception):
    """Base of all errors of zarr-dvid.

    Attributes:
        problem: What is wrong, in words.
        path: File that it was found in, or None where only bytes were at hand.
        chunk_xyz: Chunk that was asked for, in chunk units of its scale, or None.
        offset_bytes: Where in the file, message or block the problem is, or None.
        expected: What should have been there, or None.
        found: What was there, or None.
        advice: What to do next, or None.
    """

    default_advice: str | None = None

    def __init__(
        self,
        problem: str,
        *,
        path: str | None = None,
        chunk_xyz: tuple[int, int, int] | None = None,
        offset_bytes: int | None = None,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = path
        self.chunk_xyz = chunk_xyz
        self.offset_bytes = offset_bytes
        self.expected = expected
        self.found = found
        self.advice = advice if advice is not None else self.default_advice
        super().__init__(self._message())

    @property
    def facts(self) -> dict[str, Any]:
        """All that is known, by the names that it was given under; `problem` is not among them."""
        names = ("path", "chunk_xyz", "offset_bytes", "expected", "found", "advice")
        return {name: getattr(self, name) for name in names}

    def _message(self) -> str:
        where = [part for part in (self.path, self.chunk_xyz and f"chunk {self.chunk_xyz} (x, y, z)") if part]
        text = ", ".join(where) + ": " if where else ""
        text += self.problem
        if self.offset_bytes is not None:
            text += f" (at byte {self.offset_bytes})"
        facts = [(word, fact) for word, fact in (("expected", self.expected), ("found", self.found)) if fact is not None]
        if facts:
            text += ": " + ", ".join(f"{word} {_printable(fact)}" for word, fact in facts)
        return text + (f". {self.advice}" if self.advice else "")

    def located(self, *, path: str | None = None, chunk_xyz: tuple[int, int, int] | None = None) -> Self:
        """Gives the same error with the file and chunk filled in where they were not known yet."""
        facts = self.facts
        facts["path"] = self.path or path
        facts["chunk_xyz"] = self.chunk_xyz or chunk_xyz
        return type(self)(self.problem, **facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.problem, self.facts)


def _printable(fact: object) -> str:
    """A fact on one line: what was found in a file may be any bytes, and long."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(fact))
    return text if len(text) <= _MAX_FACT else text[:_MAX_FACT] + "…"


def _rebuild(cls: type[ZarrDvidError], problem: str, facts: dict[str, Any]) -> ZarrDvidError:
    return cls(problem, **facts)


class BlockError(ZarrDvidError, ValueError):
    """A DVID block, or the zstd frame around it, breaks a rule of its format.

    Attributes:
        field: Name of the field that breaks it.
    """

    default_advice = "The block was stored or exported broken; export it again from DVID, or mask it there"

    def __init__(self, problem: str, *, field: str = "block", **facts: Any) -> None:
        self.field = field
        super().__init__(problem, **facts)

    @property
    def facts(self) -> dict[str, Any]:
        """As of all errors, and the field."""
        return {"field": self.field, **super().facts}


class RecordError(ZarrDvidError, ValueError):
    """A record of a shard is torn, is not the one its index entry promises, or is no DVID record at all."""

    default_advice = "The shard or its index is damaged; export it again"


class AmbiguousChunkError(RecordError):
    """Several records claim the same chunk and differ, so that nobody can tell which is right."""

    default_advice = "Exports of September 2025 mixed two scales in one file; export it again with a later DVID"


class ShardError(ZarrDvidError, OSError):
    """A shard's file is missing, empty, torn, or holds something that is not an Arrow stream of DVID records."""

    default_advice = "Export it again, or restore the file"


class MissingFileError(ShardError):
    """A file of the export that should be there is not. Never a FileNotFoundError, which Zarr takes for a fill value."""

    default_advice = "Restore the file"


class ShardIndexError(ZarrDvidError, OSError):
    """A shard's index is missing, empty, cut, or contradicts the shard or itself."""

    default_advice = "Export the shard again, or restore its index file"


class ExportError(ZarrDvidError, OSError):
    """The export as a whole can't be read: nothing there, or its parts contradict each other."""


class ReadOnlyError(ZarrDvidError, PermissionError, ValueError):
    """Something tried to write to an export."""

    default_advice = "Copy what you need into a writable Zarr store, or write an export with zarr_dvid.write_export"


class ExportWarning(UserWarning):
    """An export can be read, but something about it should be known."""
