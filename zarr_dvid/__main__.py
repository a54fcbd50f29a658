"""`python3 -m zarr_dvid` is the command `zarr-dvid`."""

import sys

from zarr_dvid.cli import main

if __name__ == "__main__":
    sys.exit(main())
