"""A shard that is gone together with its index leaves one trace: export.log counts one more than are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import zarr_dvid


@pytest.fixture
def export(tmp_path: Path) -> Path:
    volume = np.ones((64, 64, 256), np.uint64)
    volume[..., 64:128] = 0  # absent, in the first shard
    volume[..., 192:] = 0
    folder = tmp_path / "export"
    zarr_dvid.write_export(volume, folder, shard_chunks=1)
    assert sorted(path.name for path in (folder / "s0").glob("*.arrow")) == ["0_0_0.arrow", "128_0_0.arrow"]
    return folder


def test_all_shards_there(export: Path) -> None:
    assert zarr_dvid.open(export)["s0/labels"][0, 0, ::64].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("url", ["{}", "dvid::file://{}"])
def test_a_lost_shard_is_no_zeros(export: Path, url: str) -> None:
    (export / "s0" / "128_0_0.arrow").unlink()
    (export / "s0" / "128_0_0.csv").unlink()
    root = zarr.open(url.format(export)) if "::" in url else zarr_dvid.open(export)
    labels = root["s0/labels"]
    assert labels[0, 0, 0] == 1
    for x in (64, 128, 192):  # by info each is a shard of its own: nobody knows which of them was lost
        with pytest.raises(zarr_dvid.MissingFileError, match="expected 2 shards, as export.log says, found 1") as caught:
            labels[0, 0, x]
        assert caught.value.chunk_xyz == (x // 64, 0, 0)


def test_without_a_spec_nothing_is_absent_any_more(export: Path) -> None:
    (export / "info").unlink()
    (export / "s0" / "128_0_0.arrow").unlink()
    (export / "s0" / "128_0_0.csv").unlink()
    labels = zarr_dvid.open(export)["s0/labels"]
    assert labels[0, 0, 0] == 1
    with pytest.raises(zarr_dvid.MissingFileError):
        labels[0, 0, 64]


def test_a_part_of_an_export_can_be_meant(export: Path) -> None:
    (export / "s0" / "128_0_0.arrow").unlink()
    (export / "s0" / "128_0_0.csv").unlink()
    (export / "export.log").unlink()
    assert zarr_dvid.open(export)["s0/labels"][0, 0, ::64].tolist() == [1, 0, 0, 0]


def test_an_export_that_is_being_written_says_so(export: Path) -> None:
    (export / ".writing.jsonl").write_text("{}\n")
    with pytest.warns(zarr_dvid.ExportWarning, match="still being written"):
        zarr_dvid.open(export)
