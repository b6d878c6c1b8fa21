"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Union


@contextmanager
def replacing(path: Union[str, os.PathLike[str]]) -> Iterator[Any]:
    """A new file beside ``path``, which is synced and put in its place at the end. An error, a full disk or a killed
    process leaves the old file as it was."""
    path = os.path.abspath(path)
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    file = open(temporary, "xb")  # with the permissions of any new file; those of mkstemp() exclude other users
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
