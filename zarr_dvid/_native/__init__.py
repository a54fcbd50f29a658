"""The native core, or a plain word on how to get it."""

try:
    from zarr_dvid import _core as core
except ImportError as error:
    raise ImportError(
        f"zarr-dvid's compiled core could not be loaded ({error}). Install a wheel with `python3 -m pip install zarr-dvid`,"
        " or build it from a checkout with `python3 -m pip install .`, which needs a C++17 compiler."
    ) from error

__all__ = ["core"]
