"""Volume descriptions, DVID's report, and the cubes that a sharding cuts a volume into."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import SHARED_DATA
from exports import XYZ, volume_info
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zarr_dvid.errors import ExportError
from zarr_dvid.volume import LoggedScale, Sharding, grid_of, parse_export_log, parse_info

# ---- cubes, against a brute-force reading of how DVID names files


def names_by_shard(grid: XYZ, sharding: tuple[int, int, int]) -> tuple[dict[int, set[XYZ]], int]:
    """Each shard id with the file names that its chunks ask for, and the names' unit D in voxels, as DVID does it."""
    preshift, minishard, shard_bits = sharding
    n_bits = [0 if side <= 1 else (side - 1).bit_length() for side in grid]

    def morton(chunk: XYZ) -> int:
        code = n = 0
        for i in range(max(n_bits)):
            for d in range(3):
                if i < n_bits[d]:
                    code |= (chunk[d] >> i & 1) << n
                    n += 1
        return code

    left = min(preshift + minishard, sum(n_bits))
    bits = [0, 0, 0]
    while left:
        for d in range(3):
            if left and bits[d] < n_bits[d]:
                bits[d] += 1
                left -= 1
    side = max(min(2**b, g) for b, g in zip(bits, grid, strict=True))
    names: dict[int, set[XYZ]] = {}
    for x, y, z in itertools.product(*map(range, grid)):
        shard = morton((x, y, z)) >> preshift >> minishard & (2**shard_bits - 1)
        names.setdefault(shard, set()).add((x // side * side, y // side * side, z // side * side))
    return names, 64 * side


side = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])


@settings(max_examples=400)
@given(
    st.tuples(side, side, side),
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0, 1, 2, 3, 5, 9, 12, 64])),
    st.sampled_from([0, 1, 63]),
)
@example((16, 16, 16), (3, 3, 12), 0)  # cubes
@example((4, 2, 2), (2, 0, 12), 0)  # cells of 2x2x1
@example((5, 4, 4), (9, 6, 12), 0)  # the grid ends a cell: names of 320 voxels
@example((8, 8, 8), (3, 0, 3), 0)  # distant cells share an id
def test_cubes_are_those_that_names_tell_apart(grid: XYZ, sharding: tuple[int, int, int], less: int) -> None:
    """A file's name tells what it holds if each shard asks for one name and no other shard does."""
    x, y, z = (64 * g - less for g in grid)
    assert grid_of((x, y, z)) == grid
    names, side_voxels = names_by_shard(grid, sharding)
    all_names = [name for some in names.values() for name in some]
    is_sound = len(all_names) == len(names) == len(set(all_names))
    found = Sharding(*sharding).cube_voxels((x, y, z))
    if len(names) == 1 and found is None:
        return  # a single shard with repeated ids is sound by chance; saying that it is not costs nothing
    assert found == (side_voxels if is_sound else None)


def test_the_cubes_of_the_male_cns(shared_data: Path) -> None:
    info = parse_info((shared_data / "mcns" / "mcns-ng-specs.json").read_bytes(), "spec")
    cubes = [sharding and sharding.cube_voxels(size) for sharding, size in zip(info.shardings, info.sizes_xyz, strict=True)]
    assert cubes[:2] == [2048, 2048]
    name = next((SHARED_DATA / "mcns/export/s1").glob("*.arrow")).stem
    assert all(int(part) % 2048 == 0 for part in name.split("_"))


# ---- volume descriptions


def test_a_volume_description() -> None:
    document = volume_info((1000, 70, 64), sharding=(9, 6, 3), n_scales=2)
    for form in (document, json.dumps(document).encode()):
        info = parse_info(form, "here")
        assert info.source == "here"
        assert info.sizes_xyz == ((1000, 70, 64), (500, 35, 32))
        assert info.voxel_size_xyz == (8.0, 8.0, 8.0)
        assert info.shardings == (Sharding(9, 6, 3), Sharding(9, 6, 3))
    assert parse_info(volume_info((1, 1, 1)), "x").shardings == (None,)


