"""The examples in the package's docstrings."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["headroom", "_errors", "_optim", "_scaler", "_tensor"])
def test_docstrings(module):
    name = module if module == "headroom" else f"headroom.{module}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_has_a_docstring():
    import headroom

    for name in headroom.__all__:
        thing = getattr(headroom, name)
        assert name == "__version__" or thing.__doc__, name
