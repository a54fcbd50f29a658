"""The benchmark against other readers: its volumes, its arithmetic, what it prints and draws, and a small run."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").exists():
    pytest.skip("needs the benchmarks, which a source distribution leaves out", allow_module_level=True)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import chart, forms, operations, peers, report, targets, worker  # noqa: E402 - found by the path above
from benchmarks.systems import (  # noqa: E402 - found by the path above
    SYSTEMS,
    FillMemory,
    Memcpy,
    System,
    TensorStorePrecomputed,
    TensorStoreZarr3,
    TouchMemory,
    ZarrDvid,
    ZarrDvidDefaultPipeline,
)
from benchmarks.volumes import Tiled, dense_volume, sparse_volume  # noqa: E402 - found by the path above

if TYPE_CHECKING:
    from benchmarks.volumes import Box

Voxels = npt.NDArray[np.uint64]


# --- volumes -------------------------------------------------------------------------------------------------------


def labels_of_cubes(volume: Voxels, side: int) -> list[int]:
    """Labels of each cube of a volume, counted by NumPy."""
    corners = itertools.product(*(range(0, n, side) for n in volume.shape))
    return [np.unique(volume[z : z + side, y : y + side, x : x + side]).size for z, y, x in corners]


def test_sparse_volume_is_as_sparse_as_scale_0() -> None:
    volume = sparse_volume(128)
    per_block = labels_of_cubes(volume, 64)
    assert 20 <= np.mean(per_block) <= 30
    per_subblock = np.array(labels_of_cubes(volume[:64, :64, :64], 8))
    assert 2 <= per_subblock[per_subblock > 1].mean() <= 3


def test_dense_volume_is_as_dense_as_scale_3() -> None:
    volume = dense_volume(128)
    per_block = labels_of_cubes(volume, 64)
    assert 1700 <= np.mean(per_block) <= 1900
    assert 12 <= np.mean(labels_of_cubes(volume[:64, :64, :64], 8)) <= 14


def test_tiles_have_labels_of_their_own() -> None:
    tile = np.arange(1, 25, dtype=np.uint64).reshape(2, 3, 4)
    volume = Tiled(tile, (1, 3, 2))
    rows = [[tile + np.uint64((2 * y + x) * 10**8) for x in range(2)] for y in range(3)]
    whole = np.concatenate([np.concatenate(row, axis=2) for row in rows], axis=1)
    assert volume.shape == whole.shape == (2, 9, 8)
    assert volume.dtype == whole.dtype
    assert np.array_equal(volume[operations.whole(volume.shape)], whole)
    for box in np.ndindex(2, 4, 5):
        z, y, x = (slice(start, start + 2) for start in (0, *box[1:]))
        assert np.array_equal(volume[z, y, x], whole[z, y, x])
    assert np.unique(whole).size == whole.size


def test_a_volume_is_kept_for_other_processes(tmp_path: Path) -> None:
    volume = Tiled(np.arange(8, dtype=np.uint64).reshape(2, 2, 2), (1, 2, 3))
    volume.save(tmp_path)
    loaded = Tiled.load(tmp_path)
    assert loaded.shape == (2, 4, 6)
    assert np.array_equal(loaded[operations.whole(loaded.shape)], volume[operations.whole(volume.shape)])


# --- boxes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", operations.TITLES)
def test_boxes_are_the_same_for_all_systems_and_lie_in_the_volume(operation: str) -> None:
    shape = (128, 192, 256)
    boxes = operations.random_boxes(operation, shape, 12)
    assert boxes == operations.random_boxes(operation, shape, 12)
    assert len(boxes) == 12
    for box in boxes:
        assert all(0 <= part.start < part.stop <= n for part, n in zip(box, shape, strict=True))


def test_random_chunks_are_chunks_and_come_once_each() -> None:
    boxes = operations.random_boxes(operations.RANDOM, (128, 128, 192), 12)
    corners = {(z.start, y.start, x.start) for z, y, x in boxes}
    assert corners == set(itertools.product((0, 64), (0, 64), (0, 64, 128)))
    assert all(part.stop - part.start == 64 for box in boxes for part in box)


def test_cutouts_meet_eight_chunks() -> None:
    for box in operations.random_boxes(operations.CUTOUT, (128, 192, 256), 6):
        assert all(part.start % 64 == 32 and part.stop - part.start == 64 for part in box)


@pytest.mark.parametrize(("operation", "axis"), operations.PLANES.items())
def test_planes_are_one_voxel_thick(operation: str, axis: int) -> None:
    shape = (64, 128, 192)
    for box in operations.random_boxes(operation, shape, 5):
        sizes = [part.stop - part.start for part in box]
        assert sizes == [1 if number == axis else n for number, n in enumerate(shape)]


# --- targets, table, chart, on made-up figures ---------------------------------------------------------------------


def made_up(seconds: dict[str, dict[str, float]], subject: str = "sparse") -> peers.Measured:
    """Figures of which each has one read far too slow, which a median leaves out."""
    names = {name for systems in seconds.values() for name in systems}
    return peers.Measured(
        subject=subject,
        title=f"a {subject} volume",
        shape_zyx=(64, 512, 512),
        forms=[forms.Form("export", 1_250_000, 4), forms.Form("zarr3", 3_000_000, 2)],
        seconds={
            operation: {name: [value, 99.0, value] for name, value in systems.items()}
            for operation, systems in seconds.items()
        },
        settings={name: f"setting of {name}" for name in SYSTEMS if name in names},
    )


MADE_UP = {
    operations.INTO: {
        ZarrDvid.name: 0.1,
        TensorStorePrecomputed.name: 0.35,
        TensorStoreZarr3.name: 0.31,
        Memcpy.name: 0.05,
    },
    operations.RANDOM: {ZarrDvid.name: 0.0005, TensorStorePrecomputed.name: 0.0008, TensorStoreZarr3.name: 0.0009},
}


def test_speed_is_held_against_the_better_form_of_tensorstore() -> None:
    medians = made_up(MADE_UP).medians(operations.INTO)
    assert targets.best_tensorstore(medians) == 0.31
    assert targets.best_tensorstore({Memcpy.name: 1.0}) is None
    target = targets.Target("sparse", operations.INTO, 3.0)
    assert target.ratio(medians) == pytest.approx(3.1)
    assert target.is_met(3.0)
    assert not target.is_met(2.99)


def test_time_is_held_against_a_reference() -> None:
    target = targets.Target("sparse", operations.INTO, 1.6, Memcpy.name)
    assert target.ratio(made_up(MADE_UP).medians(operations.INTO)) == pytest.approx(2.0)
    assert target.is_met(1.6)
    assert not target.is_met(1.61)


def test_what_was_not_measured_has_no_ratio() -> None:
    target = targets.Target("sparse", operations.INTO, 3.0)
    assert target.ratio({ZarrDvid.name: 1.0}) is None
    assert target.ratio({TensorStoreZarr3.name: 1.0}) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.345, "12.3 s"),
        (1.0, "1.00 s"),
        (0.5678, "568 ms"),
        (0.0009996, "1000 us"),
        (0.00087, "870 us"),
        (0.0026, "2.60 ms"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def test_table_of_a_volume() -> None:
    assert report.render_volume(made_up(MADE_UP)).splitlines() == [
        "a sparse volume",
        "on disk: export 1.2 MB in 4 files, zarr3 3.0 MB in 2 files",
        "                             given memory           chunk",
        "zarr-dvid                  100 ms   3.10x  500 us   1.60x",
        "TensorStore, precomputed   350 ms   0.89x  800 us   1.00x",
        "TensorStore, zarr3         310 ms   1.00x  900 us   0.89x",
        "memcpy                    50.0 ms   6.20x               -",
    ]


def test_table_of_targets() -> None:
    lines = report.render_targets([made_up(MADE_UP)]).splitlines()
    assert len(lines) == 1 + len(targets.TARGETS)
    found = [line.split() for line in lines]
    assert ["3.10", ">=", "3.00", "met"] in [words[-4:] for words in found]
    assert ["2.00", "<=", "1.60", "MISSED"] in [words[-4:] for words in found]
    assert sum(words[-2:] == ["not", "measured"] for words in found) == len(targets.TARGETS) - 3


def test_report_names_what_is_left_out() -> None:
    text = report.render_settings([made_up(MADE_UP)], {"zarrs": "zarrs is not installed"})
    assert "left out: zarrs: zarrs is not installed" in text
    assert f"setting of {ZarrDvid.name}" in text
    found = report.as_json([made_up(MADE_UP)], {"zarrs": "zarrs is not installed"})
    assert found["absent"] == {"zarrs": "zarrs is not installed"}
    assert found["volumes"][0]["operations"]["chunk"][ZarrDvid.name] == {
        "median_seconds": 0.0005,
        "seconds": [0.0005, 99.0, 0.0005],
    }
    assert [target["met"] for target in found["targets"]].count(True) == 1


def test_chart_is_a_png_as_wide_as_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    chart.draw([made_up(MADE_UP), made_up(MADE_UP, "dense")], "a machine", path)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">I", header[16:20]) == (1600,)


def test_chart_needs_what_it_is_relative_to(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="not measured"):
        chart.draw([made_up({operations.INTO: {ZarrDvid.name: 1.0}})], "a machine", tmp_path / "chart.png")


# --- forms ---------------------------------------------------------------------------------------------------------


def precomputed_info() -> dict[str, Any]:
    sharding = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "data_encoding": "gzip",
        "minishard_index_encoding": "gzip",
    }
    scale = {
        "encoding": "compressed_segmentation",
        "chunk_sizes": [[64, 64, 64]],
        "compressed_segmentation_block_size": [8, 8, 8],
        "sharding": sharding,
    }
    return {"scales": [scale]}


def zarr3_metadata() -> dict[str, Any]:
    inner = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3}}]
    return {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [64] * 3, "codecs": inner}}]}


def spoil_chunks(info: dict[str, Any]) -> None:
    info["scales"][0]["chunk_sizes"] = [[32, 32, 32]]


def spoil_sharding(info: dict[str, Any]) -> None:
    info["scales"][0]["sharding"]["data_encoding"] = "raw"


@pytest.mark.parametrize("spoil", [spoil_chunks, spoil_sharding])
def test_precomputed_of_another_kind_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    info = precomputed_info()
    forms.check_precomputed(info)
    spoil(info)
    with pytest.raises(ValueError, match="means to read"):
        forms.check_precomputed(info)


def test_zarr3_of_another_kind_is_refused() -> None:
    metadata = zarr3_metadata()
    forms.check_zarr3(metadata)
    metadata["codecs"][0]["configuration"]["chunk_shape"] = [64, 64, 128]
    with pytest.raises(ValueError, match="means to read"):
        forms.check_zarr3(metadata)


# --- a run ---------------------------------------------------------------------------------------------------------


class Broken(System):
    """Gives what was written, but for one voxel."""

    name = "broken"
    packages = ()
    setting = ""

    def __init__(self, folder: Path) -> None:
        self._volume = Tiled.load(folder)

    def read(self, box: Box) -> Voxels:
        voxels = self._volume[box]
        voxels[-1, -1, -1] += np.uint64(1)
        return voxels

    def read_into(self, box: Box, out: Voxels) -> None:
        out[:-1] = self._volume[box][:-1]


@pytest.mark.parametrize("operation", [operations.FRESH, operations.INTO])
def test_other_voxels_end_the_run(operation: str, tmp_path: Path) -> None:
    volume = Tiled(sparse_volume(72), (1, 1, 1))
    volume.save(tmp_path)
    box = operations.whole(volume.shape)
    copy = Memcpy(tmp_path)
    worker.check(copy, volume, operation, [box])
    with pytest.raises(worker.WrongVoxelsError, match="broken: .* other voxels"):
        worker.check(Broken(tmp_path), volume, operation, [box])


def test_a_run_measures_each_system_that_is_here(tmp_path: Path) -> None:
    subject = operations.Subject(
        name="tiny",
        title="tiny",
        make=lambda: sparse_volume(64),
        n_tiles_zyx=(2, 2, 2),
        n_calls={operations.INTO: 1, operations.FRESH: 1, operations.CUTOUT: 1, "x plane": 1},
    )
    (measured,) = peers.measure([subject], lambda text: None)
    absent = set(peers.absent_systems())
    assert not absent & {ZarrDvid.name, ZarrDvidDefaultPipeline.name, Memcpy.name}
    assert set(measured.settings) == set(SYSTEMS) - absent
    assert set(measured.seconds[operations.FRESH]) == set(SYSTEMS) - absent
    assert not {TouchMemory.name, FillMemory.name} & set(measured.seconds[operations.INTO])
    for systems in measured.seconds.values():
        assert all(len(seconds) == peers.ROUNDS and min(seconds) > 0 for seconds in systems.values())
    assert measured.forms[0].name == forms.EXPORT


def test_a_system_that_fails_ends_the_run(tmp_path: Path) -> None:
    volume = Tiled(sparse_volume(64), (1, 1, 1))
    volume.save(tmp_path)  # and no export
    box = operations.whole(volume.shape)
    with peers.Worker(ZarrDvid.name, tmp_path, volume) as broken, pytest.raises(RuntimeError, match="zarr-dvid failed"):
        broken.check(operations.FRESH, [box])
    with peers.Worker(Memcpy.name, tmp_path, volume) as sound, pytest.raises(RuntimeError, match="fresh process"):
        sound.time(operations.FIRST, [box])