def test_a_description_may_lack_what_is_not_needed() -> None:
    info = parse_info({"scales": [{"size": [640, 512.0, 1]}]}, "x")
    assert info.sizes_xyz == ((640, 512, 1),)
    assert all(type(n) is int for n in info.sizes_xyz[0])
    assert info.voxel_size_xyz is None
    assert info.shardings == (None,)


def with_scale(**changes: Any) -> bytes:
    document = volume_info((1000, 70, 64), sharding=(9, 6, 3))
    document["scales"][0] |= changes
    return json.dumps(document).encode()


INFINITY = float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        *[{"size": size} for size in (None, 5, "512", {}, [], [1, 2], [1, 2, 3, 4], ["1", "2", "3"], [[1], [2], [3]])],
        *[{"size": [n, 64, 64]} for n in (0, -1, 1.5, None, True, "64", 2**40, 10**400, INFINITY, -INFINITY, float("nan"))],
        *[{"resolution": r} for r in (5, "888", [8, 8], [0, 8, 8], [-8, 8, 8], [None, 8, 8], ["8", "8", "8"])],
        *[{"resolution": [n, 8, 8]} for n in (10**400, INFINITY, float("nan"), True)],
        *[
            {"chunk_sizes": c}
            for c in (None, 5, "x", {}, [], [5], [None], [[]], [[64, 64]], [[64, 64, 32]], [[128] * 3], [["64"] * 3])
        ],
        *[{"sharding": s} for s in (5, "x", [], {}, {"preshift_bits": 1}, True)],
        *[
            {"sharding": {"preshift_bits": n, "minishard_bits": 6, "shard_bits": 3}}
            for n in (None, "9", 9.0, True, -1, 65, 10**400, INFINITY, [], {})
        ],
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_scales_that_can_not_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match="volume description can't be used: its scale 0") as caught:
        parse_info(with_scale(**changes), "here")
    assert caught.value.path == "here"
    assert "info=" in str(caught.value.advice)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b'"scales"',
        b"{}",
        b'{"scales": []}',
        b'{"scales": {}}',
        b'{"scales": null}',
        b'{"scales": "abc"}',
        b'{"scales": [null]}',
        b'{"scales": [1]}',
        b'{"scales": [[]]}',
        b'{"scales": [{}]}',
        b'{"scales": [{"size": [1, 2, 3]}, {}]}',
        b'{"scales": [{"size": [1, 2, 3]}',
        b'{"data_type": "uint32", "scales": [{"size": [1, 2, 3]}]}',
        b'{"data_type": [], "scales": [{"size": [1, 2, 3]}]}',
        b'{"num_channels": 3, "scales": [{"size": [1, 2, 3]}]}',
        b"\xff\xfe",
        b"\xff" * 100,
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"scales":' * 100_000,
        b'{"scales": [{"size": [' + b"9" * 5000 + b", 1, 1]}]}",
        b"PNG",
        json.dumps([{"size": [1, 2, 3]}]).encode(),
    ],
    ids=lambda document: repr(document[:40]),
)
def test_what_is_no_volume_description_is_refused(document: bytes) -> None:
    with pytest.raises(ExportError, match="volume description can't be used") as caught:
        parse_info(document, "here")
    assert caught.value.path == "here"
    assert len(str(caught.value)) < 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from(["size", "resolution", "chunk_sizes", "sharding"]), json_values, st.booleans())
def test_any_value_is_understood_or_refused(name: str, value: Any, as_bytes: bool) -> None:
    document = volume_info((1000, 70, 64), sharding=(9, 6, 3))
    document["scales"][0][name] = value
    form: Mapping[str, Any] | bytes = json.dumps(document).encode() if as_bytes else document
    try:
        info = parse_info(form, "x")
    except ExportError:
        return
    assert all(n > 0 for n in info.sizes_xyz[0])
    for sharding in info.shardings:
        if sharding is not None:
            assert (sharding.cube_voxels(info.sizes_xyz[0]) or 64) >= 64


