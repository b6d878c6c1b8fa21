"""Checkpoint files that survive crashes, full disks and changed bits."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Union

import torch

from headroom._errors import make
from headroom._files import replacing

_MARK = b"headroom"
_DIGEST_SIZE = 32


class _Hashed:
    """A file for torch.save that computes the digest of what is written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def save(state: Any, path: Union[str, os.PathLike[str]], **options: Any) -> None:
    """``torch.save`` to a file that is complete or not there: it is written beside ``path``, synced, and put in its
    place. An error, a full disk or a killed process leaves the old file as it was. Any version of ``torch.load``
    reads the file; ``load`` below also notices changed bits."""
    with replacing(path) as file:
        hashed = _Hashed(file)
        torch.save(state, hashed, **options)
        file.write(_MARK + hashed.digest.digest())


def load(path: Union[str, os.PathLike[str]], **options: Any) -> Any:
    """``torch.load`` of a file that ``save`` made, after comparing its digest. Raises ``headroom.Error`` if the file
    was cut, changed, or made by something else."""
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    trailer = len(_MARK) + _DIGEST_SIZE
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - trailer
        while left > 0:
            block = file.read(min(left, 1 << 20))
            digest.update(block)
            left -= len(block)
        if left < 0 or file.read() != _MARK + digest.digest():
            raise make("bad state", f"{os.fspath(path)!r} was cut or changed, or was not made by headroom.torch.save; use "
                       "the checkpoint before it.")
    return torch.load(path, **options)
