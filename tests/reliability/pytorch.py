#!/usr/bin/env python3
"""Runs each fault of the table in docs/reliability.md with PyTorch. Run it by hand where PyTorch is installed:
    python tests/reliability/pytorch.py > tests/reliability/pytorch.json
The outcome of a fault is one of
    fine       weights and state are correct, and there is nothing to report
    reported   refused or skipped, and the caller can detect it
    silent     weights are correct, but the run is stuck or loses precision, and nothing is reported
    corrupted  weights, the state or a checkpoint are wrong or lost"""
import json
import os
import resource
import sys
import tempfile
import threading
import warnings

import torch

import pytorch_ranks  # noqa: F401  registers its faults, as the next module does
import pytorch_tensors  # noqa: F401
from pytorch_faults import (
    FAULTS,
    INF,
    NAN,
    OURS,
    SGD,
    GradScaler,
    fault,
    load,
    outcome_of,
    save,
    setup,
    skip_report,
    step,
)


def expect_skipped(w, scaler):
    """Reported if the weights are still 1."""
    if (w == 1).all():
        return "reported", skip_report(scaler)
    return "corrupted", f"weights become {w[0].item()}"


@fault
def overflows_in_a_row():
    w, optimizer, scaler = setup()
    try:
        for _ in range(145):
            step(w, optimizer, scaler, INF)
    except RuntimeError as error:
        step(w, optimizer, scaler, 1.0)
        assert torch.allclose(w, torch.full((4,), 0.9))
        return "reported", str(error).split("; ")[0] + "; the clean step after it is right"
    step(w, optimizer, scaler, 1.0)
    if not torch.isfinite(w).all():
        return "corrupted", f"the scale is {scaler.get_scale():.3g}, its reciprocal inf; weights become {w[0].item()}"
    return "fine", ""


@fault
def first_momentum_step_overflows():
    for _ in range(50):  # the contents of uninitialised memory are random
        w, optimizer, scaler = setup(momentum=0.9, **({} if OURS else {"fused": True}))
        memory = [torch.full((4,), 7.0) for _ in range(100)]  # leaves nonzero values in freed memory
        del memory
        step(w, optimizer, scaler, INF)
        step(w, optimizer, scaler, 1.0)
        if not torch.allclose(w, torch.full((4,), 0.9)):
            return "corrupted", ("the momentum starts as uninitialised memory; "
                                 "weights are wrong after the next clean step")
    return "reported", "skipped, and the momentum starts with the first clean step"


@fault
def nan_after_unscale():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    w.grad[0] = NAN
    scaler.step(optimizer)
    return ("corrupted", "not checked again: weights become nan") if w.isnan().any() else expect_skipped(w, scaler)


@fault
def scale_of_zero():
    w = torch.ones(4, requires_grad=True)
    optimizer = SGD([w], lr=0.1)

    def use():
        scaler = GradScaler("cpu", init_scale=0.0)
        step(w, optimizer, scaler, 1.0)
    return outcome_of(use, None) or ("corrupted", f"accepted; weights become {w[0].item()}")


def train_with_loaded_scale(value):
    """The outcome if loading or the step after it raises, else None; and the weight and the scaler."""
    w, optimizer, scaler = setup()
    state = {**scaler.state_dict(), "scale": value}

    def use():
        scaler.load_state_dict(state)
        step(w, optimizer, scaler, 1.0)
    return outcome_of(use, None), w, scaler


@fault
def scale_of_nan_loaded():
    outcome, _, scaler = train_with_loaded_scale(NAN)
    return outcome or ("silent", f"accepted; the scale stays {scaler.get_scale()} and every step is skipped")


@fault
def scale_of_zero_loaded():
    outcome, w, _ = train_with_loaded_scale(0.0)
    return outcome or ("corrupted", f"accepted; weights become {w[0].item()}")


@fault
def scale_set_to_nan():
    w, optimizer, scaler = setup()
    step(w, optimizer, scaler, 1.0)
    outcome = outcome_of(lambda: scaler.update(NAN), None)
    step(w, optimizer, scaler, 1.0)
    assert not outcome or torch.allclose(w, torch.full((4,), 0.8))
    return outcome or ("silent", f"accepted; the scale is {scaler.get_scale()} and every step is skipped")


