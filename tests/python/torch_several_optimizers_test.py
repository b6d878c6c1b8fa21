"""headroom.torch with several optimizers under one scaler, alone and inside frameworks."""

import copy
import gc
import logging
import warnings
import weakref

import pytest
import torch
from torch import nn

import headroom
import headroom.torch

INF = float("inf")
KINDS = {
    "plain": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: headroom.torch.AdamW(params, lr=0.01),
}
STEPS, BAD = 6, 2
kinds = pytest.mark.parametrize("kind", KINDS)
on_cpu = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the plugs are made for the CPU")


def parts():
    torch.manual_seed(3)
    return nn.Linear(5, 4), nn.Linear(4, 3)


def data():
    torch.manual_seed(4)
    batches = torch.randn(STEPS, 8, 5)
    batches[BAD, 0, 0] = INF
    return batches


def loss_of(first, second, x):
    return second(first(x)).float().square().mean() / 64


def train_by_hand(kind, max_norm=None):
    """What every framework should do: one update for the steps of both optimizers."""
    first, second = parts()
    optimizers = [KINDS[kind](part.parameters()) for part in (first, second)]
    scaler = headroom.torch.GradScaler("cpu", growth_interval=2)
    for x in data():
        for each in optimizers:
            each.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(first, second, x)
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.step(each, max_norm=max_norm)
        scaler.update()
    return [*first.parameters(), *second.parameters()], scaler


def check(parameters, scaler, expected):
    for mine, theirs in zip(parameters, expected[0]):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert scaler.state_dict() == expected[1].state_dict()


@on_cpu
@kinds
def test_accelerate_updates_once_for_all_optimizers(kind):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import headroom.accelerate

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    headroom.accelerate.plug(accelerator)
    scaler = headroom.accelerate.plug(accelerator, growth_interval=2)  # instead of the first one
    first, second = parts()
    prepared = accelerator.prepare(first, second, *(KINDS[kind](part.parameters()) for part in (first, second)))
    first, second, *optimizers = prepared
    assert not accelerator.optimizer_step_was_skipped  # there was none yet
    skipped = []
    for x in data():
        accelerator.backward(loss_of(first, second, x))
        for each in optimizers:
            each.step()
            each.zero_grad()
        skipped.append([each.step_was_skipped for each in optimizers])
        assert [scaler.was_applied(each) for each in optimizers] == [not each for each in skipped[-1]]
    assert skipped == [[number == BAD] * 2 for number in range(STEPS)]
    check([*first.parameters(), *second.parameters()], scaler, train_by_hand(kind))


@on_cpu
@kinds
def test_lightning_clips_and_updates_once_in_manual_optimization(kind):
    lightning = pytest.importorskip("lightning")
    import headroom.lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = parts()

        def configure_optimizers(self):
            return [KINDS[kind](part.parameters()) for part in (self.first, self.second)]

        def training_step(self, x, index):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss_of(self.first, self.second, x[0]))
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 1e-3, "norm")
                optimizer.step()

    logging.getLogger("lightning").setLevel(logging.ERROR)
    plugin = headroom.lightning.MixedPrecision("cpu", growth_interval=2)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", plugins=[plugin], max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=1))
    check([*module.first.parameters(), *module.second.parameters()], plugin.scaler, train_by_hand(kind, max_norm=1e-3))


@on_cpu
@kinds
def test_fabric_updates_once_for_all_optimizers(kind):
    lightning = pytest.importorskip("lightning")
    import headroom.lightning

    plugin = headroom.lightning.FabricMixedPrecision("cpu", growth_interval=2)
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    pairs = [fabric.setup(part, KINDS[kind](part.parameters())) for part in parts()]
    for x in data():
        for _, optimizer in pairs:
            optimizer.zero_grad()
        fabric.backward(loss_of(pairs[0][0], pairs[1][0], x))
        for _, optimizer in pairs:
            optimizer.step()
    check([p for part, _ in pairs for p in part.parameters()], plugin.scaler, train_by_hand(kind))


