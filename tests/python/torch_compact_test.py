"""headroom.torch's optimizers with state="half" and "byte", and Lion: they train, take the memory that they say, save
in torch's format, and go on exactly where they stopped."""

import copy
import pickle

import pytest
import torch

import headroom.torch

DEVICE = torch.get_default_device().type

FORMATS = ("half", "byte")


def model_of(dtype, seed=1):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(16, 70), torch.nn.Tanh(), torch.nn.Linear(70, 8)
    return torch.nn.Sequential(*layers).to(DEVICE, dtype)


def train(model, optimizer, scaler, steps, seed=0, dtype=None):
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        x = torch.randn(32, 16, device=DEVICE)
        loss = torch.nn.functional.mse_loss(model(x.to(dtype)).float(), x[:, :8] * 0.5)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return loss.item()


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("state", ("full", *FORMATS))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("kind", ("AdamW", "SGD", "Lion"))
def test_it_trains(kind, dtype, state):
    if dtype == torch.float16 and DEVICE == "cpu" and torch.__version__ < "2.3":
        pytest.skip("no FP16 linear on the CPU")
    options = {"AdamW": dict(lr=1e-2), "SGD": dict(lr=0.5, momentum=0.9), "Lion": dict(lr=2e-3)}[kind]
    model, full = model_of(dtype), model_of(dtype)
    losses = []
    for which, fmt in ((model, state), (full, "full")):
        optimizer = getattr(headroom.torch, kind)(which.parameters(), state=fmt, **options)
        losses.append(train(which, optimizer, headroom.torch.GradScaler(DEVICE), 60, dtype=dtype))
    assert losses[0] < 0.15
    assert losses[0] < 1.3 * losses[1] + 1e-3


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("model_first", (True, False))
def test_a_full_state_keeps_weights_and_masters_next_to_a_tie(model_first, dtype, state):
    # State "full" rounds ties to even; the compact formats round them away from zero.
    torch.manual_seed(3)
    unit = 2.0 ** (-8 if dtype is torch.bfloat16 else -11)  # of numbers from 0.5 to 1: half of it is a tie
    weights = (0.5 + 0.49 * torch.rand(4096)).to(dtype)
    off_tie = torch.tensor([2.0**-k for k in range(9, 14)] + [-(2.0**-k) for k in range(9, 14)])
    ties = weights.float() + unit * (0.5 + off_tie.repeat(410)[:4096])
    masters = torch.where(torch.arange(4096) % 2 == 0, ties, -ties)
    if model_first:
        masters[::64] = masters[::64].sign() * (weights.float()[::64] + unit * 0.5)  # exactly on a tie
    weights = masters.to(dtype)
    zeros = torch.zeros(4096)
    saved = {"step": torch.tensor(1.0), "master": masters, "exp_avg": zeros, "exp_avg_sq": zeros}

    p = torch.nn.Parameter(weights if model_first else torch.zeros_like(weights))
    optimizer = headroom.torch.AdamW([p], lr=0.0, weight_decay=0.0, state=state)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    with torch.no_grad():
        p.copy_(weights)
    kept = optimizer.state_dict()["state"][0]["master"]
    # Masters have 8 or 16 bits below the weight.
    assert torch.equal(p.detach(), weights)
    assert ((kept - masters).abs() <= unit * (2.0**-8 if state == "byte" else 2.0**-13)).all()


@pytest.mark.parametrize("state", FORMATS)
def test_a_state_dict_resumes_bit_for_bit(state):
    for dtype in (torch.bfloat16, torch.float32):
        whole, first = model_of(dtype), model_of(dtype)
        one = headroom.torch.AdamW(whole.parameters(), lr=1e-2, state=state)
        two = headroom.torch.AdamW(first.parameters(), lr=1e-2, state=state)
        scaler = headroom.torch.GradScaler(DEVICE)
        train(whole, one, scaler, 8, dtype=dtype)
        train(first, two, headroom.torch.GradScaler(DEVICE), 8, dtype=dtype)
        saved = copy.deepcopy((first.state_dict(), two.state_dict()))
        resumed = model_of(dtype, seed=5)
        third = headroom.torch.AdamW(resumed.parameters(), lr=1.0, state=state)
        resumed.load_state_dict(saved[0])
        third.load_state_dict(saved[1])
        copied = copy.deepcopy((first, two))
        pickled = pickle.loads(pickle.dumps((first, two)))
        train(whole, one, scaler, 8, seed=1, dtype=dtype)
        for model, optimizer in ((resumed, third), copied, pickled):
            train(model, optimizer, headroom.torch.GradScaler(DEVICE), 8, seed=1, dtype=dtype)
            assert equal(weights_of(model), weights_of(whole))


