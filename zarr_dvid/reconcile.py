"""Checks a shard's index rows against the shard: pure arithmetic on what was read of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zarr_dvid.errors import ShardIndexError
from zarr_dvid.shard_index import find_gap
from zarr_dvid.sidecar import IndexRows
from zarr_dvid.walk import Framing, Walk

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_TWICE = (
    "The shard was exported twice, written by several writers at once, or its index is cut;"
    " export it again into an empty directory, or run 'zarr-dvid index', which finds all records of such a file if they"
    " are whole"
)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where records are: int64 arrays of shape (n,), one element for each."""

    offset_bytes: Ints
    size_bytes: Ints
    row: Ints

    @property
    def end(self) -> int:
        """The byte behind the last record; 0 if there is none."""
        return int((self.offset_bytes + self.size_bytes).max()) if len(self.offset_bytes) else 0


def places_by_offset(rows: IndexRows, framing: Framing) -> Places:
    """Places that an index with offsets gives, with the schema message left out.

    DVID's writer emits the schema with the first batch, so that its first row's range starts at 0 and holds the schema
    too; indexes made by scripts start behind it. Both are taken, whatever their `# schema_size` says.

    Raises:
        ShardIndexError: The messages leave a gap, overlap, or a record is named twice.
    """
    assert rows.offset_bytes is not None
    assert rows.size_bytes is not None
    with_schema = rows.offset_bytes == framing.schema_at
    schema_bytes = framing.records_at - framing.schema_at
    places = Places(
        rows.offset_bytes + np.where(with_schema, schema_bytes, 0),
        rows.size_bytes - np.where(with_schema, schema_bytes, 0),
        rows.row if rows.row is not None else np.zeros(len(rows), np.int64),
    )
    if (places.size_bytes <= 0).any():
        raise ShardIndexError(
            "the index has a record of no length",
            path=rows.path,
            offset_bytes=int(places.offset_bytes[places.size_bytes <= 0][0]),
            expected="more than 0 bytes",
            found=int(places.size_bytes.min()),
        )
    if _follow_one_another(places, framing.records_at):
        return places
    gap = find_gap(places.offset_bytes, places.size_bytes, start=framing.records_at)
    if gap is not None:
        raise ShardIndexError(
            "the index's records do not follow one another in the shard",
            path=rows.path,
            offset_bytes=gap[0],
            expected=f"a record at byte {gap[0]}",
            found=f"one at byte {gap[1]}",
            advice=_TWICE,
        )
    if len(np.unique(np.stack([places.offset_bytes, places.row]), axis=1).T) != len(rows):
        raise ShardIndexError("the index names a record twice", path=rows.path, expected="each once", found="a repeat")
    return places


def _follow_one_another(places: Places, start: int) -> bool:
    """Whether each place is a message that starts where the one before ends, as DVID writes its indexes."""
    starts, ends = places.offset_bytes, places.offset_bytes + places.size_bytes
    return not len(starts) or (starts[0] == start and bool((starts[1:] == ends[:-1]).all()) and not places.row.any())


def wrong_end(rows: IndexRows, end: int, framing: Framing) -> ShardIndexError:
    """The error for an index whose records end before, or behind, those of the shard."""
    return ShardIndexError(
        "the index's records do not fill the shard",
        path=rows.path,
        offset_bytes=end,
        expected=f"the last record to end at byte {framing.records_end - 8}, before an end mark",
        found=f"byte {end}",
        advice=_TWICE,
    )


def records_by_place(places: Places, walk: Walk, path: str) -> Ints:
    """The ordinal of the record at each place.

    Raises:
        ShardIndexError: The places are not just those of the shard's records.
    """
    order = np.lexsort((places.row, places.offset_bytes))
    same = len(order) == len(walk.xyz) and bool(
        (places.offset_bytes[order] == walk.offset_bytes).all() and (places.row[order] == walk.row).all()
    )
    if not same:
        raise ShardIndexError(
            "the index has other records than the shard",
            path=path,
            expected=f"{len(walk.xyz)} records",
            found=len(order),
        )
    ordinals = np.empty(len(order), np.int64)
    ordinals[order] = np.arange(len(order))
    return ordinals


def check_against_records(rows: IndexRows, record: Ints, walk: Walk) -> None:
    """Checks that each entry points to its own record, and that no chunk of the shard is left out.

    Args:
        rows: An index's entries.
        record: The ordinal of the record that each points to.
        walk: The shard's records.

    Raises:
        ShardIndexError: One does not, or one is.
    """
    n_records = len(walk.xyz)
    if len(record) and record.max() >= n_records:
        raise ShardIndexError(
            "the index names a record that the shard does not have",
            path=rows.path,
            expected=f"records 0 to {n_records - 1}",
            found=int(record.max()),
        )
    if len(np.unique(record)) != len(record):
        raise ShardIndexError("the index names a record twice", path=rows.path, expected="each once", found="a repeat")
    wrong = np.flatnonzero((walk.xyz[record] != rows.xyz).any(axis=1))
    if len(wrong):
        i = int(wrong[0])
        raise ShardIndexError(
            f"entry {i} of the index points to the record of another chunk",
            path=rows.path,
            offset_bytes=int(walk.offset_bytes[record[i]]),
            expected=tuple(rows.xyz[i].tolist()),
            found=tuple(walk.xyz[record[i]].tolist()),
        )
    # A JSON index can name a chunk only once: where several records claim it, DVID of September 2025 let the last one
    # win. All of them are indexed here, and compared when the chunk is read.
    left_out = np.setdiff1d(_as_rows(walk.xyz), _as_rows(rows.xyz))
    if len(left_out):
        raise ShardIndexError(
            "the index lacks chunks that the shard has",
            path=rows.path,
            expected=f"an entry for {tuple(left_out[0].tolist())}",
            found=f"{len(rows)} entries for {n_records} records",
        )


def check_same_chunks(one: IndexRows, other: IndexRows) -> None:
    """Checks that two index files of one shard name the same chunks.

    Raises:
        ShardIndexError: They do not.
    """
    if len(one) != len(other) or (np.sort(_as_rows(one.xyz)) != np.sort(_as_rows(other.xyz))).any():
        raise ShardIndexError(
            "two indexes of one shard contradict each other",
            path=other.path,
            expected=f"the {len(one)} chunks of {one.path}",
            found=f"{len(other)} chunks, not the same",
        )


def _as_rows(xyz: Ints) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Coordinates, shape (n, 3), as n values that sort and compare as wholes."""
    return np.ascontiguousarray(xyz).view("i8,i8,i8").ravel()
