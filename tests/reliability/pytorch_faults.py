"""Shared by the faults that run with PyTorch: their registry, a small model and the outcome of a call.

The environment selects the scaler and the optimizers: HEADROOM_FAULTS_SCALER is torch (the default) or headroom,
HEADROOM_FAULTS_OPTIMIZER is plain (the default), foreach, fused or headroom."""
import functools
import os
import re

import torch

OURS = os.environ.get("HEADROOM_FAULTS_SCALER", "torch") == "headroom"
OPTIMIZER = os.environ.get("HEADROOM_FAULTS_OPTIMIZER", "plain")
if OURS:
    import headroom.torch

    GradScaler: type[torch.amp.GradScaler] = headroom.torch.GradScaler
    load, save = headroom.torch.load, headroom.torch.save
else:
    GradScaler = torch.amp.GradScaler
    load, save = torch.load, torch.save


def optimizer_class(name):
    """SGD or AdamW of the selected kind."""
    if OPTIMIZER == "headroom":
        return getattr(headroom.torch, name)
    flags = {} if OPTIMIZER == "plain" else {OPTIMIZER: True}
    return functools.partial(getattr(torch.optim, name), **flags)


SGD, AdamW = optimizer_class("SGD"), optimizer_class("AdamW")

INF, NAN = float("inf"), float("nan")
FAULTS = {}


def fault(function):
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def setup(dtype=torch.float32, **options):
    w = torch.ones(4, dtype=dtype, requires_grad=True)
    options = {"lr": 0.1, **options}
    return w, SGD([w], **options), GradScaler("cpu")


def skip_report(scaler):
    """How a user learns of a skipped step."""
    return str(scaler.report()) if OURS else "skipped; only the smaller scale shows it"


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
