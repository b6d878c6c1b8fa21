"""headroom.torch.state_fit: it counts the moments that state="half" and "byte" cannot hold, as the NumPy model of the formats
does, and warns if they are many."""

import warnings

import compact_model
import numpy as np
import pytest
import torch

import headroom.torch

DEVICE = torch.get_default_device().type
COUNT = 50 * compact_model.GROUP + 7  # the last group is not whole


def stepped(first, second, state="full"):
    """An optimizer with these moments."""
    weight = torch.zeros(len(first), device=DEVICE, requires_grad=True)
    optimizer = headroom.torch.AdamW([("w", weight)], state=state)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, values in (("exp_avg", first), ("exp_avg_sq", second)):
        optimizer.state[weight][name] = torch.as_tensor(values, dtype=torch.float32, device=DEVICE)
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def moments(bits, seed=1):
    """First and second moments of gradients whose magnitudes differ by a factor of up to 2^bits."""
    gradient = np.exp2(np.random.default_rng(seed).uniform(-bits, 0.0, COUNT)).astype(np.float32)
    return gradient, gradient**2


def outside(values, state, moment):
    """How many values the model of the format stores as 0 or as its smallest number."""
    padded = np.append(np.float64(values), np.zeros(-len(values) % compact_model.GROUP))
    below, _ = compact_model.neighbours(padded, state, moment)
    if state == "half":
        smallest = np.full(padded.shape, 2.0**-133)
    else:
        group = compact_model.group_exponents(padded)
        smallest = np.exp2(np.maximum(group, -109 if moment == 1 else -95) - (17.0 if moment == 1 else 31.0))
    return int(((padded != 0) & ((below == 0) | (padded <= smallest))).sum())


@pytest.mark.parametrize("scale", (1.0, 2.0**-100))
@pytest.mark.parametrize("bits", (4, 20, 40))
@pytest.mark.parametrize("state", ("half", "byte"))
@pytest.mark.filterwarnings("ignore:State")
def test_counts_equal_those_of_the_model_of_the_formats(state, bits, scale):
    first, second = (np.float32(np.maximum(values * scale, 2.0**-149)) for values in moments(bits))
    found = headroom.torch.state_fit(stepped(first, second), state)
    assert [moment.name for moment in found.moments] == ["w/exp_avg", "w/exp_avg_sq"]
    for values, moment in zip((first, second), found.moments):
        assert moment.count == COUNT and moment.too_large == 0
        kind = 1 if moment.name.endswith("exp_avg") else 2
        assert moment.too_small == outside(values, state, kind), moment


@pytest.mark.parametrize("state", ("half", "byte"))
def test_moments_of_training_fit_and_nothing_is_warned(state):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 70), torch.nn.Tanh(), torch.nn.Linear(70, 5)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        x = torch.randn(32, 16, device=DEVICE)
        optimizer.zero_grad()
        (model(x) - x[:, :5]).square().mean().backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = headroom.torch.state_fit(optimizer, state)
    assert found.fits and str(found).startswith(f"State '{state}' holds these moments. The worst is param_groups[0].params[")


def test_moments_that_differ_too_much_are_warned_about_by_name():
    with pytest.warns(RuntimeWarning, match=r"'byte' does not hold 2 of 2 .*\n  w/exp_avg: .*\n  w/exp_avg_sq: .*smaller steps"):
        found = headroom.torch.state_fit(stepped(*moments(40)), "byte")
    assert not found.fits


def test_of_state_that_is_byte_already_what_was_stored_as_the_smallest_number_counts():
    with pytest.warns(RuntimeWarning, match="w/exp_avg_sq"):
        found = headroom.torch.state_fit(stepped(*moments(40), state="byte"))
    assert found.state == "byte"


def test_moments_too_large_are_counted():
    weight = torch.zeros(COUNT, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    first, second = (torch.as_tensor(values, device=DEVICE) for values in moments(2))
    second[5], second[9] = 2.0**127, torch.inf
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    with pytest.warns(RuntimeWarning, match="2 too large"):
        assert headroom.torch.state_fit(optimizer, "byte").moments[1].too_large == 2


@pytest.mark.parametrize("shape", ((6, 5), (2, 3, 4, 5)))
def test_groups_are_neighbours_in_memory(shape):
    """A transposed weight has its groups along its strides."""
    weight = torch.zeros(shape, device=DEVICE).transpose(0, -1).requires_grad_()
    optimizer = headroom.torch.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    values = np.exp2(-np.arange(float(weight.numel())) % 40)  # in the order of memory
    at = torch.as_tensor(values, dtype=torch.float32, device=DEVICE).view(shape).transpose(0, -1)
    optimizer.state[weight]["momentum_buffer"] = at
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(RuntimeWarning):
        found = headroom.torch.state_fit(optimizer)
    assert [moment.too_small for moment in found.moments] == [outside(values, "byte", 1)]


def test_bad_arguments_are_refused():
    weight = torch.zeros(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    with pytest.raises(RuntimeError, match="no moments yet; take some steps"):
        headroom.torch.state_fit(optimizer)
    with pytest.raises(ValueError, match="it can be half or byte"):
        headroom.torch.state_fit(optimizer, "full")
