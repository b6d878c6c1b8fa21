"""Gradients that headroom.torch.GradScaler refuses, because unscaling would lose them or mix scales, and those that it
has to bring into another form first."""

import pytest
import torch

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type
KINDS = {
    "plain": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "fused": lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True),
    "ours": lambda params, lr: headroom.torch.SGD(params, lr=lr),
}
kinds = pytest.mark.parametrize("kind", KINDS)
CALLS = {"step": lambda scaler, optimizer: scaler.step(optimizer),
         "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer)}


def make_half(kind="plain", lr=1.0, gradient=1.0, **options):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = headroom.torch.GradScaler(DEVICE, **options)
    scaler.scale((weight.float() * gradient).sum()).backward()
    return weight, KINDS[kind]([weight], lr), scaler


@pytest.mark.parametrize("kind, call", [("plain", "step"), ("plain", "unscale_"), ("fused", "unscale_"), ("ours", "unscale_")])
def test_fp16_gradients_that_would_be_unscaled_in_place_are_refused(kind, call):
    weight, optimizer, scaler = make_half(kind, gradient=1e-8)
    before = weight.grad.tolist()
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\..*(FP32 masters|max_norm)"):
        CALLS[call](scaler, optimizer)
    assert weight.grad.tolist() == before and not weight.any() and scaler.get_scale() == 65536.0
    weight.grad = None
    scaler.discard()
    weight.data = weight.data.float()
    scaler.scale(weight.sum()).backward()  # the scaler is as it was
    scaler.step(optimizer)
    assert scaler.last_step_applied


@pytest.mark.parametrize("kind", ["fused", "ours"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_small_fp16_gradients_reach_optimizers_that_take_the_scale(kind, max_norm):
    weight, optimizer, scaler = make_half(kind, lr=2.0**15, gradient=1e-8)
    scaler.step(optimizer, max_norm=max_norm)
    torch.testing.assert_close(weight.float(), torch.full((2,), -(2.0**15) * 1e-8), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("policy", ["none", "static:scale=1"])
def test_fp16_gradients_of_a_scale_of_1_are_stepped(policy):
    weight, optimizer, scaler = make_half(policy=policy)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == [-1.0, -1.0]
    scaler.update()
    weight.grad = None
    scaler.scale(weight.float().sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [-2.0, -2.0]


def make_pair(kind):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=4.0)
    return weights, [KINDS[kind]([weight], 0.5) for weight in weights], scaler


@kinds
@pytest.mark.parametrize("cleared", [False, True])
def test_gradients_added_after_unscale_are_refused(kind, cleared):
    (weight, other), (optimizer, second), scaler = make_pair(kind)
    scaler.scale((weight + other).sum()).backward()
    scaler.unscale_(optimizer)
    if cleared:
        optimizer.zero_grad()  # the core still counts these gradients as unscaled
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"after unscale_\(\).*two scales"):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]
    scaler.step(second)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="two scales"):  # in later rounds too, until they are cleared
            call(scaler, optimizer)
    optimizer.zero_grad()
    scaler.discard()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == other.tolist() == [0.5, 0.5]


@kinds
def test_a_backward_that_leaves_unscaled_gradients_alone_is_allowed(kind):
    """As in actor-critic loops."""
    (actor, critic), optimizers, scaler = make_pair(kind)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(actor.sum() * 4.0).backward()
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_([actor], 2.0**0.5)
        scaler.scale(critic.sum() + actor.detach().sum()).backward()
        (gradient,) = torch.autograd.grad(scaler.scale(actor.square().sum()), actor)
        torch.nn.utils.clip_grad_value_([actor], 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert critic.tolist() == [-0.5, -0.5]
    torch.testing.assert_close(actor, critic)


@kinds
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_is_not_stepped_may_get_gradients_after_unscale(kind, set_to_none):
    """As in a GAN whose discriminator is trained in some rounds only."""
    (generator, discriminator), (second, first), scaler = make_pair(kind)
    for number in range(4):
        first.zero_grad(set_to_none)
        scaler.scale(discriminator.sum()).backward()
        scaler.unscale_(first)
        if number % 2:
            scaler.step(first)
        second.zero_grad(set_to_none)
        scaler.scale((generator + discriminator).sum()).backward()
        scaler.step(second)
        scaler.update()
        assert scaler.last_step_applied
    assert discriminator.tolist() == [0.0, 0.0] and generator.tolist() == [-1.0, -1.0]


def test_gradients_replaced_in_inference_mode_are_stepped():
    (weight, other), (optimizer, second), scaler = make_pair("plain")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with torch.inference_mode():
        weight.grad = weight.grad / 2
    scaler.scale(other.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.75, 0.75]


@pytest.mark.skipif(torch.__version__.split(".")[:2] == ["2", "6"],
                    reason="compiled autograd of PyTorch 2.6 has no callback at the end of backward")
def test_compiled_autograd_runs_backward_after_unscale():
    (weight, other), (optimizer, second), scaler = make_pair("plain")
    with torch._dynamo.config.patch(compiled_autograd=True):
        run = torch.compile(lambda parameter: scaler.scale(parameter.sum()).backward(), backend="eager")
        run(weight)
        scaler.unscale_(optimizer)
        run(other)
    scaler.step(optimizer)
    scaler.step(second)
    assert weight.tolist() == other.tolist() == [0.5, 0.5]


@kinds
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_gradients_that_are_views_of_one_buffer_are_distinguished(kind, value):
    """As under DDP with gradient_as_bucket_view, where all gradients of a bucket have one version."""
    (weight, other), (optimizer, second), scaler = make_pair(kind)
    weight.grad, other.grad = torch.zeros(4).split(2)
    scaler.scale(weight.sum() * value).backward()
    scaler.unscale_(optimizer)
    scaler.scale(other.sum()).backward()
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    assert weight.tolist() == ([0.5, 0.5] if value == 1.0 else [1.0, 1.0]) and other.tolist() == [0.5, 0.5]
    for each in (optimizer, second):
        each.zero_grad(set_to_none=False)
    scaler.scale((weight + other).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="two scales"):
        scaler.step(optimizer)


@kinds
def test_the_step_after_a_refused_one_uses_the_new_gradients(kind):
    weight, other = (torch.nn.Parameter(torch.zeros(n, device=DEVICE)) for n in (1000, 8))
    optimizer = KINDS[kind]([weight, other], 1.0)
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=1.0)

    def set_gradients(value):
        scaler.scale(torch.ones((), device=DEVICE, requires_grad=True)).backward()
        weight.grad = torch.full((1000,), value, device=DEVICE)

    set_gradients(1.0)
    earlier = weight.grad  # keeps its memory
    scaler.step(optimizer)
    scaler.update()
    set_gradients(2.0)
    other.grad = weight.grad[:8]
    with pytest.raises(headroom.Error, match="share memory"):
        scaler.step(optimizer)
    other.grad = None
    scaler.step(optimizer)
    assert weight.tolist() == [-3.0] * 1000 and earlier.tolist() == [1.0] * 1000


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, headroom.torch.SGD])
def test_gradients_may_be_cleared_between_unscale_and_step(optimizer_class):
    """As loops do that drop a batch by its norm. The scale moves by what unscale_() has found."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_class([weight], lr=1.0)
    scaler = headroom.torch.GradScaler(DEVICE)
    for value, scale in ((1.0, 65536.0), (float("inf"), 32768.0)):
        scaler.scale((weight * value).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        scaler.step(optimizer)
        assert scaler.last_step_applied == (value == 1.0)
        scaler.update()
        assert scaler.get_scale() == scale and weight.tolist() == [1.0, 1.0]


def test_a_disabled_scaler_passes_on_what_only_torch_takes():
    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    scaler = headroom.torch.GradScaler(DEVICE, enabled=False)
    weights[0].grad = weights[1].grad = torch.ones(2, dtype=torch.complex64)
    scaler.step(optimizer)
    scaler.update()
    assert weights[1].tolist() == [0.5, 0.5] and scaler.last_step_applied
    with pytest.raises(headroom.Error, match="complex64"):
        scaler.step(optimizer, max_norm=1.0)


@pytest.mark.parametrize("dtype, unscale", [(torch.float32, False), (torch.float32, True), (torch.float16, False)])
def test_hooks_of_the_step_may_replace_gradients_and_change_options(dtype, unscale):
    """As gradient centralization, or a warm-up of the learning rate in a hook."""
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    kept = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = headroom.torch.SGD([weight, kept], lr=1.0)
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=4.0)

    def change(optimizer, args, kwargs):
        weight.grad = torch.full_like(weight, 2.0 if unscale else 8.0)
        kept.grad = None
        optimizer.param_groups[0]["lr"] = 0.5

    optimizer.register_step_pre_hook(change)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.float().sum() + kept.float().sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weight, torch.full_like(weight, -2.0)) and kept.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, headroom.torch.SGD])
def test_the_norm_counts_duplicate_sparse_entries_as_their_sum(optimizer_class):
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer, scaler = optimizer_class([weight], lr=1.0), headroom.torch.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.nn.functional.embedding(torch.tensor([1, 1, 1, 2]), weight, sparse=True).sum()).backward()
    norm = scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert norm.item() == pytest.approx(20**0.5) and scaler.report().grad_norm == pytest.approx(20**0.5)
    torch.testing.assert_close(weight.detach()[1], torch.full((2,), -3.0 / 20**0.5))
