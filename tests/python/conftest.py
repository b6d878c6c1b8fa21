"""HEADROOM_TEST_DEVICE=cuda runs the PyTorch tests there: new tensors and layers are made on it."""

import os

import pytest

try:
    import torch
except ImportError:
    torch = None


def pytest_configure(config):
    if torch is not None:
        torch.set_default_device(os.environ.get("HEADROOM_TEST_DEVICE", "cpu"))


@pytest.fixture(params=["by C", "in Python"])
def looking(request, monkeypatch):
    """Both ways of looking for tensors that have moved; the second is for a torch before 2.10."""
    if request.param == "in Python":
        from headroom.torch._memory import _Places

        monkeypatch.setattr("headroom.torch._optim.places", _Places)
