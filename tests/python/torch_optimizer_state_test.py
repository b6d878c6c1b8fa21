"""The fused optimizers' state and parameters where others replace them: resets, renamed modules, damaged state dicts."""

import collections
import copy

import pytest
import torch

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type


def run_step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    model(factor * torch.ones(1, 3)).sum().backward()
    optimizer.step()


def clear(optimizer):
    optimizer.state.clear()


def assign(optimizer):
    optimizer.state = collections.defaultdict(dict)


def set_state(optimizer):
    optimizer.__setstate__({"state": collections.defaultdict(dict)})


def delete(optimizer):
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


@pytest.mark.parametrize("state", ["full", "half", "byte"])
@pytest.mark.parametrize("reset", [clear, assign, set_state, delete])
def test_a_reset_of_state_begins_anew(reset, state):
    model = torch.nn.Linear(3, 2)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1, state=state)
    for factor in (1.0, 2.0, 3.0):
        run_step(model, optimizer, factor)
    reset(optimizer)
    fresh = copy.deepcopy(model)
    run_step(fresh, headroom.torch.AdamW(fresh.parameters(), lr=0.1, state=state))
    run_step(model, optimizer)
    assert torch.equal(model.weight, fresh.weight)
    assert optimizer.state[model.weight]["step"] == 1


def test_parameters_may_be_replaced_before_the_first_step():
    """As Accelerate does, which puts DTensors in the place of an optimizer's parameters."""
    model = torch.nn.Linear(3, 2)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1)
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=256.0, model=model)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(parameter.detach().half()))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 3).half()).sum()).backward()
    model.bias.grad[0] = float("inf")
    scaler.step(optimizer)
    assert scaler.report().culprit == "bias: 1 inf, 0 nan"
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 3).half()).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(headroom.Error, match="changed after the first step"):
        optimizer.step()


def test_state_dicts_of_wrapped_modules_fit():
    model = torch.nn.Linear(3, 2)
    optimizer = headroom.torch.AdamW(model.named_parameters(), lr=0.1)
    run_step(model, optimizer)
    saved = optimizer.state_dict()
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": model})})
    again = headroom.torch.AdamW(wrapped.named_parameters(), lr=0.1)
    again.load_state_dict(saved)
    assert torch.equal(again.state[model.weight]["exp_avg"], saved["state"][0]["exp_avg"])
    again.param_groups[0]["param_names"] = ["module.bias", "module.weight"]
    with pytest.raises(headroom.Error, match="in the same order"):
        again.load_state_dict(saved)


@pytest.mark.parametrize(("entries", "message"), [
    ({"exp_avg": None}, "no exp_avg for"),
    ({"exp_avg_sq": None}, "no exp_avg_sq for"),
    ({"exp_avg": None, "exp_avg_sq": None}, "no exp_avg for"),
    *(({"step": step}, "number of steps of") for step in (float("nan"), 1e30, -1, torch.ones(2), "three")),
])
def test_damaged_state_is_refused_and_changes_nothing(entries, message):
    model = torch.nn.Linear(3, 2)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1)
    run_step(model, optimizer)
    saved = optimizer.state_dict()
    damaged = copy.deepcopy(saved)
    damaged["state"][1].update(entries)
    with pytest.raises(headroom.Error, match=rf"{message} param_groups\[0\].params\[1\]"):
        optimizer.load_state_dict(damaged)
    after = optimizer.state_dict()["state"][1]
    assert torch.equal(after["exp_avg"], saved["state"][1]["exp_avg"]) and after["step"] == 1


def test_a_scale_of_the_users_own_is_refused():
    model = torch.nn.Linear(3, 2)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1)
    scaler = headroom.torch.GradScaler(DEVICE)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(headroom.Error, match="grad_scale or found_inf of its own"):
        scaler.step(optimizer)
    optimizer.grad_scale = None
    scaler.step(optimizer)
    assert scaler.last_step_applied
