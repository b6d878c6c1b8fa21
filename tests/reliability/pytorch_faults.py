"""Shared by the faults that run with PyTorch: their registry, a small model and the outcome of a call."""
import re

import torch

INF, NAN = float("inf"), float("nan")
FAULTS = {}


def fault(function):
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def setup(optimizer=torch.optim.SGD, dtype=torch.float32, **options):
    w = torch.ones(4, dtype=dtype, requires_grad=True)
    options = {"lr": 0.1, **options}
    return w, optimizer([w], **options), torch.amp.GradScaler("cpu")


def step(w, optimizer, scaler, grad):
    """A step whose scaled gradient is `grad` x scale, or `grad` itself if that is not finite."""
    optimizer.zero_grad()
    loss = scaler.scale((w * torch.full_like(w, grad)).sum())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


def first_sentence(error):
    """The type and first sentence of an error, without source locations and addresses, which vary."""
    first = re.sub(r" ?\[[^\]]*[./][^\]]*\](:\d+)?", "", str(error).splitlines()[0].split(". ")[0]).strip()
    return f"{type(error).__name__}: {first}"


def outcome_of(call, otherwise):
    """("reported", sentence) if the call raises, else `otherwise`."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return "reported", first_sentence(error)
    return otherwise
