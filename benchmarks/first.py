"""A process that reads one box and says so: ``python -m benchmarks.first SYSTEM FOLDER Z Y X``, the box's first voxel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.systems import SYSTEMS


def main() -> None:
    name, folder, *corner = sys.argv[1:]
    z, y, x = (slice(int(at), int(at) + 64) for at in corner)
    voxels = SYSTEMS[name](Path(folder)).read((z, y, x))
    os.write(1, b"%d\n" % voxels[0, 0, 0])


if __name__ == "__main__":
    main()
