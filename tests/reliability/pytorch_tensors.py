"""Faults of tensors and optimizer state with PyTorch."""
import os
import signal

import torch

from pytorch_faults import INF, SGD, AdamW, GradScaler, fault, outcome_of, setup, skip_report


@fault
def inf_past_two_to_the_31():
    count = 2**31 + 77
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if 1024 * available < 5 * count:
        return None  # not run: weights and gradients take 8 GiB
    w = torch.ones(count, dtype=torch.bfloat16, requires_grad=True)
    w.grad = torch.zeros(count, dtype=torch.bfloat16)
    w.grad[-1] = INF
    optimizer, scaler = SGD([w], lr=0.1), GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    scaler.update()
    if w[0] != 1 or w[-1] != 1:
        return "corrupted", f"applied: the last weight is {w[-1].item()}"
    return "reported", skip_report(scaler)


@fault
def gradient_moved():
    w, optimizer, scaler = setup()
    for _ in range(2):
        scaler.scale(torch.ones(1))
        w.grad = torch.full((4,), scaler.get_scale())  # a new tensor in each step
        scaler.step(optimizer)
        scaler.update()
    return ("fine", "") if torch.allclose(w, torch.full((4,), 0.8)) else ("corrupted", f"weights are {w[0].item()}")


@fault
def gradient_cut_to_one_element():
    w, optimizer, scaler = setup()

    def use():
        scaler.scale((w * torch.arange(1.0, 5.0)).sum()).backward()
        w.grad.resize_(1)
        scaler.step(optimizer)
    what = "accepted; the one element is used for all four: the last weight is {:.2g} and not 0.6"
    return outcome_of(use, None) or ("corrupted", what.format(w[3].item()))


@fault
def gradient_without_memory():
    w, optimizer, scaler = setup()
    scaler.scale(w.sum()).backward()
    w.grad.untyped_storage().resize_(0)
    child = os.fork()
    if child == 0:
        try:
            scaler.step(optimizer)
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return "corrupted", f"the process ends with {name}; what was not saved is lost"
    return "reported", "an exception"


@fault
def gradient_of_another_type():
    w, _, _ = setup()

    def use():
        w.grad = torch.ones(4, dtype=torch.float16)
    return outcome_of(use, ("fine", ""))


@fault
def gradient_on_another_device():
    w, _, _ = setup()

    def use():
        w.grad = torch.ones(4, device="meta")
    return outcome_of(use, ("corrupted", "accepted"))


@fault
def gradient_of_two_parameters():
    a, b = (torch.ones(4, requires_grad=True) for _ in range(2))
    optimizer, scaler = SGD([a, b], lr=0.1), GradScaler("cpu")
    scaler.scale(a.sum()).backward()
    b.grad = a.grad
    outcome = outcome_of(lambda: scaler.step(optimizer), None)
    if outcome or abs(a[0].item() - 0.9) < 1e-6:
        return outcome or ("fine", "")
    return "corrupted", f"unscaled twice: weights are {a[0].item():.6f} and not 0.9"


def make_adam(**sizes):
    """Named weights of 1 and their optimizer, which stores the names in its state."""
    weights = {name: torch.ones(size, requires_grad=True) for name, size in sizes.items()}
    return weights, AdamW(list(weights.items()), lr=0.1)


def step_adam(weights, optimizer, grads):
    for w, grad in zip(weights.values(), grads):
        w.grad = torch.full_like(w, grad)
    optimizer.step()


@fault
def optimizer_state_of_another_model():
    theirs, other = make_adam(a=1, b=4)
    step_adam(theirs, other, (1.0, 1.0))
    ours, optimizer = make_adam(a=4, b=1)
    outcome = outcome_of(lambda: optimizer.load_state_dict(other.state_dict()), None)
    if outcome:
        return outcome
    outcome = outcome_of(lambda: step_adam(ours, optimizer, (1.0, 1.0)), ("corrupted", "accepted and used"))
    changed = sum((w != 1).any().item() for w in ours.values())
    if outcome[0] == "reported" and changed:
        return "corrupted", f"accepted; the next step changes {changed} of 2 weights, then {outcome[1]}"
    return outcome


@fault
def optimizer_state_in_another_order():
    theirs, other = make_adam(a=4, b=4)
    step_adam(theirs, other, (1.0, 100.0))
    ours, optimizer = make_adam(b=4, a=4)
    outcome = outcome_of(lambda: optimizer.load_state_dict(other.state_dict()), None)
    if outcome:
        return outcome
    taken = optimizer.state[ours["b"]]["exp_avg"][0].item()
    if abs(taken - 10.0) < 1e-5:
        return "fine", ""
    return "corrupted", f"matched by position, not by name: the moment of b is {taken:.2g} and not 10"
