"""Reads the structure of pickles and of PyTorch's files without running anything that they name.

A pickle is a program: it names functions, which an ordinary unpickler imports and calls. This reader puts an
inert ``Unknown`` in the place of every class and function, except for ordered dictionaries and tensors of PyTorch,
of which those with one element become numbers. Neither PyTorch nor the class of a saved object has to be installed,
and the data of other tensors is not read."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from typing import Any, Optional

MOST_STRUCTURE = 1 << 28  # bytes of a pickle; tensors are stored beside it
_OLD_TORCH = 0x1950A86A20F9469CFC6C  # the first of several pickles
_FORMATS = {"FloatStorage": "f", "DoubleStorage": "d", "HalfStorage": "e", "LongStorage": "q", "IntStorage": "i",
            "ShortStorage": "h", "CharStorage": "b", "ByteStorage": "B"}


class Unknown:
    """An object of a class that is not imported. ``fields`` is its pickled state, if that is a dictionary."""

    fields: dict[Any, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Unknown:  # pickles do not always call __init__
        unknown = super().__new__(cls)
        unknown.fields = {}
        return unknown

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)

    # What a pickle does to subclasses of containers.
    def __setitem__(self, key: Any, value: Any) -> None:
        self.fields[key] = value

    def append(self, item: Any) -> None:
        pass

    extend = add = append


class _Storage:
    """The place of a tensor's elements in the archive."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name


class _Reader(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """The unpickler written in Python: the one in C allocates memory of any size that a pickle asks for."""

    def __init__(self, file: Any, archive: Optional[_Archive]) -> None:
        super().__init__(file)
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        # A class of its own for each, whose name a storage's type is known by.
        return type(str(name), (Unknown,), {})

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], type):
            return _Storage(pid[1].__name__, str(pid[2]))
        return Unknown()

    def _tensor(self, storage: Any, offset: Any, size: Any, *rest: Any) -> Any:
        if not isinstance(storage, _Storage) or not isinstance(size, tuple) or not isinstance(offset, int):
            return Unknown()
        if self.archive is None or any(length != 1 for length in size):
            return Unknown()
        return self.archive.element(storage, offset)


class _Archive:
    """A file of ``torch.save``: a zip with a pickle and the tensors' bytes."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self.archive, self.root = archive, root
        order = root + "byteorder"
        self.order = ">" if order in archive.namelist() and archive.read(order) == b"big" else "<"

    def element(self, storage: _Storage, offset: int) -> Any:
        code = _FORMATS.get(storage.kind)
        if code is None or offset < 0:
            return Unknown()
        width = struct.calcsize(code)
        with self.archive.open(f"{self.root}data/{storage.name}") as file:
            file.seek(offset * width)
            data = file.read(width)
        return struct.unpack(self.order + code, data)[0]


def load_archive(archive: zipfile.ZipFile) -> Any:
    """The object in a file of ``torch.save``, with Unknown for what is not plain data. Raises ValueError, with a
    sentence, for another archive, and any exception for a broken one."""
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it is an archive, but not one of torch.save or Keras")
    if pickles[0].file_size > MOST_STRUCTURE:
        raise ValueError("its pickle is larger than that of any model")
    root = pickles[0].filename[: -len("data.pkl")]
    return _Reader(io.BytesIO(archive.read(pickles[0])), _Archive(archive, root)).load()


def load(file: Any) -> Any:
    """The object in a pickle, as above."""
    content = _Reader(io.BytesIO(file.read(MOST_STRUCTURE)), None).load()
    if content == _OLD_TORCH:
        raise ValueError("it has the format of PyTorch before 1.6; load it and save it again")
    return content
