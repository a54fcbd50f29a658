"""Index files beside a shard: rows of chunk coordinates and places, as they stand there.

Every dialect that DVID ever wrote is known by its own header (docs/format.md has the list). What is parsed here is
checked for form; whether it fits the shard is `zarr_dvid.shard`'s business.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from zarr_dvid.errors import ShardIndexError
from zarr_dvid.record import MAX_ROWS

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_CHUNK_KEY = re.compile(r"(-?[0-9]{1,10})_(-?[0-9]{1,10})_(-?[0-9]{1,10})")
_PLACES = ("rec", "offset", "size", "batch_idx")
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class IndexRows:
    """An index file's rows. Either `record`, or `offset_bytes` and `size_bytes`, is there.

    Attributes:
        path: The file, relative to the export's root.
        dialect: "csv" with the names of its columns, "json", or "footer".
        xyz: Coordinates as written, int64, shape (n, 3).
        record: Ordinal of each row's record in the shard, or None.
        offset_bytes: Start of each row's message in the shard, or None.
        size_bytes: Length of each row's message, or None.
        row: Row inside the message, or None where the file does not tell.
    """

    path: str
    dialect: str
    xyz: Ints
    record: Ints | None = None
    offset_bytes: Ints | None = None
    size_bytes: Ints | None = None
    row: Ints | None = None

    def __len__(self) -> int:
        return len(self.xyz)


def parse_csv(data: bytes, path: str) -> IndexRows:
    """Parses a CSV index: comment lines, a header of names, rows of integers.

    A header may have more names than its rows have values (DVID of 2025-09-07 wrote ``x,y,z,rec,morton`` above rows of
    four); names that are not known are ignored.

    Raises:
        ShardIndexError: The file is empty, cut, or not such an index.
    """
    if not data:
        raise ShardIndexError(
            "the index is empty", path=path, expected="a CSV header and rows", found="0 bytes",
            advice="The export was killed before it wrote this index; export the shard again",
        )  # fmt: skip
    if not data.endswith(b"\n"):
        raise ShardIndexError(
            "the index is cut inside its last line", path=path, expected="a line end", found=repr(data[-20:])
        )
    start = 0
    while data.startswith(b"#", start):
        start = data.index(b"\n", start) + 1
    header_end = data.find(b"\n", start)
    if header_end < 0:
        raise ShardIndexError("the index has no header", path=path, expected="x,y,z,…", found="no line")
    names = data[start:header_end].decode("ascii", "replace").strip().split(",")
    body = data[header_end + 1 :]
    n_values = body[: body.index(b"\n")].count(b",") + 1 if body else len(names)
    if n_values > len(names):
        raise ShardIndexError(
            "the index has more values in a row than names", path=path, expected=len(names), found=n_values
        )
    names = names[:n_values]
    known = [name for name in names if name in ("x", "y", "z", *_PLACES)]
    if len(set(known)) != len(known) or not {"x", "y", "z"} <= set(known):
        raise ShardIndexError(
            "the index lacks coordinates", path=path, expected="columns x, y, z, each once", found=",".join(names)
        )
    if "rec" not in known and not {"offset", "size"} <= set(known):
        raise ShardIndexError(
            "the index lacks places", path=path, expected="a column rec, or offset and size", found=",".join(names)
        )
    columns = _integers(body, names, known, path)
    places = [columns.get(name) for name in _PLACES]
    if "offset" not in known or "size" not in known:
        places[1:3] = None, None
    for name, values in zip(_PLACES, places, strict=True):
        limit = MAX_ROWS if name == "batch_idx" else _LARGEST
        if values is not None and values.size and not (values.min() >= 0 and values.max() < limit):
            worst = int(values.min() if values.min() < 0 else values.max())
            raise ShardIndexError(
                f"the index has an impossible {name}", path=path, expected=f"0 to {limit - 1}", found=worst
            )
    return IndexRows(path, "csv " + ",".join(names), np.stack([columns[d] for d in "xyz"], axis=1), *places)


def _integers(body: bytes, names: list[str], known: list[str], path: str) -> dict[str, Ints]:
    if not body:
        return {name: np.empty(0, np.int64) for name in known}
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(body),
            read_options=pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=max(len(body), 1 << 16)),
            parse_options=pa.csv.ParseOptions(quote_char=False, escape_char=False, ignore_empty_lines=False),
            convert_options=pa.csv.ConvertOptions(
                include_columns=known, column_types=dict.fromkeys(known, pa.int64()), null_values=[], check_utf8=False
            ),
        )
    except pa.ArrowException as error:
        raise ShardIndexError("the index has a line that is no row of integers", path=path, found=str(error)) from None
    return {name: _as_numpy(table.column(name)) for name in known}


def _as_numpy(column: pa.ChunkedArray) -> Ints:
    """A column of int64 without nulls. pyarrow's own `to_numpy` imports pandas first, which takes most of a second."""
    parts = [np.frombuffer(part.buffers()[1], np.int64, len(part), 8 * part.offset) for part in column.chunks]
    return np.concatenate(parts)


def parse_json(data: bytes, path: str, *, dialect: str = "json") -> IndexRows:
    """Parses a JSON index, ``{"x_y_z": record}``, as a sidecar file or a footer holds it.

    Raises:
        ShardIndexError: The document is empty, cut, or not such an index.
    """
    advice = "Export the shard again, or restore its index"
    if not data:
        raise ShardIndexError("the index is empty", path=path, expected="a JSON object", found="0 bytes", advice=advice)
    try:
        pairs: Any = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ShardIndexError(
            "the index is no JSON document", path=path, found=str(error) or type(error).__name__
        ) from None
    if not isinstance(pairs, _Pairs):
        raise ShardIndexError(
            "the index is no JSON object", path=path, expected='{"x_y_z": record}', found=type(pairs).__name__
        )
    xyz = np.empty((len(pairs), 3), np.int64)
    record = np.empty(len(pairs), np.int64)
    for i, (key, value) in enumerate(pairs):
        match = _CHUNK_KEY.fullmatch(key)
        if match is None or type(value) is not int or not 0 <= value < _LARGEST:
            raise ShardIndexError(
                "the index has an entry of another form",
                path=path,
                expected='"x_y_z": record',
                found=f"{key[:50]!r}: {value if isinstance(value, int | float) else type(value).__name__}",
            )
        xyz[i] = [int(group) for group in match.groups()]
        record[i] = value
    return IndexRows(path, dialect, xyz, record)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its repeated keys."""
