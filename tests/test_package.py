"""What an installed package has to bring along."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import zarr_dvid

ROOT = Path(__file__).parent.parent


def test_public_names_are_sorted_and_there() -> None:
    assert zarr_dvid.__all__ == sorted(zarr_dvid.__all__)
    assert all(hasattr(zarr_dvid, name) for name in zarr_dvid.__all__)


def test_entry_points_name_what_there_is() -> None:
    entries = metadata.distribution("zarr-dvid").entry_points
    found = {(entry.group, entry.name) for entry in entries}
    assert {("zarr.codecs", "dvid_block"), ("numcodecs.codecs", "dvid_block"), ("fsspec.specs", "dvid")} <= found
    assert ("console_scripts", "zarr-dvid") in found
    assert all(entry.load() is not None for entry in entries)


def test_a_missing_core_is_an_import_error_that_says_what_to_do() -> None:
    code = "import sys; sys.modules['zarr_dvid._core'] = None; import zarr_dvid"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: zarr-dvid's compiled core could not be loaded")
    assert "python3 -m pip install" in last


def test_types_are_shipped() -> None:
    package = Path(zarr_dvid.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


def test_reading_imports_neither_pandas_nor_pillow(tmp_path: Path) -> None:
    """They take longer to import than a first chunk takes to read."""
    write = "import numpy, zarr_dvid; zarr_dvid.write_export(numpy.ones((64, 64, 64), numpy.uint64), 'export')"
    subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True)
    code = (
        "import sys, zarr_dvid; zarr_dvid.open('export')['s0/labels'][0, 0, 0];"
        "print(sorted({'pandas', 'PIL', 'xarray', 'dask'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_readme_has_the_two_commands() -> None:
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("$ ")]
    assert commands == [
        "$ python3 -m pip install '.[cli]' && python3 -m zarr_dvid demo",
        "$ python3 -m pip install -e '.[test]' && python3 -m pytest",
    ]