def test_update_later_is_made_when_its_result_is_needed():
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(scaler, factor=1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update_later()

    def scale_after(use, **options):
        scaler = headroom.torch.GradScaler(weight.device.type, init_scale=4.0, **options)
        step(scaler, INF)
        assert scaler.get_scale() == 4.0
        return use(scaler) or scaler.get_scale()

    assert scale_after(lambda scaler: scaler.state_dict()["scale"]) == 2.0
    assert scale_after(lambda scaler: copy.deepcopy(scaler).get_scale()) == 2.0
    assert scale_after(lambda scaler: scaler.update()) == 2.0
    assert scale_after(lambda scaler: scaler.update(16.0)) == 16.0
    assert scale_after(step) == 2.0
    assert scale_after(step, growth_interval=1) == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_optimizers_of_the_same_weights_take_turns(dtype):
    def train(classes, scaler_class, precision):
        torch.manual_seed(3)
        model = nn.Linear(5, 4).to(precision)
        adamw, sgd = classes[0](model.parameters(), lr=0.01), classes[1](model.parameters(), lr=0.01, momentum=0.9)
        scaler = scaler_class(model.weight.device.type, init_scale=256.0)
        for number, x in enumerate(torch.randn(STEPS, 8, 5).half()):
            optimizer = (adamw, sgd)[number % 2]
            optimizer.zero_grad()
            scaler.scale(model(x.to(precision)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    ours = train((headroom.torch.AdamW, headroom.torch.SGD), headroom.torch.GradScaler, dtype)
    torchs = train((torch.optim.AdamW, torch.optim.SGD), torch.amp.GradScaler, torch.float32)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for mine, theirs in zip(ours.parameters(), torchs.parameters()):
        torch.testing.assert_close(mine.float(), theirs, **tolerance)


@kinds
@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_several_optimizers_wait_for_are_rescaled_once(kind, unscaled):
    """Two optimizers take turns on one weight, which a third one's round leaves alone."""
    shared, own = (torch.ones(4, requires_grad=True) for _ in range(2))
    turns, third = [KINDS[kind]([shared]) for _ in range(2)], KINDS[kind]([own])
    scaler = headroom.torch.GradScaler(shared.device.type, init_scale=16.0, growth_interval=3)

    def backward(*weights):
        for weight in weights:
            weight.grad = None
        scaler.scale(sum(weight.sum() for weight in weights)).backward()

    for optimizer in turns:
        backward(shared)
        scaler.step(optimizer)
        scaler.update()
    backward(shared, own)
    if unscaled:
        scaler.unscale_(turns[0])
    scaler.step(third)
    scaler.update()  # the scale grows
    assert scaler.get_scale() == 32.0 and shared.grad.tolist() == [32.0] * 4


@kinds
def test_gradients_that_replace_others_after_a_refused_step_are_rescaled(kind):
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    one, other = KINDS[kind]([first]), KINDS[kind]([second])
    scaler = headroom.torch.GradScaler(first.device.type, init_scale=2.0, growth_interval=1)
    scaler.scale((first + second).sum()).backward()
    scaler.step(one)
    scaler.unscale_(other)
    with pytest.raises(headroom.Error, match="max_norm"):
        scaler.step(other, max_norm=-1.0)
    second.grad = second.grad.clone()
    scaler.update()
    assert scaler.get_scale() == 4.0 and second.grad.tolist() == [4.0] * 4  # for a step in the next round


def test_fused_optimizers_of_the_same_weights_are_refused_in_one_round():
    model = nn.Linear(5, 4)
    optimizers = [headroom.torch.SGD(model.parameters(), lr=0.5) for _ in range(2)]
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    scaler.step(optimizers[0])
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        scaler.step(optimizers[1])


def test_an_optimizer_may_be_replaced_before_the_old_one_is_collected():
    model = nn.Linear(5, 4)
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    gc.disable()
    try:
        for _ in range(2):
            optimizer = headroom.torch.AdamW(model.parameters())
            optimizer.itself = optimizer  # a cycle, as with schedulers
            scaler.scale(model(torch.ones(1, 5)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step_applied
    finally:
        gc.enable()


def test_an_optimizer_without_parameters_behaves_as_in_torch():
    weight = torch.ones(1, requires_grad=True)
    for cls in (headroom.torch.SGD, torch.optim.SGD):
        scaler = headroom.torch.GradScaler(weight.device.type)
        scaler.scale(weight.sum()).backward()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(cls([{"params": []}], lr=0.5))


def test_setting_the_scale_while_gradients_wait_names_the_call():
    weight = torch.ones(1, requires_grad=True)
    scaler = headroom.torch.GradScaler(weight.device.type)
    state = scaler.state_dict()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"^update\(new_scale\) was called while gradients wait"):
        scaler.update(4.0)
    with pytest.raises(RuntimeError, match=r"^load_state_dict\(\) was called while gradients wait"):
        scaler.load_state_dict(state)


REPLACED = pytest.mark.parametrize("make", [
    lambda params: torch.optim.SGD(params, lr=0.5),
    lambda params: torch.optim.SGD(params, lr=0.5, fused=True),
    lambda params: headroom.torch.SGD(params, lr=0.5),
])


@REPLACED
@pytest.mark.parametrize("same_model", [True, False])
def test_training_goes_on_when_an_optimizer_was_deleted(make, same_model):
    model = nn.Linear(5, 4)
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    for _ in range(3):
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 5)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step_applied
        if not same_model:
            model = nn.Linear(5, 4)


def train_once(model, optimizer, scaler, factor=1.0):
    optimizer.zero_grad()
    scaler.scale((model(torch.ones(1, 5, dtype=model.weight.dtype)) * factor).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kept", ["state_dict", "state", "deepcopy"])
def test_gradients_of_a_deleted_optimizer_are_not_rescaled(kept):
    model = nn.Linear(5, 4)
    optimizer = headroom.torch.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if kept == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    train_once(model, optimizer, scaler)
    grad = model.weight.grad  # which would be freed, and its memory used by others, without this reference
    before = grad.clone()
    state = optimizer.state if kept == "state" else optimizer.state_dict()
    model = nn.Linear(5, 4)
    optimizer = headroom.torch.SGD(model.parameters(), lr=0.5)
    gc.collect()
    train_once(model, optimizer, scaler, INF)
    assert not scaler.last_step_applied and torch.equal(grad, before)
    assert len(state) > 0


def test_unscaling_names_what_is_wrong_with_the_parameters():
    model = nn.Linear(5, 4)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1)
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    train_once(model, optimizer, scaler)
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    kept = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(headroom.Error, match="were changed after the first step"):
        scaler.unscale_(optimizer)
    optimizer.param_groups[0]["params"].append(kept)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step_applied


@pytest.mark.parametrize("change", ["type", "size", "groups"])
def test_an_old_optimizer_that_cannot_be_used_any_more_does_not_stop_the_others(change):
    model = nn.Linear(5, 4).bfloat16()
    old = headroom.torch.AdamW(model.parameters(), lr=0.1)
    scaler = headroom.torch.GradScaler(model.weight.device.type)
    train_once(model, old, scaler)
    if change == "type":
        model.float()
    elif change == "size":
        model.weight.data = model.weight.data[:2].clone()
        model.bias.data = model.bias.data[:2].clone()
    else:
        old.param_groups.clear()
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.1)
    for factor in (1.0, INF, 1.0):
        before = model.weight.detach().clone()
        train_once(model, optimizer, scaler, factor)
        assert scaler.last_step_applied == (factor == 1.0) and torch.equal(model.weight, before) == (factor != 1.0)
    scaler.scale(model(torch.ones(1, 5, dtype=model.weight.dtype)).float().sum()).backward()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(headroom.Error, match="make a new optimizer"):
            call(old)
    scaler.step(optimizer)
    scaler.update()


@REPLACED
@pytest.mark.parametrize("scaler_first", [True, False])
def test_nothing_keeps_parameters_alive(make, scaler_first):
    model = nn.Linear(5, 4)
    optimizer, scaler = make(model.parameters()), headroom.torch.GradScaler(model.weight.device.type)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 5)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    weight = weakref.ref(model.weight)
    if scaler_first:
        del scaler
    del model, optimizer
    gc.collect()
    assert weight() is None