# ---- export.log

REPORT = """\
=====================================
DVID Export-Shards Report
=====================================
Data:        segmentation

--- Scale 0 ---
  Volume:              94,088 x 78,317 x 134,576 voxels
  Chunk size:          64 x 64 x 64 voxels
  Chunks exported:     12,345,678
  Shard files:         1

--- Scale 3 ---
  Volume:              640 x 640 x 64 voxels
  Shard files:         3

--- Totals ---
  Chunks:        7
"""


def test_the_report() -> None:
    assert parse_export_log(REPORT) == {
        0: LoggedScale((94088, 78317, 134576), n_chunks=12345678, n_shards=1),
        3: LoggedScale((640, 640, 64), n_chunks=None, n_shards=3),
    }


def test_the_reports_of_dvid(shared_data: Path) -> None:
    logged = {
        "exports/two-scales": {0: ((2048, 1024, 1024), 27, 1), 1: ((1024, 512, 512), 8, 1)},
        "exports/hazards/past-the-end": {0: ((640, 640, 640), 7, 3)},
        "exports/hazards/cancelled": {0: ((2048, 1024, 1024), 0, 1)},
        "mcns/reexport-head": {1: ((47044, 39158, 67288), 258, 1)},
    }
    for folder, expected in logged.items():
        found = parse_export_log((shared_data / folder / "export.log").read_text())
        assert {level: (s.size_xyz, s.n_chunks, s.n_shards) for level, s in found.items()} == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--- Scale 0 ---",
        "--- Scale 0 ---\n",
        "--- Scale x ---\n  Volume: 1 x 1 x 1 voxels\n",
        "--- Scale 0 ---\n  Volume: , x , x , voxels\n",
        "--- Scale 0 ---\n  Volume: 0 x 1 x 1 voxels\n",
        "--- Scale 0 ---\n  Volume: -1 x 1 x 1 voxels\n",
        "--- Scale 0 ---\n  Volume: 1 x 1 voxels\n",
        "--- Scale 0 ---\n  Volume: 1.5 x 1 x 1 voxels\n",
        "--- Scale 0 ---\n--- Scale 1 ---\n  Volume:\n",
        "--- Scale 0 ---\n  Volume: " + "9" * 5000 + " x 1 x 1 voxels\n",
        "--- Scale 0 ---\n  Volume: 1,000,000,000,000 x 1 x 1 voxels\n",
        "--- Scale " + "9" * 5000 + " ---\n  Volume: 1 x 1 x 1 voxels\n",
        "--- Scale 0 ---\n" * 1000,
        "\x00" * 1000,
        *(f"--- Scale 0 ---\n{filling * 300_000}" for filling in ("\n", " \n", "-", " ", "  Volume: 1\n")),
        "--- Scale 0 ---\n  Volume:" + " " * 300_000 + "\n",
        "--- Scale 0 ---\n  Volume: 1" + ",1" * 300_000 + "\n",
    ],
    ids=lambda text: repr(text[:50]),
)
def test_a_damaged_report_tells_nothing(text: str) -> None:
    assert parse_export_log(text) == {}


@pytest.mark.parametrize("chunks", [",", "", "x", "-1", "9" * 5000])
def test_a_damaged_number_is_left_out(chunks: str) -> None:
    for name in ("Chunks exported", "Shard files"):
        found = parse_export_log(f"--- Scale 2 ---\n  Volume: 10 x 20 x 30 voxels\n  {name}: {chunks}\n")
        assert found == {2: LoggedScale((10, 20, 30), n_chunks=None, n_shards=None)}


@given(st.text(alphabet="-Scale 0123,x\nVoumvxs:Chnkeprtd", max_size=200))
def test_any_text_is_a_report_or_none(text: str) -> None:
    for form in (text, REPORT[: len(text)] + text, f"--- Scale 0 ---\n  Volume: {text}\n", REPORT.replace("94,088", text)):
        for scale in parse_export_log(form).values():
            assert all(side > 0 for side in scale.size_xyz)