@fault
def parameter_in_two_optimizers():
    w, first, scaler = setup()
    second = SGD([w], lr=0.1)

    def use():
        scaler.scale(w.sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    right = 0.8
    outcome = outcome_of(use, None)
    what = f"unscaled twice: the second step is lost, weights are {w[0].item():.6f} and not {right}"
    return outcome or ("corrupted", what)


@fault
def unscaling_overflows():
    w = torch.ones(4, requires_grad=True)
    optimizer = SGD([w], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**-20)
    scaler.scale(w.sum()).backward()
    w.grad.fill_(1e36)
    scaler.step(optimizer)
    if w.isfinite().all():
        return expect_skipped(w, scaler)
    return "corrupted", f"finite before, inf after: weights become {w[0].item()}"


@fault
def fp16_loss_times_scale():
    w, optimizer, scaler = setup()
    loss = (w * 4.0).to(torch.float16)  # not reduced yet, as in `loss_fn(reduction="none")`
    scaled = scaler.scale(loss)
    if torch.isfinite(scaled).all():
        return "fine", "computed in FP32"
    scaled.sum().backward()
    scaler.step(optimizer)
    if bool((w == 1).all()) and scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item():
        return "reported", "computed in FP16 and inf: skipped"
    return "silent", "the scaled loss is computed in FP16 and is inf"


@fault
def norm_overflows_finite_gradients():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    if OURS:
        w.grad.fill_(1e30)
        norm = scaler.step(optimizer, max_norm=1.0)
        assert abs(w[0].item() - 0.95) < 1e-6
        return "fine", f"`step(optimizer, max_norm=1)`: the norm is {norm * 65536:.3g}, and clipping works"
    scaler.unscale_(optimizer)
    w.grad.fill_(1e30)
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    if (w == 1).all():
        return "silent", ("the norm is inf, so clipping makes all gradients 0: "
                          "nothing is learned and nothing is reported")
    return "fine", ""


@fault
def state_with_a_missing_key():
    _, _, scaler = setup()
    before = scaler.state_dict()
    state = dict(before, scale=8.0)
    del state["_growth_tracker"]
    outcome = outcome_of(lambda: scaler.load_state_dict(state), ("corrupted", "accepted"))
    if scaler.get_scale() != before["scale"]:
        return "corrupted", f"KeyError after the scale was loaded: it is {scaler.get_scale()} now"
    return outcome


@fault
def growth_interval_negative():
    w = torch.ones(4, requires_grad=True)
    optimizer = SGD([w], lr=0.1)

    def use():
        scaler = GradScaler("cpu", growth_interval=-1)
        for _ in range(10):
            step(w, optimizer, scaler, 1.0)
    return outcome_of(use, ("silent", "accepted; the scale never grows"))


@fault
def growth_interval_shortened():
    w, optimizer, scaler = setup()
    for _ in range(10):
        step(w, optimizer, scaler, 1.0)
    scaler.set_growth_interval(5)
    for _ in range(20):
        step(w, optimizer, scaler, 1.0)
    return ("fine", "") if scaler.get_scale() > 65536 else ("silent", "the scale never grows again")


@fault
def backoff_factor_negative():
    w = torch.ones(4, requires_grad=True)
    optimizer = SGD([w], lr=0.1)
    holder = []

    def use():
        holder.append(GradScaler("cpu", backoff_factor=-1.0))
        step(w, optimizer, holder[0], INF)
    return outcome_of(use, None) or ("corrupted", f"accepted; the scale becomes {holder[0].get_scale()}")


@fault
def unscale_twice():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    return outcome_of(lambda: scaler.unscale_(optimizer), ("corrupted", "divided twice"))


@fault
def step_twice():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    return outcome_of(lambda: scaler.step(optimizer), ("corrupted", "updated twice"))


@fault
def update_without_step():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    return outcome_of(scaler.update, ("silent", "counted as a clean step"))


@fault
def step_without_gradients():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum())
    return outcome_of(lambda: scaler.step(optimizer), ("silent", "nothing happens"))


@fault
def accumulation_over_a_scale_change():
    w, optimizer, scaler = setup()
    other = torch.ones(1, requires_grad=True)
    second = SGD([other], lr=0.1)
    scaler.scale(w.sum() + other.sum()).backward()
    for one in (optimizer, second):
        scaler.step(one)
        one.zero_grad()
    scaler.update()
    scaler.scale(w.sum()).backward()  # the first micro-batch of w; the other optimizer continues
    scaler.scale((other * INF).sum()).backward()
    scaler.step(second)
    scaler.update()
    scaler.scale(w.sum()).backward()  # the second micro-batch, with half the scale
    scaler.step(optimizer)
    scaler.update()
    right = 1 - 0.1 - 0.1 * 2
    if abs(w[0].item() - right) < 1e-6:
        return "fine", ""
    return "corrupted", f"two scales in one sum: weights are {w[0].item():.4g} and not {right:.4g}"


@fault
def saved_between_step_and_update():
    w, optimizer, scaler = setup()
    optimizer.zero_grad()
    scaler.scale((w * INF).sum()).backward()
    scaler.step(optimizer)
    state = []
    outcome = outcome_of(lambda: state.append(scaler.state_dict()), None)
    return outcome or ("corrupted", f"saved with scale {state[0]['scale']:.0f}: the overflow is forgotten")


@fault
def nan_in_bf16_gradients():
    w, optimizer, scaler = setup(dtype=torch.bfloat16)
    outcome = outcome_of(lambda: step(w, optimizer, scaler, NAN), None)
    return outcome or expect_skipped(w, scaler)


@fault
def minus_inf_only():
    w, optimizer, scaler = setup()
    step(w, optimizer, scaler, -INF)
    return expect_skipped(w, scaler)


