"""Errors carry their facts beside the message, through pickling, and up through Zarr's pipeline and fsspec."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
import zstandard
from conftest import read_shard_rows
from naive import naive_decode

import zarr_dvid
from zarr_dvid import errors
from zarr_dvid.errors import (
    AmbiguousChunkError,
    BlockError,
    ExportError,
    ExportWarning,
    MissingFileError,
    ReadOnlyError,
    RecordError,
    ShardError,
    ShardIndexError,
    ZarrDvidError,
)

ERRORS = [
    ZarrDvidError,
    BlockError,
    RecordError,
    AmbiguousChunkError,
    ShardError,
    MissingFileError,
    ShardIndexError,
    ExportError,
    ReadOnlyError,
]
FACTS: dict[str, Any] = {
    "path": "s0/0_0_0.arrow",
    "chunk_xyz": (1, 0, 2),
    "offset_bytes": 4096,
    "expected": 7,
    "found": "8 of them",
    "advice": "Look again",
}


def facts_of(error: ZarrDvidError) -> dict[str, Any]:
    names = ["problem", *FACTS, "args"] + (["field"] if isinstance(error, BlockError) else [])
    return {name: getattr(error, name) for name in names}


def raise_in_worker(error: ZarrDvidError) -> None:
    raise error


def test_the_list_of_errors_is_all_of_them() -> None:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ZarrDvidError)]
    assert sorted(kind.__name__ for kind in found) == sorted(kind.__name__ for kind in ERRORS)
    assert all(getattr(zarr_dvid, kind.__name__) is kind for kind in ERRORS)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (BlockError, (ZarrDvidError, ValueError)),
        (RecordError, (ZarrDvidError, ValueError)),
        (AmbiguousChunkError, (RecordError,)),
        (ShardError, (ZarrDvidError, OSError)),
        (MissingFileError, (ShardError,)),
        (ShardIndexError, (ZarrDvidError, OSError)),
        (ExportError, (ZarrDvidError, OSError)),
        (ReadOnlyError, (ZarrDvidError, PermissionError, ValueError)),
        (ExportWarning, (UserWarning,)),
    ],
)
def test_errors_are_also_what_callers_catch(kind: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert all(issubclass(kind, base) for base in bases)


@pytest.mark.parametrize("kind", [ShardError, MissingFileError, ShardIndexError, ExportError])
def test_nothing_broken_is_a_missing_key(kind: type[Exception]) -> None:
    # Zarr's fsspec store and fsspec's mapping read these as "there is no such chunk", and so as 0.
    assert not issubclass(kind, FileNotFoundError | IsADirectoryError | NotADirectoryError | KeyError)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_every_attribute(kind: type[ZarrDvidError], is_full: bool, protocol: int) -> None:
    facts = dict(FACTS) if is_full else {}
    if is_full and issubclass(kind, BlockError):
        facts["field"] = "label table"
    error = kind("the thing is broken", **facts)
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert facts_of(twin) == facts_of(error)
        assert str(twin) == str(error)
        assert all(facts_of(twin)[name] == value for name, value in facts.items())


def test_an_error_arrives_whole_from_a_worker_process() -> None:
    error = BlockError("the values are cut", field="values", **FACTS)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(BlockError) as caught,
    ):
        pool.submit(raise_in_worker, error).result(timeout=60)
    assert facts_of(caught.value) == facts_of(error)


def test_a_message_has_four_parts() -> None:
    error = RecordError("the record is cut", **FACTS)
    assert str(error) == (
        "s0/0_0_0.arrow, chunk (1, 0, 2) (x, y, z): the record is cut (at byte 4096):"
        " expected 7, found 8 of them. Look again"
    )


def test_a_message_names_the_first_chunk_and_the_first_byte() -> None:
    message = str(RecordError("the record is cut", chunk_xyz=(0, 0, 0), offset_bytes=0))
    assert "chunk (0, 0, 0) (x, y, z)" in message
    assert "at byte 0" in message


@pytest.mark.parametrize(
    ("facts", "part"),
    [({"expected": "a file"}, "expected a file"), ({"found": "no such protocol"}, "found no such protocol")],
)
def test_a_message_leaves_out_what_is_not_known(facts: dict[str, Any], part: str) -> None:
    message = str(ExportError("the URL can't be opened", **facts))
    assert part in message
    assert "None" not in message


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in (ZarrDvidError, ExportError)])
def test_every_kind_has_advice_of_its_own(kind: type[ZarrDvidError]) -> None:
    error = kind("it is broken")
    assert error.advice
    assert str(error).endswith(error.advice)
    assert kind("it is broken", advice="Ask").advice == "Ask"


def test_locating_an_error_fills_in_what_is_missing_and_keeps_the_rest() -> None:
    error = BlockError("it is cut", field="values", offset_bytes=3)
    located = error.located(path="a.arrow", chunk_xyz=(0, 0, 0))
    assert (located.path, located.chunk_xyz, located.field, located.offset_bytes) == ("a.arrow", (0, 0, 0), "values", 3)
    again = located.located(path="b.arrow", chunk_xyz=(9, 9, 9))
    assert (again.path, again.chunk_xyz) == ("a.arrow", (0, 0, 0))


class TestOddBlocks:
    """Two of its five rows hold blocks that DVID exports unchecked: one cut after its label table, one of 32^3."""

    CUT, SMALL = (7, 0, 0), (11, 0, 0)
    SHARD = "s0/0_0_0.arrow"

    @pytest.fixture(params=["store", "filesystem", "mapper"])
    def open_group(self, request: pytest.FixtureRequest, shared_data: Path) -> Callable[[], zarr.Group]:
        path = shared_data / "exports" / "odd-blocks"
        match request.param:
            case "store":
                return lambda: zarr_dvid.open(path)
            case "filesystem":
                return lambda: zarr.open_group(f"dvid::file://{path}", mode="r")
            case _:
                return lambda: zarr.open_group(fsspec.get_mapper(f"dvid::file://{path}"), mode="r")

    @pytest.mark.parametrize("values", ["labels", "supervoxels"])
    @pytest.mark.parametrize(("chunk_xyz", "field"), [(CUT, "counts"), (SMALL, "gx, gy, gz")])
    @pytest.mark.parametrize("part", [slice(0, 64), slice(20, 23), 5], ids=["chunk", "window", "plane"])
    def test_an_error_in_zarrs_pipeline_names_the_file_and_the_chunk(
        self,
        open_group: Callable[[], zarr.Group],
        values: str,
        chunk_xyz: tuple[int, int, int],
        field: str,
        part: slice | int,
    ) -> None:
        array = open_group()[f"s0/{values}"]
        assert isinstance(array, zarr.Array)
        with pytest.raises(BlockError) as caught:
            array[part, :64, 64 * chunk_xyz[0] : 64 * chunk_xyz[0] + 64]
        error = caught.value
        assert (error.path, error.chunk_xyz, error.field) == (self.SHARD, chunk_xyz, field)
        message = str(error)
        assert message.startswith(f"{self.SHARD}, chunk {chunk_xyz} (x, y, z): ")
        assert f"expected {error.expected}, found {error.found}" in message
        assert message.endswith(str(error.advice))
        assert facts_of(pickle.loads(pickle.dumps(error))) == facts_of(error)

    @pytest.mark.parametrize("values", ["labels", "supervoxels"])
    def test_the_others_are_read(self, open_group: Callable[[], zarr.Group], shared_data: Path, values: str) -> None:
        rows = read_shard_rows(shared_data / "exports" / "odd-blocks" / self.SHARD)
        array = open_group()[f"s0/{values}"]
        assert isinstance(array, zarr.Array)
        good = [row for row in rows if row.chunk_xyz not in (self.CUT, self.SMALL)]
        assert len(good) == len(rows) - 2 == 3
        for row in good:
            plain = naive_decode(zstandard.decompress(row.block, max_output_size=1 << 22))
            table = dict(zip(row.supervoxels.tolist(), row.labels.tolist(), strict=True))
            expected = np.vectorize(table.get, otypes=[np.uint64])(plain) if values == "labels" else plain
            z, y, x = (slice(64 * c, 64 * c + 64) for c in row.chunk_xyz[::-1])
            np.testing.assert_array_equal(array[z, y, x], expected)

    def test_the_error_is_the_same_through_dask_and_xarray(self, shared_data: Path) -> None:
        data = xr.open_zarr(f"dvid::file://{shared_data / 'exports' / 'odd-blocks'}", group="s0", chunks={})
        with pytest.raises(BlockError) as caught:
            data.labels[:64, :64, 448:512].compute(scheduler="threads")
        assert (caught.value.path, caught.value.chunk_xyz) == (self.SHARD, self.CUT)
