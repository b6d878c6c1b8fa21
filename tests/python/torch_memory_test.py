"""headroom.torch.AdamW and SGD: state in torch's memory, made by the first step, and weights written in ways that torch's
version counter does not show."""

import copy

import pytest
import torch

import headroom
import headroom.torch
import headroom.torch._optim

DEVICE = torch.get_default_device().type
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="NumPy and this memory are on the CPU")
OutOfMemoryError = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # since torch 2.5
KEPT_RUN = 32768  # consecutive elements: docs/python.md, "Weights and masters"


@pytest.fixture
def blocks(monkeypatch):
    """The tensors that optimizers have taken from torch for their state."""
    taken = []

    def take(size, device):
        taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        return taken[-1]

    monkeypatch.setattr(headroom.torch._optim, "torch_memory", take)
    return taken


def make_weight(count=1000, dtype=torch.float16):
    torch.manual_seed(count)
    weight = torch.nn.Parameter(torch.randn(count).to(dtype))
    weight.grad = torch.randn(count).to(dtype)
    return weight


def is_inside(tensor, block):
    begin, size = tensor.data_ptr() - block.data_ptr(), tensor.numel() * tensor.element_size()
    return 0 <= begin and begin + size <= block.numel()


@pytest.mark.parametrize("cls", [headroom.torch.AdamW, headroom.torch.SGD])
def test_state_is_in_memory_that_torch_has_allocated_for_the_first_step(blocks, cls):
    weights = [make_weight(), make_weight(70, torch.float32)]
    options = {"momentum": 0.9} if cls is headroom.torch.SGD else {}
    optimizer = cls(weights, lr=1e-2, **options)
    assert not optimizer.state and not optimizer.state_dict()["state"]
    assert not blocks
    optimizer.step()
    assert len(blocks) == 1
    for weight in weights:
        tensors = [value for name, value in optimizer.state[weight].items() if name != "step"]
        assert tensors and all(is_inside(tensor, blocks[0]) for tensor in tensors)
    optimizer.step()
    assert len(blocks) == 1


def test_saving_loading_and_copying_a_fresh_optimizer_allocates_nothing(blocks):
    """Accelerate loads the state dict of a new optimizer into it."""
    optimizer = headroom.torch.AdamW([make_weight()], lr=1e-2)
    optimizer.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    optimizer.refresh_masters()
    assert not blocks
    for one in (optimizer, copied):
        one.param_groups[0]["params"][0].grad = make_weight().grad
        one.step()
    assert len(blocks) == 2
    assert torch.equal(*(one.param_groups[0]["params"][0] for one in (optimizer, copied)))


@pytest.mark.parametrize("scaler_class", [None, torch.amp.GradScaler, headroom.torch.GradScaler])
def test_failed_allocation_raises_torchs_error_and_changes_nothing(monkeypatch, scaler_class):
    weight = make_weight()
    before, grad = weight.detach().clone(), weight.grad.clone()
    real = headroom.torch._optim.torch_memory
    fail = [True]

    def take(size, device):
        if fail[0]:
            raise OutOfMemoryError("there is no more")
        return real(size, device)

    monkeypatch.setattr(headroom.torch._optim, "torch_memory", take)
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    scaler = scaler_class(DEVICE, init_scale=4.0) if scaler_class else None
    if scaler:
        scaler.scale(torch.ones((), requires_grad=True))
    step = (lambda: scaler.step(optimizer)) if scaler else optimizer.step
    with pytest.raises(OutOfMemoryError, match="there is no more"):
        step()
    assert torch.equal(weight, before) and torch.equal(weight.grad, grad) and not optimizer.state
    fail[0] = False
    if scaler_class is not torch.amp.GradScaler:  # torch's has noted the step before it calls the optimizer
        step()
        scale = 4.0 if scaler else 1.0
        torch.testing.assert_close(weight, (before.float() - 0.5 / scale * grad.float()).half())


