"""Fixtures. HEADROOM_TEST_DEVICE=cuda makes CUDA the default device of the PyTorch tests."""

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
def move_detection(request, monkeypatch):
    """Runs a test with both detectors of moved tensors; the one in Python is for torch before 2.10."""
    if request.param == "in Python":
        from headroom.torch._memory import _Places

        monkeypatch.setattr("headroom.torch._optim.places", _Places)