@pytest.mark.parametrize("state", FORMATS)
def test_state_travels_to_torch_and_back(state):
    model = model_of(torch.float32)
    ours = headroom.torch.AdamW(model.parameters(), lr=1e-2, state=state)
    train(model, ours, headroom.torch.GradScaler(DEVICE), 20, dtype=torch.float32)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs.load_state_dict(ours.state_dict())
    moments = theirs.state[next(model.parameters())]
    assert moments["exp_avg"].dtype == torch.float32 and moments["exp_avg"].device.type == DEVICE
    before = torch.cat([theirs.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    ours.load_state_dict(theirs.state_dict())
    after = torch.cat([ours.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    assert torch.equal(before, after)
    full = headroom.torch.AdamW(model.parameters(), lr=1e-2)
    full.load_state_dict(ours.state_dict())
    train(model, full, headroom.torch.GradScaler(DEVICE), 5, dtype=torch.float32)


def test_memory_is_that_of_the_format():
    from headroom.torch import _optim

    count = 1 << 20
    for dtype in (torch.bfloat16, torch.float16):
        for state, expected in (("full", 12.0), ("half", 6.0), ("byte", 3.0625)):
            weight = torch.zeros(count, device=DEVICE, dtype=dtype).requires_grad_()
            weight.grad = torch.ones_like(weight)
            sizes = []
            memory = _optim.torch_memory

            def counted(size, device, sizes=sizes, memory=memory):
                sizes.append(size)
                return memory(size, device)

            _optim.torch_memory = counted
            try:
                headroom.torch.AdamW([weight], state=state).step()
            finally:
                _optim.torch_memory = memory
            assert sum(sizes) / count == pytest.approx(expected, abs=0.01), state


def test_copies_of_state_are_freed_by_the_next_step():
    model = model_of(torch.bfloat16)
    optimizer = headroom.torch.AdamW(model.parameters(), state="byte")
    scaler = headroom.torch.GradScaler(DEVICE)
    train(model, optimizer, scaler, 2, dtype=torch.bfloat16)
    optimizer.state_dict()
    assert not optimizer.__dict__["state"]
    shown = optimizer.state[next(model.parameters())]
    assert set(shown) == {"step", "master", "exp_avg", "exp_avg_sq"}
    train(model, optimizer, scaler, 1, dtype=torch.bfloat16)
    assert not optimizer.__dict__["state"]


def test_entries_of_state_that_others_replace_are_taken_over():
    model = model_of(torch.float32)
    optimizer = headroom.torch.SGD(model.parameters(), lr=0.1, momentum=0.9, state="byte")
    scaler = headroom.torch.GradScaler(DEVICE)
    train(model, optimizer, scaler, 2, dtype=torch.float32)
    first = next(model.parameters())
    optimizer.state[first]["momentum_buffer"] = torch.full_like(first, 2.0)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = first.detach().clone()
    optimizer.step()
    torch.testing.assert_close(first.detach(), before - 0.1 * 1.8)


@pytest.mark.parametrize("state", ["half", "byte"])
def test_state_can_be_saved_after_the_weights_have_changed_their_type(state):
    model = model_of(torch.bfloat16)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1, state=state)
    train(model, optimizer, headroom.torch.GradScaler(DEVICE), 2, dtype=torch.bfloat16)
    before = [entries["master"].clone() for entries in optimizer.state_dict()["state"].values()]
    model.float()
    others = [torch.full_like(master, 7.0, dtype=torch.bfloat16) for master in before for _ in range(20)]
    after = [entries["master"] for entries in optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, before, after)) and others


def test_weights_written_through_data_are_kept():
    weight = torch.ones(10000, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    optimizer = headroom.torch.AdamW([weight], state="byte", weight_decay=0.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    weight.data[123] = 3.0
    optimizer.step()
    assert weight[123] == 3.0 and weight[122] == 1.0


def test_what_cannot_be_is_refused():
    weight = torch.ones(4, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with pytest.raises(headroom.Error, match="it can be full, half or byte"):
        headroom.torch.AdamW([weight], state="int8")
    with pytest.raises(headroom.Error, match="master_weights"):
        headroom.torch.AdamW([weight], state="byte", master_weights=False)
    square = torch.ones(1, 4, 3, 3, device=DEVICE, requires_grad=True)
    optimizer = headroom.torch.AdamW([square], state="byte")
    square.grad = torch.ones_like(square)
    optimizer.step()
    square.data = square.data.to(memory_format=torch.channels_last)
    square.grad = torch.ones_like(square)
    with pytest.raises(headroom.Error, match="memory format"):
        optimizer.step()


def test_lion_is_that_of_the_paper():
    torch.manual_seed(3)
    weight = torch.randn(100, device=DEVICE, requires_grad=True)
    w, m = weight.detach().clone(), torch.zeros(100, device=DEVICE)
    optimizer = headroom.torch.Lion([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(20):
        g = torch.randn(100, device=DEVICE)
        weight.grad = g.clone()
        optimizer.step()
        w = w * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(weight.detach(), w)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], m)