@pytest.mark.parametrize("after", [torch.float16, torch.bfloat16])
def test_model_may_change_its_type_before_the_first_step(after):
    ends = []
    for late in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        if not late:
            layer.to(after)
        optimizer = headroom.torch.AdamW(layer.parameters(), lr=1e-2)
        layer.to(after)
        for _ in range(3):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        assert optimizer.state[layer.weight]["master"].dtype is torch.float32
        ends.append(copy.deepcopy(optimizer.state_dict()["state"]))
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])
    layer.float()
    with pytest.raises(headroom.Error, match="make a new"):
        optimizer.step()


def write_data(weight, values):
    weight.data.copy_(values)


def write_numpy(weight, values):
    weight.detach().numpy()[:] = values.numpy()


OPTIMIZERS = {
    "AdamW": lambda weights: headroom.torch.AdamW(weights, lr=1e-4, weight_decay=0.0),
    "SGD": lambda weights: headroom.torch.SGD(weights, lr=1e-4, momentum=0.9),
    "stochastic": lambda weights: headroom.torch.AdamW(weights, lr=1e-4, stochastic_rounding=True),
}


@pytest.mark.parametrize("count", [7, 100_003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("write", [write_data, pytest.param(write_numpy, marks=ON_CPU)])
def test_writes_that_change_no_version_are_kept(name, dtype, count, write):
    """EMA swaps, clamps and manual loading write through ``.data``."""
    if dtype is torch.bfloat16 and write is write_numpy:
        pytest.skip("NumPy has no bfloat16")
    weights = [make_weight(count, dtype) for _ in range(2)]
    noticed, shown = (OPTIMIZERS[name]([weight]) for weight in weights)
    for optimizer in (noticed, shown):
        for _ in range(3):
            optimizer.step()
    values = (weights[0].detach() * -0.5).clone()
    version = weights[0]._version
    write(weights[0], values)
    assert weights[0]._version == version
    with torch.no_grad():
        weights[1].copy_(values)
    for optimizer in (noticed, shown):
        optimizer.step()
    assert torch.equal(*weights)
    states = [optimizer.state[weight] for optimizer, weight in zip((noticed, shown), weights)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_runs_of_elements_written_through_data_are_kept():
    for first in (0, 1, 5000, 100_003 - KEPT_RUN):
        weight = make_weight(100_003)
        optimizer = headroom.torch.SGD([weight], lr=1e-4)
        optimizer.step()
        weight.data[first:first + KEPT_RUN] = 8.0
        weight.grad.zero_()
        optimizer.step()
        assert (weight[first:first + KEPT_RUN] == 8.0).all()


def test_average_weights_may_be_swapped_in_through_data_and_out_again():
    weights = [make_weight(100_003, torch.bfloat16) for _ in range(2)]
    optimizers = [headroom.torch.AdamW([weight], lr=1e-3) for weight in weights]
    for step in range(4):
        if step == 2:
            kept = weights[1].detach().clone()
            weights[1].data.mul_(0.9)  # evaluate with other weights
            weights[1].data.copy_(kept)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*(optimizer.state_dict()["state"][0]["master"] for optimizer in optimizers))


def test_saved_state_reflects_writes_through_data():
    weight = make_weight(100_003)
    optimizer = headroom.torch.AdamW([weight], lr=1e-4)
    optimizer.step()
    weight.data[77_777] = 3.0
    assert optimizer.state_dict()["state"][0]["master"][77_777] == 3.0


def test_skipped_step_keeps_written_weights_for_the_next_one():
    weight = make_weight()
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=4.0)
    for bad in (False, True, False):
        weight.data.fill_(2.0)
        weight.grad.fill_(float("inf") if bad else 4.0)
        scaler.scale(torch.ones((), requires_grad=True))
        scaler.step(optimizer)
        scaler.update()
        scale = scaler.report().scale
        assert (weight == (2.0 if bad else 2.0 - 0.5 * 4.0 / scale)).all()
