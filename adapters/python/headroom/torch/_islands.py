"""keep_fp32: modules that compute in FP32 while the rest of the model runs under autocast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from headroom._errors import make


class _Fp32Forward:
    """Replaces the forward of a module. An object and not a closure, so that models can be copied and pickled."""

    def __init__(self, module: torch.nn.Module, cast_outputs: bool) -> None:
        self.module = module
        self.before = module.__dict__.get("forward")  # an earlier replacement
        self.cast_outputs = cast_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        small = [each.dtype for each in leaves if isinstance(each, torch.Tensor) and _is_16_bit(each)]
        given = small[0] if small else None
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            args, kwargs = _cast(args), _cast(kwargs)
            if self.before is not None:
                result = self.before(*args, **kwargs)
            else:
                result = type(self.module).forward(self.module, *args, **kwargs)
        return _cast(result, given) if self.cast_outputs and given is not None else result


def _is_16_bit(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _cast(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Casts floating-point tensors, also in tuples, lists, dicts and the outputs of Hugging Face's models."""

    def cast(each: Any) -> Any:
        is_cast = isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != torch.float64
        return each.to(dtype) if is_cast else each

    return tree_map(cast, value)


class Fp32Modules:
    """What ``keep_fp32()`` has changed; ``remove()`` undoes it."""

    def __init__(self, forwards: list[_Fp32Forward]) -> None:
        self._forwards = forwards

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [forward.module for forward in self._forwards]

    def remove(self) -> None:
        for forward in self._forwards:
            outer, now = None, forward.module.__dict__.get("forward")
            while isinstance(now, _Fp32Forward) and now is not forward:  # of later calls
                outer, now = now, now.before
            if now is not forward:
                continue
            if outer is not None:
                outer.before = forward.before
            elif forward.before is None:
                del forward.module.forward
            else:
                forward.module.forward = forward.before  # type: ignore[method-assign]
        self._forwards = []


def keep_fp32(model: torch.nn.Module, names: Iterable[str], *, cast_outputs: bool = False) -> Fp32Modules:
    """Lets the named modules compute in FP32 under autocast: inputs are cast to FP32 and autocast is off inside.
    ``watch.report().islands()`` proposes names.

    Results stay in FP32, because a result that does not fit into FP16 would overflow when it is cast back; autocast
    casts it again where the next operation wants FP16. ``cast_outputs=True`` casts it to the type of the inputs, for
    code that needs it. Raises, changing nothing, for unknown names and for modules whose parameters are 16-bit.

    >>> import torch, headroom.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> islands = headroom.torch.keep_fp32(model, ["1"])
    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     model(torch.ones(1, 2)).dtype
    torch.float32
    >>> islands.remove()
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    forwards = []
    for name in dict.fromkeys([names] if isinstance(names, str) else names):
        if not name:
            raise make("invalid argument", "The name '' is the whole model; train it without autocast instead.")
        if name not in modules:
            raise make("invalid argument", f"The model has no module {name!r}.")
        small = next((key for key, param in modules[name].named_parameters() if _is_16_bit(param)), None)
        if small is not None:
            raise make("unsupported", f"{name}.{small} is a 16-bit parameter; keep_fp32 is for FP32 models under autocast. "
                       f"Convert the module with .float() before the optimizer is made.")
        forwards.append(_Fp32Forward(modules[name], cast_outputs))
    for forward in forwards:
        forward.module.forward = forward  # type: ignore[method-assign]
    return Fp32Modules(forwards)
