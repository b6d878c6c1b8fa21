"""The examples in the docstrings of headroom.torch and in docs/python.md run as shown."""

import doctest
import importlib
import pathlib
import re

import pytest

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.mark.parametrize("module", ["", "._optim", "._rules", "._scaler", "._memory"])
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module("headroom.torch" + module)).failed == 0


@pytest.mark.parametrize("index", range(3))
def test_guide_examples_print_what_the_guide_shows(index, capsys):
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", GUIDE.read_text(), re.DOTALL)
    code, expected = blocks[index]
    exec(compile(code, str(GUIDE), "exec"), {})
    assert capsys.readouterr().out == expected
    assert len(blocks) == 3
