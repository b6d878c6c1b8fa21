#!/usr/bin/env python3
"""Runs the tests of the Python package: run.py [torch] [pytest arguments]. Without `torch` those that
need no PyTorch; with it those that do, or exit code 77 and the reason where it cannot be imported."""

import pathlib
import sys

import pytest


def main() -> int:
    with_torch = sys.argv[1:2] == ["torch"]
    if with_torch:
        try:
            import headroom.torch  # noqa: F401
        except ImportError as error:
            print(f"skipped: {error}")
            return 77
    files = sorted(pathlib.Path(__file__).parent.glob("*_test.py"))
    chosen = [str(file) for file in files if file.name.startswith("torch_") == with_torch]
    return pytest.main(["-q", "-p", "no:cacheprovider", *chosen, *sys.argv[2 if with_torch else 1:]])


if __name__ == "__main__":
    sys.exit(main())
