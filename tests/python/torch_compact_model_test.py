"""What headroom.torch's optimizers store with state="half" and "byte" and show in state dicts, compared with the NumPy model of
the formats (compact_model_test.py has the arrays of headroom.AdamW)."""

import compact_model
import numpy as np
import pytest
import torch

import headroom.torch

DEVICE = torch.get_default_device().type
STATES = ("half", "byte")
KINDS = {"AdamW": dict(lr=1e-2), "SGD": dict(lr=0.1, momentum=0.9), "Lion": dict(lr=1e-3)}


def numpy_of(tensor):
    return tensor.detach().float().cpu().numpy().ravel()


def in_groups(values):
    """With zeros at the end, as the last group has."""
    return np.append(values, np.zeros(-len(values) % compact_model.GROUP, np.float32))


def train(kind, dtype, state, steps=12):
    torch.manual_seed(4)
    layers = torch.nn.Linear(16, 70), torch.nn.Tanh(), torch.nn.Linear(70, 5)
    model = torch.nn.Sequential(*layers).to(DEVICE, dtype)
    optimizer = getattr(headroom.torch, kind)(model.parameters(), state=state, **KINDS[kind])
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=64.0)
    for _ in range(steps):
        x = torch.randn(32, 16, device=DEVICE)
        optimizer.zero_grad()
        scaler.scale(model(x.to(dtype)).float().sub(x[:, :5]).square().mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return optimizer


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_have_numbers_of_the_format(kind, dtype, state):
    checked = 0
    for entries in train(kind, dtype, state).state_dict()["state"].values():
        for name, moment in (("exp_avg", 1), ("momentum_buffer", 1), ("exp_avg_sq", 2)):
            if name in entries:
                values = numpy_of(entries[name])
                if moment == 2:  # the padding of the last group counts as 0 and changes no other
                    values = values[: len(values) // 32 * 32]
                assert np.all(compact_model.storable(in_groups(values), state, moment)), name
                checked += 1
    assert checked == 4 * (2 if kind == "AdamW" else 1)


@pytest.mark.parametrize("bits, state", ((16, "half"), (8, "byte")))
def test_masters_are_a_bf16_weight_and_the_bits_below(bits, state):
    optimizer = train("AdamW", torch.bfloat16, state)
    for param in optimizer.param_groups[0]["params"]:
        master = numpy_of(optimizer.state[param]["master"]).view(np.uint32)
        assert not np.any(master & ((1 << (16 - bits)) - 1))
        nearest = (master + 0x8000 & 0xFFFF0000).view(np.float32)  # ties away from zero
        assert np.array_equal(nearest, numpy_of(param))


@pytest.mark.parametrize("state", STATES)
def test_one_step_from_a_chosen_state_lands_on_a_neighbour_with_the_right_mean(state):
    copies, group = 1500, 64
    chosen = np.exp2(np.linspace(-24, 0, group))
    first = torch.tensor(np.tile(chosen, copies), dtype=torch.float32, device=DEVICE)
    weight = torch.zeros_like(first, requires_grad=True)
    optimizer = headroom.torch.AdamW([weight], state=state, betas=(0.9, 0.95), seed=3)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = first
    optimizer.state[weight]["exp_avg_sq"] = first.clone()
    optimizer.load_state_dict(optimizer.state_dict())
    names = ("exp_avg", "exp_avg_sq")
    before = [numpy_of(optimizer.state[weight][name]) for name in names]
    weight.grad = torch.full_like(weight, 0.01)
    optimizer.step()
    after = [numpy_of(optimizer.state[weight][name]) for name in names]
    g = np.float32(0.01)
    exact = (before[0] + np.float32(1 - 0.9) * (g - before[0]),
             np.float32(0.95) * before[1] + np.float32(1 - 0.95) * (g * g))
    for moment, (stored, value) in enumerate(zip(after, exact), 1):
        below, above = compact_model.neighbours(value, state, moment)
        size = np.abs(np.float64(stored))
        assert np.all((size == below) | (size == above))
        between = (below < above) & (below > 0)
        share = np.where(between, (value - below) / np.where(between, above - below, 1), 0)
        up = np.where(between, size == above, 0)
        difference = (up - share).reshape(copies, group).mean(axis=0)
        assert between.any() and np.all(np.abs(difference) < 6 * 0.5 / np.sqrt(copies))