@fault
def fp16_gradients():
    w, optimizer, scaler = setup(dtype=torch.float16, lr=2.0**23)

    def use():
        scaler.scale((w.float() * 1e-8).sum()).backward()  # 0.0006 in memory; 0 in FP16 once unscaled
        scaler.step(optimizer)
    outcome = outcome_of(use, None)
    if abs(w[0].item() - (1 - 2.0**23 * 1e-8)) < 1e-3:
        return "fine", "a gradient of 1e-8 reaches the weights"
    return outcome or ("corrupted", "the gradients become 0 and the step counts as applied")


@fault
def growth_to_inf():
    w, optimizer, _ = setup(lr=0.0)
    scaler = GradScaler("cpu", growth_interval=1)
    for _ in range(300):
        step(w, optimizer, scaler, 1e-37)
    scale = scaler.get_scale()
    inverse = 1.0 / torch.tensor(scale)
    if scale < INF and inverse.item() >= 2.0**-126:
        return "fine", f"stops at {scale:.3g}"
    return "silent", f"grows to {scale:.3g}, whose reciprocal is subnormal: gradients lose digits"


@fault
def every_step_overflows():
    w, optimizer, scaler = setup()
    try:
        for _ in range(200):
            step(w, optimizer, scaler, INF)
    except RuntimeError as error:
        return "reported", str(error).split("; ")[0]
    return "silent", f"200 steps skipped, the scale is {scaler.get_scale():.3g}; nothing is reported"


@fault
def loss_is_nan():
    w, optimizer, scaler = setup()
    step(w, optimizer, scaler, NAN)
    return expect_skipped(w, scaler)


@fault
def inf_under_disabled_scaler():
    w = torch.ones(4, requires_grad=True)
    optimizer = SGD([w], lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    step(w, optimizer, scaler, INF)
    if w.isfinite().all():
        return expect_skipped(w, scaler)
    return "corrupted", f"applied: weights become {w[0].item()}"


@fault
def gradient_of_another_size():
    w, optimizer, scaler = setup()

    def use():
        scaler.scale(w.sum()).backward()
        w.grad = torch.ones(5)
        scaler.step(optimizer)
    return outcome_of(use, ("corrupted", "accepted"))


@fault
def same_parameter_listed_twice():
    w = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = outcome_of(lambda: SGD([w, w], lr=0.1), None)
    if outcome:
        return outcome
    optimizer = SGD([w, w], lr=0.1)
    outcome = outcome_of(lambda: step(w, optimizer, GradScaler("cpu"), 1.0), None)
    return outcome or ("corrupted", f"a warning ({len(caught)}), then weights are {w[0].item():.6f} and not 0.9")


@fault
def threads_with_separate_scalers():
    results = []

    def work():
        w, optimizer, scaler = setup()
        for _ in range(50):
            step(w, optimizer, scaler, 0.01)
        results.append(round(w[0].item(), 4))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ("fine", "") if len(set(results)) == 1 else ("corrupted", str(results))


def save_checkpoint(folder):
    path = os.path.join(folder, "checkpoint.pt")
    save({"w": torch.arange(1000.0)}, path)
    return path


@fault
def checkpoint_truncated():
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder)
        os.truncate(path, os.path.getsize(path) // 2)
        return outcome_of(lambda: load(path), ("corrupted", "loaded"))


@fault
def checkpoint_with_a_flipped_bit():
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder)
        with open(path, "rb") as file:
            data = bytearray(file.read())
        at = data.find(torch.arange(1000.0).numpy().tobytes()[2000:2008])
        data[at] ^= 1 << 6
        with open(path, "wb") as file:
            file.write(data)
        loaded = []
        outcome = outcome_of(lambda: loaded.append(load(path)["w"]), None)
        return outcome or ("corrupted", "loaded with the wrong weight" if not loaded[0].equal(torch.arange(1000.0))
                           else "not noticed")


@fault
def disk_full_while_saving():
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        outcome = outcome_of(lambda: save_checkpoint(folder), ("silent", "no error"))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        intact = outcome_of(lambda: load(path), ("fine", ""))
        if intact[0] == "fine":
            return outcome[0], f"{outcome[1]}; the previous checkpoint is complete"
        return "corrupted", f"{outcome[1].split(':')[0]}, and the previous checkpoint is lost"


@fault
def killed_while_saving():
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(folder)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            import signal
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # kills the process during a write
            save_checkpoint(folder)
            os._exit(0)
        os.waitpid(child, 0)
        outcome = outcome_of(lambda: load(path), ("fine", ""))
        if outcome[0] != "fine":
            return "corrupted", "the previous checkpoint is lost"
        return "fine", "the previous checkpoint is complete"


if __name__ == "__main__":
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "0"
    table = {"version": torch.__version__.split("+")[0], "faults": {}}
    for name, function in FAULTS.items():
        if "--quick" in sys.argv and ("rank" in name or "two-to-the-31" in name or "2-31" in name):
            continue  # these take most of the time, whatever the optimizer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function()
        print(name, result or "not tried", file=sys.stderr)
        if result:
            table["faults"][name] = dict(zip(("outcome", "what"), result))
    json.dump(table, sys.stdout, indent=1)
    print()
