"""headroom.torch.save and load."""

import os

import torch

import headroom.torch


def test_saved_files_have_the_permissions_of_other_files(tmp_path):
    before = os.umask(0o022)
    try:
        headroom.torch.save({"weight": torch.ones(2)}, tmp_path / "saved.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "saved.pt").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["saved.pt"]
    assert headroom.torch.load(tmp_path / "saved.pt")["weight"].tolist() == [1.0, 1.0]
