"""A small export to try things on, and its first picture."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import zarr_dvid
from zarr_dvid.picture import save_label_image
from zarr_dvid.synthetic import neurite_volume
from zarr_dvid.writer import write_export

_SHAPE = (128, 256, 256)
_VOXEL_SIZE_NM = 8.0


def run_demo(directory: Path | None = None) -> Path:
    """Writes a small export, opens it as Zarr, prints what is there, and saves a slice as a picture.

    Args:
        directory: Where to write; by default a temporary directory, which stays.

    Returns:
        The picture.

    Raises:
        ExportError: There is something in `directory` already.
    """
    directory = Path(tempfile.mkdtemp(prefix="zarr-dvid-demo-")) if directory is None else directory
    export = directory / "export"
    print(f"Writing a small export to {export} …")
    supervoxels, mapping = neurite_volume(_SHAPE)
    write_export(supervoxels, export, mapping=mapping, scales=3, shard_chunks=4, voxel_size=_VOXEL_SIZE_NM)

    root = zarr_dvid.open(export)
    print(f"\n>>> root = zarr_dvid.open({str(export)!r})\n>>> root.tree()")
    print(root.tree())
    z = _SHAPE[0] // 2
    plane = np.asarray(root["s0/labels"][z])  # type: ignore[index] # it is an array
    print(f">>> root['s0/labels'][{z}]\nuint64 {plane.shape}, {len(np.setdiff1d(plane, 0))} bodies")
    picture = directory / "slice.png"
    save_label_image(picture, plane)
    print(f"\nA picture of that slice: {picture}")
    return picture
