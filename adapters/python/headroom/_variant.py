"""Chooses the compiled module: a wheel has one without CUDA, and one for each version of CUDA that it supports.

Those are in the folders cuda12 and cuda13. The newest one that the machine's driver can run is used, but the one for
CUDA 12 if a GPU is older than 7.5 (V100), for which CUDA 13 has no code. The environment variable HEADROOM_CUDA chooses
another: "off", "12" or "13". A package that was built from source has one module, and this does nothing. Imported before
headroom._core.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from typing import Optional

_HERE = pathlib.Path(__file__).parent
_FIRST_OF_CUDA_13 = (7, 5)  # the lowest compute capability that it compiles for


def variants() -> dict[int, pathlib.Path]:
    """The modules of this package that support CUDA, by its major version."""
    found = {}
    for major in (12, 13):
        path = _HERE / f"cuda{major}" / "_core.abi3.so"
        if path.exists():
            found[major] = path
    return found


def choose(
    available: list[int], driver: Optional[int], wanted: str, oldest: Optional[tuple[int, int]] = None
) -> Optional[int]:
    """The variant to load, or None for the one without CUDA. ``driver`` is the newest version of CUDA that the driver
    supports, such as 13; None if there is no driver. ``oldest`` is the lowest compute capability of the GPUs, if known."""
    if wanted in ("off", "0"):
        return None
    if wanted:
        if not wanted.isdecimal() or int(wanted) not in available:
            names = ", ".join(["off", *(str(major) for major in available)])
            raise ImportError(f"HEADROOM_CUDA is {wanted!r}; this package has: {names}.")
        return int(wanted)
    usable = [major for major in available if driver is not None and major <= driver]
    if 12 in usable and oldest is not None and oldest < _FIRST_OF_CUDA_13:
        return 12
    return max(usable, default=None)


def _load() -> None:
    found = variants()
    if not found or "headroom._core" in sys.modules:
        return
    wanted = os.environ.get("HEADROOM_CUDA", "")
    driver = oldest = None
    if not wanted:
        from headroom import _driver

        driver = _driver.cuda_version() // 1000 or None
        if driver is not None and driver >= 13 and 12 in found:
            oldest = min(_driver.capabilities(), default=None)
    major = choose(sorted(found), driver, wanted, oldest)
    if major is None:
        return
    loader = importlib.machinery.ExtensionFileLoader("headroom._core", str(found[major]))
    spec = importlib.util.spec_from_loader("headroom._core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["headroom._core"] = module
    sys.modules["headroom"]._core = module  # type: ignore[attr-defined]


_load()
