"""The examples in the docstrings of headroom.torch, in docs/python.md, docs/frameworks.md and docs/watch.md run as shown."""

import doctest
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
EXAMPLES = [(name, *block) for name in ("python.md", "frameworks.md", "watch.md")
            for block in BLOCK.findall((DOCS / name).read_text())]


@pytest.mark.parametrize("module", ["", "._optim", "._rules", "._scaler", "._memory", "._recorder", "._watch", "._islands"])
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module("headroom.torch" + module)).failed == 0


@pytest.mark.parametrize("page, code, expected", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_print_what_the_page_shows(page, code, expected, tmp_path):
    """Each as a program of its own: frameworks keep global state."""
    program = tmp_path / "example.py"
    program.write_text(code)
    shown = subprocess.run([sys.executable, program], cwd=tmp_path, text=True, capture_output=True)
    lines = [line for line in shown.stdout.splitlines(True) if not line.startswith("{'train_runtime'")]
    assert "".join(lines) == expected, (page, shown.stdout, shown.stderr)


def test_every_page_has_examples():
    assert [page for page, _, _ in EXAMPLES].count("python.md") == 3
    assert "watch.md" in [page for page, _, _ in EXAMPLES]
