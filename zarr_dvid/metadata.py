"""The documents and coordinate arrays of the hierarchy, made from an export's scales.

Zarr v3 metadata with OME-Zarr 0.5 multiscales in the root. Each scale is a group of its own, since arrays of several sizes
that share their dimensions' names can't be one xarray data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zarr_dvid.block import CHUNK_SHAPE, ShapeZYX
from zarr_dvid.codec import DvidBlockCodec
from zarr_dvid.voxels import VALUES, Values

AXES = ("z", "y", "x")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the voxels of the scales are.

    Attributes:
        shapes: Voxels (z, y, x) of each scale that is there, by its number.
        voxel_size: Of scale 0, (z, y, x), in `unit`.
        unit: "nanometer", or "voxel" (of scale 0) where the voxel size is not known.
    """

    shapes: Mapping[int, ShapeZYX]
    voxel_size: tuple[float, float, float]
    unit: str

    def scale_factors(self, level: int) -> list[float]:
        """Size of a voxel of a scale."""
        return [size * 2**level for size in self.voxel_size]

    def translation(self, level: int) -> list[float]:
        """Centre of the first voxel of a scale, that of scale 0 being the origin."""
        return [size * (2**level - 1) / 2 for size in self.voxel_size]

    def coordinates(self, level: int, axis: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Centres of a scale's voxels along an axis, float64."""
        i = AXES.index(axis)
        n_voxels = self.shapes[level][i]
        return self.translation(level)[i] + self.scale_factors(level)[i] * np.arange(n_voxels, dtype="<f8")


def documents(grid: Grid, name: str) -> dict[str, Document]:
    """All of the hierarchy's documents, by the path of their group or array; "" is the root.

    The root and each scale hold those below them as inline consolidated metadata, so that opening reads one document.
    """
    found: dict[str, Document] = {}
    for level, shape in grid.shapes.items():
        below: dict[str, Document] = {values: _array_document(shape, values) for values in VALUES}
        for i, axis in enumerate(AXES):
            below[axis] = _coordinate_document(shape[i], axis, grid.unit)
        found[f"s{level}"] = _group_document({}, below)
        found |= {f"s{level}/{path}": document for path, document in below.items()}
    return {"": _group_document({"ome": _multiscales(grid, name)}, found), **found}


def _group_document(attributes: Document, below: Mapping[str, Document]) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes,
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(below)},
    }


def _array_document(shape: ShapeZYX, values: Values) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "uint64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(CHUNK_SHAPE)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [DvidBlockCodec(values=values, framing="record").to_dict()],
        "attributes": {},
        "dimension_names": list(AXES),
    }


def _coordinate_document(n_voxels: int, axis: str, unit: str) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [n_voxels],
        "data_type": "float64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [n_voxels]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"long_name": f"voxel centre along {axis}", "units": unit},
        "dimension_names": [axis],
    }


def _multiscales(grid: Grid, name: str) -> Document:
    axes: list[Document] = [{"name": axis, "type": "space"} for axis in AXES]
    if grid.unit != "voxel":  # OME-Zarr knows units of length alone
        axes = [{**axis, "unit": grid.unit} for axis in axes]

    def datasets(values: Values) -> list[Document]:
        return [
            {
                "path": f"s{level}/{values}",
                "coordinateTransformations": [
                    {"type": "scale", "scale": grid.scale_factors(level)},
                    {"type": "translation", "translation": grid.translation(level)},
                ],
            }
            for level in grid.shapes
        ]

    views = [{"name": f"{name} {values}", "axes": axes, "datasets": datasets(values)} for values in VALUES]
    return {"version": "0.5", "multiscales": views}
