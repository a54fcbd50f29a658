"""Times of zarr-dvid: `python -m benchmarks`."""
