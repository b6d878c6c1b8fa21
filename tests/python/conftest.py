"""HEADROOM_TEST_DEVICE=cuda runs the PyTorch tests there: new tensors and layers are made on it."""

import os

try:
    import torch
except ImportError:
    torch = None


def pytest_configure(config):
    if torch is not None:
        torch.set_default_device(os.environ.get("HEADROOM_TEST_DEVICE", "cpu"))
