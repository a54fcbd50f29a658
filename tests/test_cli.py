"""The command `zarr-dvid`, as a user runs it and reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exports import CountingReader, volume_info, write_shard
from indexed import put, shards_of
from PIL import Image

import zarr_dvid
from zarr_dvid.cli import main
from zarr_dvid.describe import describe
from zarr_dvid.hierarchy import Hierarchy
from zarr_dvid.picture import label_colors
from zarr_dvid.reader import LocalReader


@pytest.fixture(scope="module")
def volume() -> np.ndarray:
    volume = np.zeros((70, 130, 200), np.uint64)
    volume[10:60, 20:120, 30:150] = 7
    volume[30:, 64:, 100:] = 10**10
    return volume


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, volume: np.ndarray) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "export"
    zarr_dvid.write_export(volume, folder, mapping={7: 70}, scales=2, shard_chunks=2, voxel_size=(30, 8, 8))
    return folder


def test_info_for_people(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(export)]) == 0
    text = capsys.readouterr().out
    for part in (
        "70 x 130 x 200",
        "35 x 65 x 100",
        "30 x 8 x 8 nm",
        "csv x,y,z,offset,size,batch_idx",
        "zstd blocks",
        "info",
    ):
        assert part in text
    assert "could not be told" not in text


def test_info_for_programs(export: Path, volume: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(export), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scale = found["scales"][0]
    chunks = [volume[z : z + 64, y : y + 64, x : x + 64] for z in (0, 64) for y in (0, 64, 128) for x in (0, 64, 128, 192)]
    n_blocks = sum(bool(chunk.any()) for chunk in chunks)
    files = [path for path in (export / "s0").iterdir() if path.suffix in (".arrow", ".csv")]
    assert found["voxel_size_nm"] == [30, 8, 8]
    assert found["problems"] == []
    assert scale["shape"] == list(volume.shape)
    assert scale["shape_from"] == "info"
    assert (scale["blocks"], scale["chunks"]) == (n_blocks, len(chunks))
    assert scale["occupancy"] == pytest.approx(n_blocks / len(chunks))
    assert scale["shards"] == sum(path.suffix == ".arrow" for path in files)
    assert scale["bytes_on_disk"] == sum(path.stat().st_size for path in files)
    assert scale["bytes_decoded"] == n_blocks * 64**3 * 8
    assert scale["problems"] == []


def test_info_says_what_is_wrong(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(export, copy)
    (copy / "export.log").unlink()
    (copy / "info").unlink()
    broken = sorted((copy / "s0").glob("*.csv"))[-1]
    broken.write_bytes(b"")
    assert main(["info", str(copy)]) == 0
    text = capsys.readouterr().out
    assert f"s0/{broken.name}: the index is empty" in text
    assert "the voxel size is not known" in text
    assert "whether the export was finished can't be told" in text


def test_info_of_the_real_shard(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = shared_data / "mcns" / "mcns-ng-specs.json"
    assert main(["info", str(shared_data / "mcns" / "export"), "--info", str(spec), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(scale["scale"], scale["blocks"]) for scale in found["scales"]] == [(1, 258)]
    assert found["scales"][0]["shape"] == [67288, 39159, 47044]
    assert found["scales"][0]["dialects"] == {"Arrow stream, csv x,y,z,rec, zstd blocks": 1}
    assert found["voxel_size_nm"] == [8, 8, 8]


@pytest.mark.parametrize("view", ["labels", "supervoxels"])
def test_slice(export: Path, volume: np.ndarray, tmp_path: Path, view: str) -> None:
    picture = tmp_path / "slice.png"
    assert main(["slice", str(export), "--z", "40", "--y", "10:100", "--view", view, "-o", str(picture)]) == 0
    plane = volume[40, 10:100]
    if view == "labels":
        plane = np.where(plane == 7, np.uint64(70), plane)
    np.testing.assert_array_equal(np.asarray(Image.open(picture)), label_colors(plane))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["info", "no/such/place"], "no/such/place: there is no export here"),
        (["slice", "{export}", "--z", "70", "-o", "x.png"], "--z 70: scale 0 has planes 0 to 69"),
        (["slice", "{export}", "--scale", "5", "--z", "0", "-o", "x.png"], "there is no scale 5, only 0, 1"),
        (["slice", "{export}", "--z", "0", "--y", "500:600", "-o", "x.png"], "leave nothing of a plane of 130 x 200"),
        (["slice", "{export}", "--z", "0", "-o", "no/such/folder/x.png"], "no/such/folder/x.png"),
        (["info", "{export}", "--info", "missing.json"], "missing.json: the volume description is missing"),
        (["info", "nonsense://bucket"], "the URL can't be opened"),
        (["demo", "{export}/s0"], "export"),
    ],
)
def test_what_can_not_be_done_is_said_in_plain_words(
    export: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if arguments[0] == "demo":
        (export / "s0" / "export").mkdir()
        (export / "s0" / "export" / "s0").mkdir()
    assert main([argument.format(export=export) for argument in arguments]) == 1
    text = capsys.readouterr().err
    assert text.startswith("zarr-dvid: ")
    assert said in text
    assert "Traceback" not in text


def test_a_command_that_is_not_understood_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [],
        ["nonsense"],
        ["slice", "x", "--z", "one", "-o", "y"],
        ["slice", "x", "--z", "1", "--y", "5", "-o", "y"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    assert "is no range such as 100:200" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("info", "slice", "demo"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"examples:\n  zarr-dvid {command}" in capsys.readouterr().out


def test_demo_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zarr_dvid", "demo", "first"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "supervoxels (128, 256, 256) uint64" in done.stdout
    root = zarr_dvid.open(tmp_path / "first" / "export")
    plane = np.asarray(root["s0/labels"][64])
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "first" / "slice.png")), label_colors(plane))
    assert 50 < len(np.unique(plane)) < 1000
    assert sorted(root.group_keys()) == ["s0", "s1", "s2"]


def test_demo_makes_a_directory_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    picture = Path(capsys.readouterr().out.rsplit(": ", 1)[1].strip())
    assert picture.is_file()
    shutil.rmtree(picture.parent)


def test_info_counts_what_lies_past_the_end(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(shared_data / "exports/hazards/past-the-end")]) == 0
    text = capsys.readouterr().out
    assert "s0: 5 chunks in all lie past the end of the volume" in text
    assert "\n- s0/0_512_0.arrow: 1 chunks lie past the end of the volume of (10, 10, 10) chunks (x, y, z)" in text


def test_info_tells_what_is_left_of_a_killed_export(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(shared_data / "exports/hazards/killed"), "--json"]) == 0
    scale = json.loads(capsys.readouterr().out)["scales"][0]
    assert scale["shape"] is None
    assert "The shard itself starts with 402 whole records" in scale["problems"][0]


# ---- index


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_index_makes_one_and_says_when_it_is_up_to_date(
    tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path / "export", shards_of({"s0/0_0_0": [(0, 0, 0), (1, 2, 3)], "s0/512_0_0": [(8, 1, 1)]}))
    assert main(["index", str(folder), "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{folder / 'zarr-dvid-index'}: the index is done: 3 records of 2 shards in " in out
    assert main(["index", str(folder), "--jobs", "1", "--check", "records"]) == 0
    out = capsys.readouterr().out
    assert "was up to date already" in out
    assert "3 entries agree with their records" in out
    assert main(["index", str(folder), "-o", str(tmp_path / "other"), "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["shards"], document["records"], document["up_to_date"]) == (2, 3, False)
    assert document["bytes"] == sum(path.stat().st_size for path in (tmp_path / "other").iterdir())
    assert not cached.exists()


def test_index_refuses_what_it_can_not_do(tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(tmp_path / "export", shards_of({"s0/0_0_0": [(0, 0, 0)]}))
    for arguments, text in (
        ([str(tmp_path / "nowhere")], "there is no export here"),
        ([str(folder), "--jobs", "0"], "at least 1"),
        ([str(folder), "-o", "s3://bucket/x"], "local folder"),
        ([str(folder), "-o", str(folder)], "something else than an index"),
    ):
        assert main(["index", *arguments]) == 1
        assert text in capsys.readouterr().err


def test_info_counts_blocks_without_reading_a_shard(
    tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = shards_of({"s0/0_0_0": [(0, 0, 0), (1, 2, 3)], "s0/512_0_0": [(8, 1, 1)], "s0/0_512_0": [(0, 9, 0)]})
    files |= write_shard([]).files("s0/512_512_0")
    files |= {"s0/0_512_0.csv": b"", "info": json.dumps(volume_info((1024, 1024, 512))).encode()}
    folder = put(tmp_path / "export", files)
    assert main(["info", str(folder), "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert main(["index", str(folder), "-o", str(tmp_path / "index"), "--jobs", "1"]) == 0
    assert "1 shards can't be read" in capsys.readouterr().out
    assert main(["info", str(folder), "--json", "--index", str(tmp_path / "index")]) == 0
    document = json.loads(capsys.readouterr().out)
    for one in (document, without):
        one["scales"][0]["problems"].sort()
    assert document == without
    reader = CountingReader(LocalReader(folder))
    hierarchy = Hierarchy(lambda: reader, name="x", index=lambda: LocalReader(tmp_path / "index"))
    assert describe(hierarchy).scales[0].n_blocks == 3
    assert {path for method, path in reader.taken() if method == "read"} == {"info"}


def test_info_tells_of_an_index_that_is_out_of_date(
    tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path / "export", shards_of({"s0/0_0_0": [(0, 0, 0), (1, 2, 3)]}))
    assert main(["index", str(folder), "--jobs", "1"]) == 0
    put(folder, shards_of({"s0/512_0_0": [(8, 1, 1), (9, 1, 1)]}))
    capsys.readouterr()
    assert main(["info", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scales"][0]["blocks"] == 4
    assert any("out of date" in problem for problem in document["problems"])
