"""Keys, their values, and what asking for them costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exports import CountingReader, Dialect, MemoryReader, make_chunks, volume_info, write_shard
from sample import BOTH, CHUNKS, INFO, SHAPES, SHARDS, sample_files, shard_path

from zarr_dvid.hierarchy import Hierarchy, export_name

DOCUMENTS = ["zarr.json"] + [
    f"s{level}/{name}zarr.json" for level in SHAPES for name in ("", "labels/", "supervoxels/", "z/", "y/", "x/")
]
COORDINATES = [f"s{level}/{axis}/c/0" for level in SHAPES for axis in "zyx"]
CHUNK_KEYS = [f"s{level}/{values}/c/{z}/{y}/{x}" for level in SHAPES for values in BOTH for x, y, z in CHUNKS[level]]

# Keys of other forms than this hierarchy has; Zarr itself asks for the first few whenever it opens something.
FOREIGN_KEYS = [
    ".zgroup",
    ".zarray",
    ".zattrs",
    ".zmetadata",
    "s0/.zgroup",
    "s0/labels/.zarray",
    "",
    "/",
    "//",
    ".",
    "foo",
    "foo/zarr.json",
    "s0",
    "s0/",
    "/s0/zarr.json",
    "s0//zarr.json",
    "s0/zarr.json/",
    "S0/zarr.json",
    "s/zarr.json",
    "s-1/zarr.json",
    "s00/zarr.json",
    "s01/zarr.json",
    "s100/zarr.json",
    "s\N{ARABIC-INDIC DIGIT ZERO}/zarr.json",
    "s1\N{ARABIC-INDIC DIGIT THREE}/zarr.json",
    "s0/zarr.json\n",
    "s0/foo/c/0/0/0",
    "s0/labels",
    "s0/labels/c",
    "s0/labels/c/",
    "s0/labels/c/0/0",
    "s0/labels/c/0/0/0/0",
    "s0/labels/c/0/0/",
    "s0/labels/c/0/0/0/",
    "s0/labels/c/0/0/0\n",
    "s0/labels/c//0/0/0",
    "s0/labels/c/0/0/00",
    "s0/labels/c/01/0/0",
    "s0/labels/c/0/-1/0",
    "s0/labels/c/+1/0/0",
    "s0/labels/c/0/0/0.0",
    "s0/labels/c/0/0/1e1",
    "s0/labels/c/ 0/0/0",
    "s0/labels/c/0/0/\N{SUPERSCRIPT TWO}",
    "s0/labels/c/\N{ARABIC-INDIC DIGIT THREE}/0/0",
    "s0/labels/c/0/0/1\N{ARABIC-INDIC DIGIT THREE}",
    "s0/labels/c/\N{FULLWIDTH DIGIT ZERO}/0/0",
    "s0/labels/c/0/0/99999999999999999999999999",
    "s0/labels/c/" + "9" * 5000 + "/0/0",
    "s0/labels/0.0.0",
    "s0/labels/c.0.0.0",
    "s0/\N{FULLWIDTH LATIN SMALL LETTER L}abels/c/0/0/0",
    "s0/s0/labels/c/0/0/0",
    "labels/c/0/0/0",
    "labels/zarr.json",
    "z/c/0",
    "c/0/0/0",
    "s0/c/0/0/0",
    "s0/z/c/1",
    "s0/z/c/0/0",
    "s0/z/c/0/0/0",
    "s0/z/c/00",
    "../x",
    "s0/../s0/zarr.json",
    "s0/labels/c/../c/0/0/0",
    "s0/0_0_0.arrow",
    "s0/0_0_0.csv",
    "info",
    "export.log",
    "zarr.json\0",
    "\N{SNOWMAN}",
    "\ud800",
]

Sample = tuple[Hierarchy, CountingReader]


def build(files: dict[str, bytes], **options: object) -> Sample:
    reader = CountingReader(MemoryReader(files))
    return Hierarchy(lambda: reader, name="sample", **options), reader


@pytest.fixture
def sample() -> Sample:
    return build(sample_files(), info=INFO)


def shards_read(reader: CountingReader) -> set[str]:
    return {path for method, path in reader.taken() if method == "read" and path.endswith(".arrow")}


def test_the_keys_are_these(sample: Sample) -> None:
    hierarchy, _ = sample
    keys = list(hierarchy.keys())
    assert sorted(keys) == sorted(DOCUMENTS + COORDINATES + CHUNK_KEYS)
    assert all(hierarchy.exists(key) and hierarchy.get(key) is not None for key in keys)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "z",
        "s",
        "s0",
        "s0/",
        "s1/",
        "s0/l",
        "s0/labels/",
        "s0/labels/c",
        "s0/labels/c/",
        "s0/labels/c/1",
        "s0/labels/c/1/",
        "s0/labels/c/1/1/2",
        "s0/z/",
        "s0/supervoxels/zarr.json",
        "foo",
        "s0/labels/c/9",
        "s0/labels/d",
        "s2",
    ],
)
def test_a_prefix_gives_the_keys_that_start_with_it(sample: Sample, prefix: str) -> None:
    hierarchy, _ = sample
    expected = [key for key in DOCUMENTS + COORDINATES + CHUNK_KEYS if key.startswith(prefix)]
    assert sorted(hierarchy.keys(prefix)) == sorted(expected)


def test_children_are_the_next_parts_of_the_keys(sample: Sample) -> None:
    hierarchy, _ = sample
    keys = DOCUMENTS + COORDINATES + CHUNK_KEYS
    paths = {"/".join(key.split("/")[:n]) for key in keys for n in range(key.count("/") + 1)}
    assert {"", "s0", "s0/labels", "s0/labels/c", "s0/labels/c/1", "s0/labels/c/1/1"} < paths
    for path in paths:
        prefix = f"{path}/" if path else ""
        expected = {key.removeprefix(prefix).split("/")[0] for key in keys if key.startswith(prefix)}
        found = hierarchy.children(path)
        assert found is not None, path
        assert sorted(found) == sorted(expected)
        assert hierarchy.children(f"{path}/") == found
    assert all(hierarchy.children(key) is None for key in keys)


@pytest.mark.parametrize(
    "path", ["foo", "s2", "s0/foo", "labels", "c", "s0/c", "s0/labels/d", "s0/labels/c/7", "s0/labels/c/x", "s0/z/c/1"]
)
def test_what_is_not_there_has_no_children(sample: Sample, path: str) -> None:
    assert sample[0].children(path) is None


@pytest.mark.parametrize("key", FOREIGN_KEYS, ids=lambda key: ascii(key[:40]))
def test_keys_of_no_known_form_are_absent_and_cost_nothing(key: str) -> None:
    hierarchy, reader = build({})  # where anything that is read raises
    assert hierarchy.get(key) is None
    assert not hierarchy.exists(key)
    assert hierarchy.nbytes(key) is None
    assert reader.taken() == []


@pytest.mark.parametrize(
    "key",
    [
        "s2/zarr.json",
        "s99/labels/c/0/0/0",
        "s0/labels/c/3/0/0",
        "s0/labels/c/0/3/0",
        "s0/labels/c/0/0/4",
        "s1/supervoxels/c/0/0/2",
        "s0/labels/c/99999999/0/0",
    ],
)
def test_keys_outside_the_volume_cost_one_look_at_the_export(sample: Sample, key: str) -> None:
    hierarchy, reader = sample
    hierarchy.get("zarr.json")
    reader.taken()
    assert hierarchy.get(key) is None
    assert not hierarchy.exists(key)
    assert reader.taken() == []


def test_documents_and_coordinates_cost_a_listing_a_scale_and_no_shard(sample: Sample) -> None:
    hierarchy, reader = sample
    for key in DOCUMENTS + COORDINATES:
        hierarchy.get(key)
    assert sorted(reader.taken()) == [("list", ""), ("list", "s0"), ("list", "s1")]
    for key in DOCUMENTS + COORDINATES:
        hierarchy.get(key)
        hierarchy.nbytes(key)
    list(hierarchy.keys("s0/z"))
    hierarchy.children("")
    hierarchy.children("s0/labels")
    assert reader.taken() == []


def test_a_chunk_costs_its_own_shard_and_one_range(sample: Sample) -> None:
    hierarchy, reader = sample
    for x, y, z in CHUNKS[0]:
        assert hierarchy.get(f"s0/labels/c/{z}/{y}/{x}") is not None
        assert shards_read(reader) == {shard_path(0, (x, y, z))}
    for x, y, z in CHUNKS[0]:
        payload = hierarchy.get(f"s0/supervoxels/c/{z}/{y}/{x}")
        [(method, path, [(_, size)])] = reader.calls
        assert (method, path) == ("read", shard_path(0, (x, y, z)))
        assert size - len(payload or b"") in (0, 688)  # the first record's range holds the schema
        reader.taken()


def test_whether_a_chunk_exists_and_how_long_it_is_cost_no_record(sample: Sample) -> None:
    hierarchy, reader = sample
    x, y, z = SHARDS[0, (0, 0, 0)][2]
    key = f"s0/labels/c/{z}/{y}/{x}"
    expected = hierarchy.get(key)
    assert expected is not None
    reader.taken()
    assert hierarchy.exists(key)
    assert hierarchy.nbytes(key) == len(expected)
    assert reader.taken() == []


def test_an_absent_chunk_costs_no_record(sample: Sample) -> None:
    hierarchy, reader = sample
    assert hierarchy.get("s0/labels/c/0/1/0") is None
    reader.taken()
    assert hierarchy.get("s0/labels/c/2/2/0") is None
    assert not hierarchy.exists("s0/labels/c/2/2/0")
    assert reader.taken() == []


def test_both_views_of_a_chunk_are_the_same_bytes(sample: Sample) -> None:
    hierarchy, _ = sample
    for x, y, z in CHUNKS[0]:
        assert hierarchy.get(f"s0/labels/c/{z}/{y}/{x}") == hierarchy.get(f"s0/supervoxels/c/{z}/{y}/{x}")


def test_chunk_keys_cost_each_index_once(sample: Sample) -> None:
    hierarchy, reader = sample
    keys = hierarchy.keys("s0/labels/c/")
    assert reader.taken() == []
    found = list(keys)
    assert sorted(found) == sorted(key for key in CHUNK_KEYS if key.startswith("s0/labels/c/"))
    indexes = [path for _, path in reader.taken() if path.endswith(".csv")]
    assert sorted(indexes) == sorted({shard_path(0, xyz).replace(".arrow", ".csv") for xyz in CHUNKS[0]})
    assert len(list(hierarchy.keys("s0"))) == len(
        [key for key in DOCUMENTS + COORDINATES + CHUNK_KEYS if key.startswith("s0")]
    )
    assert reader.taken() == []


@pytest.mark.parametrize("key", DOCUMENTS + COORDINATES + CHUNK_KEYS[:3])
def test_lengths_are_those_of_the_values(sample: Sample, key: str) -> None:
    assert sample[0].nbytes(key) == len(sample[0].get(key) or b"")


def test_lengths_of_records_of_large_batches_are_those_of_the_values() -> None:
    hierarchy, _ = build(sample_files(Dialect(rows_a_batch=100)), info=INFO)
    for key in CHUNK_KEYS:
        assert hierarchy.nbytes(key) == len(hierarchy.get(key) or b"")


def test_coordinates_are_float64_little_endian(sample: Sample) -> None:
    data = sample[0].get("s1/x/c/0") or b""
    np.testing.assert_array_equal(np.frombuffer(data, "<f8"), 4 + 16 * np.arange(100))


def test_chunks_past_the_end_of_the_volume_have_no_keys() -> None:
    shard = write_shard(make_chunks((0, 0, 0), (1, 0, 0), (0, 1, 0)))
    hierarchy, _ = build(shard.files(), info=volume_info((64, 128, 64)))
    with pytest.warns(UserWarning, match="1 chunks lie past the end of the volume"):
        hierarchy.get("s0/labels/c/0/0/0")
    chunks = hierarchy.keys("s0/labels/c")
    assert sorted(chunks) == ["s0/labels/c/0/0/0", "s0/labels/c/0/1/0"]
    assert hierarchy.get("s0/labels/c/0/0/1") is None
    assert hierarchy.children("s0/labels/c/0/0") == ["0"]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/data/mcns", "mcns"),
        ("/data/mcns/", "mcns"),
        ("file:///data/mcns", "mcns"),
        ("s3://bucket/mcns?versionId=3", "mcns"),
        ("simplecache::s3://bucket/mcns", "mcns"),
        ("mcns", "mcns"),
        ("/", "export"),
    ],
)
def test_the_name_is_the_last_part_of_the_path(url: str, name: str) -> None:
    assert export_name(url) == name


def test_a_directory_is_named_as_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mcns").mkdir()
    monkeypatch.chdir(tmp_path / "mcns")
    assert export_name(".") != "."


def count_opened(files: dict[str, bytes]) -> tuple[Hierarchy, Callable[[], int]]:
    opened: list[MemoryReader] = []

    def open_reader() -> MemoryReader:
        opened.append(MemoryReader(files))
        return opened[-1]

    return Hierarchy(open_reader, name="sample", info=INFO), lambda: len(opened)


def test_the_reader_is_opened_once_when_something_is_first_read() -> None:
    hierarchy, n_opened = count_opened(sample_files())
    assert n_opened() == 0
    hierarchy.get("foo")
    assert n_opened() == 0
    hierarchy.get("zarr.json")
    hierarchy.get("s0/labels/c/0/0/0")
    assert n_opened() == 1
