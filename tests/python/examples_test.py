"""The docstrings of the package: every public name has one, and their examples run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["headroom", "_errors", "_optim", "_scaler", "_tensor", "_tools"])
def test_docstring_examples_run(module):
    name = module if module == "headroom" else f"headroom.{module}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_has_a_docstring():
    import headroom

    for name in headroom.__all__:
        value = getattr(headroom, name)
        assert name == "__version__" or value.__doc__, name
