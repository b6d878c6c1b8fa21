"""``python -m headroom state FILE``: shows the state of a scaler in a file, and converts it to another layout."""

from __future__ import annotations

import argparse
import collections
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from typing import Any, Optional

from headroom import _layouts, _pickles
from headroom._core import ScalePolicy, ScaleState
from headroom._errors import Error
from headroom._files import replacing

_MOST_OBJECTS = 10_000_000
_MOST_JSON = 1 << 26


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headroom state", description="Show the state of a loss scaler that is in a checkpoint, or convert it.",
        epilog="FILE is written by torch.save, pickle, Keras (.keras, .weights.h5) or as JSON. Nothing in it is run.")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--to", metavar="LAYOUT", choices=list(_layouts.WRITERS),
                        help="print the state in this layout, as JSON: " + ", ".join(_layouts.WRITERS))
    parser.add_argument("--out", metavar="FILE", help="write it to this file: as JSON if it ends in .json, "
                        "else with torch.save")
    options = parser.parse_args(arguments)
    if options.out and not options.to:
        parser.error("--out needs --to")
    try:
        found = [(place, _layouts.layout_of(layout), _layouts.read(layout))
                 for place, layout in _states(_load(options.file))]
        if not found:
            raise ValueError("it contains no state of a loss scaler")
        if options.to is None:
            for place, layout, state in found:
                _show(place, str(layout), state)
        else:
            _convert(found, options.to, options.out)
    except (ValueError, OSError, Error, MemoryError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"headroom: {options.file}: {' '.join(reason.split()) or type(error).__name__}", file=sys.stderr)
        return 2
    return 0


def _load(path: str) -> Any:
    """What a file contains, as plain data. Raises ValueError or OSError."""
    with open(path, "rb") as file:
        try:
            return _parse(file)
        except (ValueError, OSError, MemoryError, Error):
            raise
        except Exception:  # the libraries raise anything for a broken file
            raise ValueError("it is not a file of torch.save, pickle, Keras or JSON, or it is broken") from None


def _parse(file: Any) -> Any:
    start = file.read(8)
    file.seek(0)
    if start == b"\x89HDF\r\n\x1a\n":
        return _keras_variables(file)
    if start.lstrip()[:1] == b"{":
        return json.loads(file.read(_MOST_JSON))
    if start[:4] == b"PK\3\4":
        with zipfile.ZipFile(file) as archive:
            if "model.weights.h5" in archive.namelist():
                policy = _keras_policy(archive.read("config.json"))
                return _keras_variables(io.BytesIO(archive.read("model.weights.h5")), policy)
            return _pickles.load_archive(archive)
    return _pickles.load(file)


def _keras_policy(config: bytes) -> Optional[str]:
    """The policy of a model's headroom.keras.LossScaleOptimizer."""
    try:
        optimizer = json.loads(config)["compile_config"]["optimizer"]
        return optimizer["config"]["policy"] if optimizer["registered_name"].startswith("headroom>") else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _keras_variables(file: Any, policy: Optional[str] = None) -> Any:
    """Keras saves an optimizer's variables by number: iteration and learning rate, then the counter and the scale
    of a LossScaleOptimizer, and for headroom.keras the numbers of its state."""
    try:
        import h5py
    except ImportError:
        raise ValueError("reading a file of Keras needs h5py, which comes with Keras") from None
    with h5py.File(file, "r") as store:
        saved = store.get("optimizer/vars", {})
        if policy is not None:
            return {"headroom": _layouts.unpack(ScalePolicy(policy), saved["4"][:64].tolist()).save()}
        scaler = [saved[index] for index in ("2", "3") if index in saved]
        if [(each.shape, each.dtype.kind) for each in scaler] != [((), "i"), ((), "f")]:
            return None  # another optimizer
        return {"step_counter": int(scaler[0][()]), "dynamic_scale": float(scaler[1][()])}


def _states(content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dictionary that is a scaler's state, with its place in the file. Not recursive, because a file may be
    nested to any depth, or contain itself."""
    waiting, seen = collections.deque([("", content)]), set()
    while waiting:
        place, item = waiting.popleft()
        if isinstance(item, _pickles.Unknown):
            item = item.fields
        if not isinstance(item, (dict, list, tuple)) or id(item) in seen:
            continue
        seen.add(id(item))
        if len(seen) > _MOST_OBJECTS:
            raise ValueError("it has more parts than any checkpoint")
        if isinstance(item, dict) and _layouts.layout_of(item):
            yield place or "the whole file", item
            continue
        parts = item.items() if isinstance(item, dict) else enumerate(item)
        waiting += [(f"{place}.{key}".lstrip("."), part) for key, part in parts]


def _show(place: str, layout: str, state: ScaleState) -> None:
    print(f"{place}: {layout}")
    print(f"  policy {state.policy}")
    for name, value in state.numbers.items():
        print(f"  {name} {value:.9g}")


def _convert(found: list[tuple[str, Optional[str], ScaleState]], layout: str, path: Optional[str]) -> None:
    state = found[0][2]
    if any(other != state for _, _, other in found):
        places = ", ".join(place for place, _, _ in found)
        raise ValueError(f"it contains several scalers in different states ({places}); convert them one by one")
    written = _layouts.write(state, layout)
    text = json.dumps(written, indent=2) + "\n"
    if path is None:
        print(text, end="")
    else:
        content = text.encode() if path.endswith(".json") else _torch_file(written)
        with replacing(path) as file:
            file.write(content)
    lost = _lost(state, written)
    if lost:
        print(f"headroom: the layout {layout} does not contain {', '.join(lost)}", file=sys.stderr)


def _lost(state: ScaleState, written: dict[str, Any]) -> list[str]:
    """Names of settings and numbers that are different when the layout is read back."""
    again = next(_layouts.read(layout) for _, layout in _states(written))
    a, b = (json.loads(each.save()) for each in (state, again))
    return [name for part in ("policy", "state") for name, value in a[part].items()
            if b[part].get(name) != value and name not in ("init_scale", "pending")]


def _torch_file(written: dict[str, Any]) -> bytes:
    try:
        import torch
    except ImportError:
        raise ValueError("writing a file of torch.save needs PyTorch; use a name that ends in .json") from None
    if "hysteresis_tracker" in written:  # Megatron's scale is a tensor
        written = {**written, "scale": torch.tensor([written["scale"]])}
    file = io.BytesIO()
    torch.save(written, file)
    return file.getvalue()
