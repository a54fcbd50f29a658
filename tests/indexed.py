"""Exports on the disk with compact indexes, for tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exports import XYZ, CountingReader, Dialect, make_chunks, write_shard

from zarr_dvid.errors import ExportWarning
from zarr_dvid.export import Export
from zarr_dvid.index_builder import IndexSummary, index_export
from zarr_dvid.reader import LocalReader
from zarr_dvid.record import END_OF_STREAM, record_message, schema_message

Files = Mapping[str, bytes]


def put(folder: Path, files: Files) -> Path:
    """Writes files by path."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def shards_of(chunks: Mapping[str, Sequence[XYZ]], dialect: Dialect | None = None) -> dict[str, bytes]:
    """Shards by name, with these chunks."""
    files: dict[str, bytes] = {}
    for name, some in chunks.items():
        files |= write_shard(make_chunks(*some), dialect or Dialect()).files(name)
    return files


def make_index(export: Path, index: Path, **options: Any) -> IndexSummary:
    """Indexes an export in this process."""
    return index_export(export, index, **{"jobs": 1, "progress": False, **options})


def open_indexed(export: Path, index: Path, **options: Any) -> tuple[Export, CountingReader, CountingReader]:
    """An export with an index, and what is read of each."""
    readers = CountingReader(LocalReader(export)), CountingReader(LocalReader(index))
    return Export(readers[0], index=readers[1], **options), *readers


def index_files(index: Path) -> dict[str, bytes]:
    """An index's files by name."""
    return {path.name: path.read_bytes() for path in index.iterdir()}


def all_xyz(export: Export, level: int = 0) -> set[XYZ]:
    """All chunks that a scale says it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)
        parts = list(export.scales[level].occupied())
    chunks = [(x, y, z) for part in parts for x, y, z in part.tolist()]
    assert len(chunks) == len(set(chunks))
    return set(chunks)


def box_around(chunks: Iterable[XYZ]) -> list[XYZ]:
    """All chunks of the box around some, and one more on each side."""
    table = np.array(list(chunks))
    low, high = np.maximum(table.min(axis=0) - 1, 0), table.max(axis=0) + 2
    return [(x, y, z) for x, y, z in (np.argwhere(np.ones(high - low)) + low).astype(int).tolist()]


def hollow_shard(folder: Path, name: str, chunks: Sequence[XYZ], *, seed: int = 0) -> None:
    """A shard of many chunks whose records are a hole in the file, but for the first one's head; its CSV is whole."""
    rng = np.random.default_rng(seed)
    schema = schema_message()
    first = record_message(chunks[0], labels=b"", supervoxels=b"", block=b"x" * 40, uncompressed_size=40)
    sizes = 8 * rng.integers(40, 8000, len(chunks))
    sizes[0] = len(first)
    ends = len(schema) + np.cumsum(sizes)
    rows = [f"{x},{y},{z},{end - size},{size},0\n" for (x, y, z), end, size in zip(chunks, ends, sizes, strict=True)]
    rows[0] = "{},{},{},0,{},0\n".format(*chunks[0], len(schema) + len(first))
    arrow = folder / f"{name}.arrow"
    arrow.parent.mkdir(parents=True, exist_ok=True)
    with arrow.open("wb") as file:
        file.write(schema + first)
        file.seek(int(ends[-1]))
        file.write(END_OF_STREAM)
    arrow.with_suffix(".csv").write_text("# schema_size=0\nx,y,z,offset,size,batch_idx\n" + "".join(rows))
