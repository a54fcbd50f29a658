import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import ClassVar

import dask.array
import numpy as np
import pyarrow as pa
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import zarr_dvid
from zarr_dvid import decode_block
from zarr_dvid.downsample import downsample_majority
from zarr_dvid.errors import ExportError
from zarr_dvid.export_plan import ScalePlan
from zarr_dvid.progress import progress_bar
from zarr_dvid.writer import _halving_reader, write_export

MCNS = Path(__file__).parents[2] / "shared" / "data" / "mcns"
MCNS_SPEC = MCNS / "mcns-ng-specs.json"
REAL_SHARD = MCNS / "reexport-head" / "s1" / "30720_24576_28672.arrow"
LARGEST = 2**64 - 1


def label_volume(shape, *, seed=0):
    """Labels in lumps of 16 voxels, over noise, with the chunk at (z, y, x) = (0, 1, 0) all 0."""
    rng = np.random.default_rng(seed)
    labels = np.array([0, 1, 2, 700, 2**40, LARGEST], np.uint64)
    lumps = rng.choice(labels, [-(-n // 16) for n in shape])
    volume = np.kron(lumps, np.ones((16, 16, 16), np.uint64))[tuple(slice(n) for n in shape)]
    noisy = rng.random(shape) < 0.02
    volume[noisy] = rng.choice(labels, np.count_nonzero(noisy))
    volume[0:64, 64:128, 0:64] = 0
    return volume


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def shard_paths(folder, scale=0):
    return sorted((folder / f"s{scale}").glob("*.arrow"))


def rows_of(folder, scale=0):
    """Chunk (x, y, z) -> record of all shards, by pyarrow alone."""
    rows = {}
    for path in shard_paths(folder, scale):
        with pa.ipc.open_stream(path) as stream:
            for row in stream.read_all().to_pylist():
                chunk = (row["chunk_x"], row["chunk_y"], row["chunk_z"])
                assert chunk not in rows
                rows[chunk] = row
    return rows


def volume_of(rows, shape, *, column):
    """The volume that records describe, 0 where there is none."""
    volume = np.zeros([-(-n // 64) * 64 for n in shape], np.uint64)
    for (x, y, z), row in rows.items():
        block = zstandard.ZstdDecompressor().decompress(row["dvid_compressed_block"])
        labels = np.array(row[column], np.uint64)
        voxels = decode_block(block, labels=labels)
        volume[64 * z : 64 * z + 64, 64 * y : 64 * y + 64, 64 * x : 64 * x + 64] = voxels
    z, y, x = shape
    for beyond in (volume[z:], volume[:, y:], volume[:, :, x:]):
        assert not beyond.any()  # what fills up the last blocks
    return volume[:z, :y, :x]


def mapped(volume, mapping):
    return np.array([mapping.get(label, label) for label in volume.ravel().tolist()], np.uint64).reshape(volume.shape)


class Source:
    """An array that notes what is read of it, and fails at one read if told so."""

    def __init__(self, volume, *, fail_at=None):
        self.volume, self.fail_at, self.windows = volume, fail_at, []
        self.shape, self.dtype = volume.shape, volume.dtype

    def __getitem__(self, window):
        if len(self.windows) == self.fail_at:
            raise RuntimeError("the source broke")
        self.windows.append(window)
        return self.volume[window]


# What is in the files


@pytest.mark.parametrize("shape", [(64, 64, 64), (130, 70, 200), (1, 1, 1), (65, 128, 3)])
def test_records_hold_the_volume(tmp_path, shape):
    volume = label_volume(shape)
    mapping = {1: 2, 2**40: LARGEST, 700: 0, LARGEST: 700, 5: 6}
    write_export(volume, tmp_path, mapping=mapping, shard_chunks=2)
    rows = rows_of(tmp_path)
    np.testing.assert_array_equal(volume_of(rows, shape, column="supervoxels"), volume)
    np.testing.assert_array_equal(volume_of(rows, shape, column="labels"), mapped(volume, mapping))
    for row in rows.values():
        frame = zstandard.get_frame_parameters(row["dvid_compressed_block"])
        block = zstandard.ZstdDecompressor().decompress(row["dvid_compressed_block"])
        assert frame.has_checksum
        assert frame.content_size == row["uncompressed_size"] == len(block)
        assert np.frombuffer(block, "<u8", len(row["supervoxels"]), 16).tolist() == row["supervoxels"]
        assert row["labels"] == [mapping.get(label, label) for label in row["supervoxels"]]


def test_chunks_of_0_are_left_out_but_not_those_mapped_to_0(tmp_path):
    volume = np.zeros((64, 64, 256), np.uint64)
    volume[..., 64:128] = 7
    volume[5, 5, 200] = 1
    write_export(volume, tmp_path, mapping={7: 0}, shard_chunks=1)
    assert {chunk: (row["supervoxels"], row["labels"]) for chunk, row in rows_of(tmp_path).items()} == {
        (1, 0, 0): ([7], [0]),
        (3, 0, 0): ([0, 1], [0, 1]),
    }
    assert sorted(path.name for path in (tmp_path / "s0").iterdir()) == [
        *("192_0_0.arrow", "192_0_0.csv", "64_0_0.arrow", "64_0_0.csv")
    ]


def test_a_volume_of_0_has_no_shards(tmp_path):
    write_export(np.zeros((100, 64, 64), np.uint64), tmp_path, scales=3, voxel_size=8)
    assert sorted(files_of(tmp_path)) == ["export.log", "info"]


def test_index_rows_point_at_messages(tmp_path):
    write_export(label_volume((130, 70, 200)), tmp_path, shard_chunks=2)
    assert len(shard_paths(tmp_path)) > 1
    for path in shard_paths(tmp_path):
        data = path.read_bytes()
        assert data[-8:] == bytes.fromhex("ffffffff00000000")
        first, header, *lines = path.with_suffix(".csv").read_bytes().decode().removesuffix("\n").split("\n")
        assert (first, header) == ("# schema_size=0", "x,y,z,offset,size,batch_idx")
        end = 0
        for number, line in enumerate(lines):
            *chunk, offset, size, batch_idx = map(int, line.split(","))
            assert (offset, batch_idx) == (end, 0)
            end = offset + size
            part = pa.BufferReader(data[offset:end])
            if number == 0:
                schema = pa.ipc.read_schema(pa.ipc.read_message(part))
            row = pa.ipc.read_record_batch(pa.ipc.read_message(part), schema).to_pylist()
            assert part.tell() == size
            assert [[r["chunk_x"], r["chunk_y"], r["chunk_z"]] for r in row] == [chunk]
        assert end + 8 == len(data)


@pytest.mark.skipif(not REAL_SHARD.exists(), reason="needs a real shard")
def test_a_real_export_comes_out_again(tmp_path):
    """Written again, real blocks get the bytes that they have in DVID, and their records the same lists."""
    first, n_chunks = np.array([508, 413, 472]), np.array([4, 3, 2])  # x, y, z
    with pa.ipc.open_stream(REAL_SHARD) as stream:
        rows = stream.read_all().to_pylist()
    real = {}
    for row in rows:
        chunk = np.array([row["chunk_x"], row["chunk_y"], row["chunk_z"]]) - first
        if (chunk >= 0).all() and (chunk < n_chunks).all():
            real[tuple(chunk.tolist())] = row
    assert len(real) > 10
    volume = volume_of(real, 64 * n_chunks[::-1], column="supervoxels")
    mapping = {sv: label for row in real.values() for sv, label in zip(row["supervoxels"], row["labels"], strict=True)}
    write_export(volume, tmp_path, mapping=mapping)
    written = rows_of(tmp_path)
    assert written.keys() == real.keys()
    unzip = zstandard.ZstdDecompressor().decompress
    for chunk, row in real.items():
        assert unzip(written[chunk]["dvid_compressed_block"]) == unzip(row["dvid_compressed_block"])
        for name in ("labels", "supervoxels", "uncompressed_size"):
            assert written[chunk][name] == row[name]


# Names and the info document


def dvid_files(size_xyz, sharding):
    """Chunk (x, y, z) -> shard id and file name, by DVID's rule in its own words."""
    grid = [-(-n // 64) for n in size_xyz]
    n_bits = [0 if n <= 1 else (n - 1).bit_length() for n in grid]
    left, axis, bits = min(sharding["preshift_bits"] + sharding["minishard_bits"], sum(n_bits)), 0, [0, 0, 0]
    while left:
        if bits[axis] < n_bits[axis]:
            bits[axis] += 1
            left -= 1
        axis = (axis + 1) % 3
    side = 64 * max(min(2**n, g) for n, g in zip(bits, grid, strict=True))
    files = {}
    for chunk in np.ndindex(*grid):
        morton, position = 0, 0
        for i in range(max(n_bits)):
            for c, n in zip(chunk, n_bits, strict=True):
                if i < n:
                    morton |= (c >> i & 1) << position
                    position += 1
        shard = morton >> sharding["preshift_bits"] >> sharding["minishard_bits"] & (1 << sharding["shard_bits"]) - 1
        files[chunk] = shard, "_".join(str(64 * c // side * side) for c in chunk)
    return files


@settings(deadline=None, max_examples=150)
@given(
    st.tuples(*[st.integers(1, 20 * 64)] * 3).filter(lambda shape: np.prod(shape) < 1500 * 64**3),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)
def test_dvid_would_give_the_same_names_from_the_info(shape_zyx, shard_chunks):
    plan = ScalePlan(0, shape_zyx, shard_chunks)
    planned = {}
    for shard in plan.shards():
        boxes = list(shard.boxes())
        chunks = [chunk for box in boxes for chunk in box.chunks_zyx]
        assert len(chunks) == shard.n_chunks
        for z, y, x in chunks:
            assert (x, y, z) not in planned
            planned[x, y, z] = shard.name
    by_dvid = dvid_files(shape_zyx[::-1], plan.sharding())
    assert planned == {chunk: f"s0/{name}" for chunk, (_, name) in by_dvid.items()}
    # One shard id for each file, and one file for each id: DVID's writers can't meet in a file.
    pairs = set(by_dvid.values())
    assert len(pairs) == len({shard for shard, _ in pairs}) == len({name for _, name in pairs})


@pytest.mark.skipif(not MCNS_SPEC.exists(), reason="needs the real volume description")
def test_sharding_of_a_real_volume():
    scales = json.loads(MCNS_SPEC.read_bytes())["scales"]
    for number, scale in enumerate(scales):
        x, y, z = scale["size"]
        assert ScalePlan(number, (z, y, x), 32).sharding() == scale["sharding"]


def test_info(tmp_path):
    write_export(label_volume((130, 70, 200)), tmp_path, scales=2, shard_chunks=1, voxel_size=(40, 4, 8.5))
    info = json.loads((tmp_path / "info").read_bytes())
    scales = info.pop("scales")
    assert info == {
        "@type": "neuroglancer_multiscale_volume",
        "data_type": "uint64",
        "num_channels": 1,
        "type": "segmentation",
    }
    assert [(scale["key"], scale["size"], scale["resolution"]) for scale in scales] == [
        ("s0", [200, 70, 130], [8.5, 4.0, 40.0]),
        ("s1", [100, 35, 65], [17.0, 8.0, 80.0]),
    ]
    assert all(scale["chunk_sizes"] == [[64, 64, 64]] for scale in scales)


def test_one_number_is_the_voxel_size_along_all_axes(tmp_path):
    write_export(np.ones((1, 1, 1), np.uint64), tmp_path / "8", voxel_size=8)
    write_export(np.ones((1, 1, 1), np.uint64), tmp_path / "unknown")
    assert json.loads((tmp_path / "8" / "info").read_bytes())["scales"][0]["resolution"] == [8.0, 8.0, 8.0]
    assert "resolution" not in json.loads((tmp_path / "unknown" / "info").read_bytes())["scales"][0]


# The report


def test_export_log(tmp_path):
    write_export(label_volume((130, 70, 1100)), tmp_path, shard_chunks=4, scales=2, voxel_size=8)
    text = (tmp_path / "export.log").read_text()
    assert not re.search(r"\d\d:\d\d|202\d", text)  # no times
    head, *sections, totals = re.split(r"^--- (.*) ---$", text, flags=re.MULTILINE)[0::2]
    assert head.startswith("=====================================\nDVID Export-Shards Report\n===")
    volumes = ["1,100 x 70 x 130", "550 x 35 x 65"]
    for scale, (section, volume) in enumerate(zip(sections, volumes, strict=True)):
        facts = dict(re.findall(r"^  (\S.*?):  +(\S.*)$", section, re.MULTILINE))
        assert facts == {
            "Volume": f"{volume} voxels",
            "Chunk size": "64 x 64 x 64 voxels",
            "Chunks exported": str(len(rows_of(tmp_path, scale))),
            "Shard files": str(len(shard_paths(tmp_path, scale))),
        }
        sizes = [path.stat().st_size for path in shard_paths(tmp_path, scale)]
        assert f"  Shard file sizes (arrow):\n    Total:   {sum(sizes) / 1024:.2f} KB\n" in section
        assert f"    Max:     {max(sizes) / 1024:.2f} KB\n" in section
    assert f"Chunks:        {sum(len(rows_of(tmp_path, scale)) for scale in (0, 1))}\n" in totals


# Sources, determinism, costs


def test_the_same_bytes_whatever_the_source(tmp_path):
    volume = label_volume((130, 150, 100))
    mapping = {1: 5, 2: 5, 700: 9}
    on_disk = zarr.create_array(tmp_path / "source.zarr", shape=volume.shape, chunks=(64, 50, 100), dtype="uint64")
    on_disk[...] = volume
    sources = {
        "numpy": volume,
        "again": volume.copy(),
        "strided": np.asfortranarray(volume),
        "big-endian": volume.astype(">u8"),
        "zarr": on_disk,
        "dask": dask.array.from_array(volume, chunks=(100, 64, 33)),
    }
    for name, source in sources.items():
        given = mapping if name == "numpy" else dict(reversed(mapping.items()))
        write_export(source, tmp_path / name, mapping=given, shard_chunks=2, voxel_size=8)
    expected = files_of(tmp_path / "numpy")
    assert len(expected) > 4
    for name in sources:
        assert files_of(tmp_path / name) == expected


@pytest.mark.parametrize("shard_chunks", [1, 2, 4, 8])
def test_every_voxel_is_read_once_in_boxes_of_256(tmp_path, shard_chunks):
    source = Source(np.zeros((300, 64, 520), np.uint64))
    write_export(source, tmp_path, shard_chunks=shard_chunks)
    windows = [tuple((part.start, part.stop) for part in window) for window in source.windows]
    assert Counter(windows) == Counter(
        ((z, min(z + 256, 300)), (0, 64), (x, min(x + 256, 520))) for z in (0, 256) for x in (0, 256, 512)
    )


class Solid:
    """A volume of one label, made when it is read."""

    dtype = np.dtype(np.uint64)

    def __init__(self, *shape):
        self.shape = shape

    def __getitem__(self, window):
        return np.full([part.stop - part.start for part in window], 5, np.uint64)


@pytest.mark.parametrize("shard_chunks", [2, 8])
def test_one_box_of_the_source_is_in_memory_at_a_time(tmp_path, shard_chunks):
    tracemalloc.start()
    try:
        write_export(Solid(256, 256, 768), tmp_path, shard_chunks=shard_chunks)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.2 * 8 * 256**3


# Coarser scales


def test_coarser_scales_are_majorities_of_what_was_written(tmp_path):
    volume = label_volume((300, 70, 131))
    mapping = {1: 2}
    write_export(volume, tmp_path, mapping=mapping, scales=4, shard_chunks=2, voxel_size=8)
    for scale in range(4):
        rows = rows_of(tmp_path, scale)
        np.testing.assert_array_equal(volume_of(rows, volume.shape, column="supervoxels"), volume)
        np.testing.assert_array_equal(volume_of(rows, volume.shape, column="labels"), mapped(volume, mapping))
        volume = downsample_majority(volume)


def test_coarser_scales_without_a_voxel_size(tmp_path):
    volume = label_volume((130, 70, 64))
    write_export(volume, tmp_path, scales=2)
    expected = downsample_majority(volume)
    np.testing.assert_array_equal(volume_of(rows_of(tmp_path, 1), expected.shape, column="supervoxels"), expected)


def test_halving_reads_the_finer_scale_in_pieces(tmp_path):
    write_export(Solid(512, 512, 512), tmp_path / "finer", voxel_size=8)
    read = _halving_reader(tmp_path / "finer", ScalePlan(0, (512, 512, 512), 32))
    read((slice(0, 1),) * 3)  # what is made only once is not measured
    tracemalloc.start()
    try:
        halved = read((slice(0, 256),) * 3)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (halved == 5).all()
    assert peak_bytes < 2.2 * 8 * 256**3  # the result and one piece of the source


def test_what_was_written_opens_without_a_warning(tmp_path):
    volume = label_volume((300, 70, 131))
    volume[:, :, 64:128] = 0
    write_export(volume, tmp_path, mapping={1: 2}, scales=6, shard_chunks=1, voxel_size=(40, 4, 8))
    group = zarr_dvid.open(tmp_path)
    for scale in range(6):
        np.testing.assert_array_equal(group[f"s{scale}/supervoxels"][...], volume)
        np.testing.assert_array_equal(group[f"s{scale}/labels"][...], mapped(volume, {1: 2}))
        volume = downsample_majority(volume)


# Interruption


def undisturbed(tmp_path, volume, **options):
    write_export(volume, tmp_path / "undisturbed", **options)
    return files_of(tmp_path / "undisturbed")


def assert_unfinished_but_sound(folder, expected):
    """Whatever is there under a final name is whole, and nothing says that the export is finished."""
    found = files_of(folder)
    assert "export.log" not in found or ".writing.jsonl" in found
    assert found.items() - {(name, found[name]) for name in found if Path(name).name[0] == "."} <= expected.items()


OPTIONS = {"mapping": {1: 2}, "shard_chunks": 2}


@pytest.mark.parametrize("fail_at", range(4))
def test_going_on_after_the_source_broke(tmp_path, fail_at):
    volume = label_volume((300, 80, 270))
    volume[:, :, 128:256] = 0
    expected = undisturbed(tmp_path, volume, **OPTIONS)
    folder = tmp_path / "broken"
    with pytest.raises(RuntimeError, match="the source broke"):
        write_export(Source(volume, fail_at=fail_at), folder, **OPTIONS)
    assert_unfinished_but_sound(folder, expected)
    assert not list(folder.rglob("*.part"))
    again = Source(volume)
    write_export(again, folder, **OPTIONS)
    assert files_of(folder) == expected
    assert len(again.windows) == 4 - fail_at  # neither finished nor empty shards are read again


def test_going_on_after_stops_between_any_two_steps(tmp_path, monkeypatch):
    """Stops runs before one of the calls that make something last, each run before another one."""
    volume = label_volume((130, 70, 140))
    options = {**OPTIONS, "scales": 2, "voxel_size": 8}
    expected = undisturbed(tmp_path, volume, **options)
    folder = tmp_path / "stopped"
    real_fsync, real_replace = os.fsync, Path.replace
    allowed = 0

    def step(call, *args):
        nonlocal allowed
        if allowed == 0:
            raise KeyboardInterrupt
        allowed -= 1
        return call(*args)

    monkeypatch.setattr(os, "fsync", lambda *args: step(real_fsync, *args))
    monkeypatch.setattr(Path, "replace", lambda *args: step(real_replace, *args))
    stops = 0
    while True:
        allowed = 5 + stops % 7  # a shard takes five; state and info document three each
        try:
            write_export(volume, folder, **options)
            break
        except KeyboardInterrupt:
            stops += 1
            assert_unfinished_but_sound(folder, expected)
            assert stops < 100
    assert stops > 3
    assert files_of(folder) == expected


KILLED = """
import sys, time
import numpy as np
from zarr_dvid.writer import write_export

class Slow:
    def __init__(self, volume):
        self.volume, self.shape, self.dtype = volume, volume.shape, volume.dtype
    def __getitem__(self, window):
        print("read", flush=True)
        time.sleep(0.05)
        return self.volume[window]

write_export(Slow(np.load(sys.argv[1])), sys.argv[2], mapping={1: 2}, shard_chunks=2)
"""


def test_going_on_after_kill(tmp_path):
    volume = label_volume((520, 80, 270))
    np.save(tmp_path / "volume.npy", volume)
    expected = undisturbed(tmp_path, volume, **OPTIONS)
    folder = tmp_path / "killed"
    for reads in (1, 2, 2):
        arguments = [sys.executable, "-c", KILLED, str(tmp_path / "volume.npy"), str(folder)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            for _ in range(reads):
                assert process.stdout.readline() == b"read\n"
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert_unfinished_but_sound(folder, expected)
    write_export(volume, folder, **OPTIONS)
    assert files_of(folder) == expected


def test_what_a_killed_run_leaves_is_cleared_up(tmp_path):
    volume = label_volume((130, 70, 140))
    expected = undisturbed(tmp_path, volume, **OPTIONS)
    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError):
        write_export(Source(volume, fail_at=0), folder, **OPTIONS)
    names = sorted(name for name in expected if name.endswith(".arrow"))
    (folder / "s0" / ".0_0_0.arrow.part").write_bytes(b"half")
    (folder / ".info.part").write_bytes(b"half")
    (folder / names[0]).write_bytes(b"whole or not, it has no index")
    with (folder / ".writing.jsonl").open("ab") as state:
        state.write(names[1].removesuffix(".arrow").encode())  # torn: its end of line is missing
    write_export(volume, folder, **OPTIONS)
    assert files_of(folder) == expected


# Refusals


def test_a_run_with_other_parameters_is_refused(tmp_path):
    volume = label_volume((64, 64, 64))
    options = {"mapping": {1: 2}, "scales": 1, "shard_chunks": 2, "voxel_size": 8}
    with pytest.raises(RuntimeError):
        write_export(Source(volume, fail_at=0), tmp_path, **options)
    before = files_of(tmp_path)
    others = {"mapping": {1: 3}, "scales": 2, "shard_chunks": 4, "voxel_size": (8, 8, 9)}
    names = {"mapping": "mapping_sha256", "voxel_size": "voxel_size_zyx"}
    for name, value in others.items():
        with pytest.raises(ExportError, match=f"other parameters: expected {names.get(name, name)}=.*Give the same ones"):
            write_export(volume, tmp_path, **{**options, name: value})
    with pytest.raises(ExportError, match=r"shape_zyx=\[64, 64, 64\], found shape_zyx=\[64, 64, 63\]"):
        write_export(volume[:, :, :63], tmp_path, **options)
    assert files_of(tmp_path) == before
    write_export(volume, tmp_path, **options)


def test_a_folder_with_an_export_is_refused(tmp_path):
    volume = np.ones((64, 64, 64), np.uint64)
    write_export(volume, tmp_path / "done")
    before = files_of(tmp_path / "done")
    with pytest.raises(ExportError, match=r"done: this folder holds an export already.*export.log, info, s0"):
        write_export(volume, tmp_path / "done")
    assert files_of(tmp_path / "done") == before
    (tmp_path / "dvid" / "s3").mkdir(parents=True)
    with pytest.raises(ExportError, match="found s3"):
        write_export(volume, tmp_path / "dvid")


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_export(np.ones((64, 64, 64), np.uint64), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_no_destination(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ExportError, match="this is a file"):
        write_export(np.ones((1, 1, 1), np.uint64), tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b"\xff\n"])
def test_an_unreadable_note_is_refused(tmp_path, content):
    (tmp_path / ".writing.jsonl").write_bytes(content)
    with pytest.raises(ExportError, match="can't be read"):
        write_export(np.ones((1, 1, 1), np.uint64), tmp_path)
    assert files_of(tmp_path) == {".writing.jsonl": content}


ONE = np.ones((2, 2, 2), np.uint64)


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        ([[[1]]], {}, TypeError, "must be an array"),
        (ONE.astype(np.int64), {}, TypeError, r"uint64, not int64; cast it.*\.astype\('uint64'\)"),
        (ONE.astype(np.uint32), {}, TypeError, "not uint32"),
        (ONE[0], {}, ValueError, r"three dimensions \(z, y, x\), not shape \(2, 2\)"),
        (ONE[:, :0], {}, ValueError, r"no voxels.*\(2, 0, 2\)"),
        (ONE, {"scales": 0}, ValueError, "at least 1"),
        (ONE, {"shard_chunks": 0}, ValueError, "power of two, not 0"),
        (ONE, {"shard_chunks": 24}, ValueError, "power of two, not 24"),
        (ONE, {"shard_chunks": -2}, ValueError, "power of two, not -2"),
        (ONE, {"mapping": {1: -1}}, ValueError, "not -1"),
        (ONE, {"mapping": {2**64: 1}}, ValueError, "not 18446744073709551616"),
        (ONE, {"mapping": {1: 1.5}}, TypeError, "integer"),
        (ONE, {"voxel_size": 0}, ValueError, "positive"),
        (ONE, {"voxel_size": (8, 8)}, ValueError, r"three \(z, y, x\)"),
        (ONE, {"voxel_size": float("nan")}, ValueError, "positive"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path, source, options, error, words):
    with pytest.raises(error, match=words):
        write_export(source, tmp_path / "export", **options)
    assert not (tmp_path / "export").exists()


def test_urls_are_refused():
    with pytest.raises(ValueError, match="local folder"):
        write_export(ONE, "s3://bucket/export")


def test_a_source_that_gives_something_else_is_refused(tmp_path):
    source = Source(np.ones((64, 64, 64), np.uint64))
    source.shape = (64, 64, 65)
    with pytest.raises(ValueError, match=r"shape \(64, 64, 64\), not uint64 of shape \(64, 64, 65\)"):
        write_export(source, tmp_path)


# Progress


class FakeBar:
    made: ClassVar[list["FakeBar"]] = []

    def __init__(self, *, total, desc):
        self.total, self.label, self.n_steps = total, desc, 0
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def update(self, n_steps):
        self.n_steps += n_steps


def test_the_bar_counts_all_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeBar, "made", [])
    monkeypatch.setattr("tqdm.tqdm", FakeBar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    volume = label_volume((130, 70, 300))
    with pytest.raises(RuntimeError):
        write_export(Source(volume, fail_at=1), tmp_path / "e", shard_chunks=2, scales=2, voxel_size=8)
    write_export(volume, tmp_path / "e", shard_chunks=2, scales=2, voxel_size=8)
    write_export(volume, tmp_path / "quiet", progress=False)
    assert [(bar.label, bar.total) for bar in FakeBar.made] == [("Writing e", 36)] * 2
    assert 0 < FakeBar.made[0].n_steps < 36
    assert FakeBar.made[1].n_steps == 36


def test_no_bar_without_a_terminal_or_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # makes its import fail
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda answer=is_terminal: answer, raising=False)
        with progress_bar(10, "work") as advance:
            advance(3)
