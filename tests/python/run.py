#!/usr/bin/env python3
"""Runs the tests of the Python package: run.py [torch] [pytest arguments].

Without `torch`, runs the tests that do not need PyTorch. With `torch`, runs those that do, in the interpreter named by
HEADROOM_TORCH_PYTHON (set by ./test) or else in this one. If that interpreter has no PyTorch, the exit code is 77,
which ctest reports as skipped. HEADROOM_TEST_RESULTS names a file to which the counts are written."""

import collections
import os
import pathlib
import sys


class OutcomeCounter:
    """A pytest plugin that counts outcomes as pytest's own summary does."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    def __str__(self) -> str:
        names = ("passed", "failed", "skipped")
        return ", ".join(f"{self.outcomes[name]} {name}" for name in names)


def main() -> int:
    with_torch = sys.argv[1:2] == ["torch"]
    if with_torch:
        python = os.environ.pop("HEADROOM_TORCH_PYTHON", "")
        if python:
            os.execv(python, [python, *sys.argv])
        try:
            import headroom.torch  # noqa: F401
        except ImportError as error:
            print(f"skipped: {error}")
            return 77
    import pytest  # imported here because execv above may have changed the interpreter

    files = sorted(pathlib.Path(__file__).parent.glob("*_test.py"))
    chosen = [str(file) for file in files if file.name.startswith("torch_") == with_torch]
    counts = OutcomeCounter()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", *chosen, *sys.argv[2 if with_torch else 1 :]], [counts]
    )
    if results := os.environ.get("HEADROOM_TEST_RESULTS"):
        pathlib.Path(results).write_text(f"{counts}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
