"""The examples in the docstrings of headroom.torch, in README and in docs/ print what is shown."""

import doctest
import importlib
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
from blocks import blocks, pages  # noqa: E402

EXAMPLES = [(block.page, block.code, block.output) for page in pages() for block in blocks(page)
            if block.language == "python" and block.output is not None]


@pytest.mark.parametrize("module", ["", "._optim", "._rules", "._scaler", "._memory", "._recorder", "._watch", "._islands"])
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module("headroom.torch" + module)).failed == 0


@pytest.mark.parametrize("page, code, expected", EXAMPLES, ids=[f"{page}-{i}" for i, (page, _, _) in enumerate(EXAMPLES)])
def test_examples_print_what_the_page_shows(page, code, expected, tmp_path):
    """Each as a program of its own: frameworks keep global state."""
    program = tmp_path / "example.py"
    program.write_text(code)
    shown = subprocess.run([sys.executable, program], cwd=tmp_path, text=True, capture_output=True)
    lines = [line for line in shown.stdout.splitlines(True) if not line.startswith("{'train_runtime'")]
    assert "".join(lines) == expected, (page, shown.stdout, shown.stderr)


def test_every_page_has_examples():
    names = [page for page, _, _ in EXAMPLES]
    assert names.count("docs/python.md") == 3
    assert {"README.md", "docs/watch.md", "docs/frameworks.md", "docs/migrate/torch-amp.md"} <= set(names)
