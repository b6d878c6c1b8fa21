"""headroom.torch.AdamW and SGD follow torch.optim, with FP32 master weights inside."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type

INF = float("inf")
PAIRS = {
    "adamw": (torch.optim.AdamW, headroom.torch.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, headroom.torch.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, headroom.torch.SGD,
                 {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}


def make_model(seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def run_backward(model, step, scaler=None, scale=1.0):
    torch.manual_seed(step)
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(5, 1, 4, 4).to(dtype)).float().square().mean() * scale
    model.zero_grad()
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


def assert_models_close(model, other, **tolerance):
    for mine, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.usefixtures("move_detection")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("scaler_class", [None, torch.amp.GradScaler, headroom.torch.GradScaler])
def test_weights_equal_those_of_torch_optim(pair, scaler_class):
    theirs_class, ours_class, options = PAIRS[pair]
    a, b = make_model(), make_model()
    theirs, ours = theirs_class(a.parameters(), **options), ours_class(b.parameters(), **options)
    for step in range(5):
        run_backward(a, step)
        theirs.step()
        if scaler_class is None:
            run_backward(b, step)
            assert ours.step() is None
        elif step == 0:
            scaler = scaler_class(DEVICE, growth_interval=2)
        if scaler_class is not None:
            run_backward(b, step, scaler)
            scaler.step(ours)
            scaler.update()
    assert_models_close(b, a)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, headroom.torch.GradScaler])
def test_skipped_step_leaves_weights_and_state_unchanged(scaler_class):
    model, scaler = make_model(), scaler_class(DEVICE)
    optimizer = headroom.torch.AdamW(model.parameters())
    run_backward(model, 0, scaler), scaler.step(optimizer), scaler.update()
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    run_backward(model, 1, scaler)
    model[0].weight.grad[0] = INF
    scaler.step(optimizer)
    scaler.update()
    assert_models_close(model, before, rtol=0, atol=0)
    assert scaler.get_scale() == 32768.0
    after = optimizer.state_dict()["state"]
    for key, values in state["state"].items():
        assert all(torch.equal(after[key][name], values[name]) for name in values)


def test_step_after_unscale_does_not_unscale_again():
    a, b = make_model(), make_model()
    theirs = torch.optim.AdamW(a.parameters(), lr=0.01)
    ours = headroom.torch.AdamW(b.parameters(), lr=0.01)
    one, two = torch.amp.GradScaler(DEVICE), headroom.torch.GradScaler(DEVICE)
    for model, optimizer, scaler in ((a, theirs, one), (b, ours, two)):
        run_backward(model, 0, scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
    assert_models_close(b, a)


@pytest.mark.parametrize("scaled", [False, True])
def test_max_norm_equals_clip_grad_norm(scaled):
    a, b = make_model(), make_model()
    theirs = torch.optim.SGD(a.parameters(), lr=1.0)
    ours = headroom.torch.SGD(b.parameters(), lr=1.0, max_norm=0.01)
    run_backward(a, 0)
    torch.nn.utils.clip_grad_norm_(a.parameters(), 0.01)
    theirs.step()
    if scaled:
        scaler = headroom.torch.GradScaler(DEVICE)
        run_backward(b, 0, scaler)
        scaler.step(ours)
    else:
        run_backward(b, 0)
        ours.step()
    assert_models_close(b, a)


def test_max_norm_skips_inf_gradients_without_a_scaler():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([INF, 1.0])
    headroom.torch.SGD([weight], lr=1.0, max_norm=1.0).step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_have_fp32_masters(dtype):
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = headroom.torch.SGD([weight], lr=2.0**-14)
    for _ in range(256):  # each update is far below half an ulp of the 16-bit weight
        weight.grad = torch.ones(3, dtype=dtype)
        optimizer.step()
    assert weight.tolist() == [1 - 256 * 2.0**-14] * 3
    master = optimizer.state_dict()["state"][0]["master"]
    assert master.dtype == torch.float32 and master.tolist() == [1 - 256 * 2.0**-14] * 3
    without = headroom.torch.SGD([weight], lr=2.0**-14, master_weights=False)
    before = weight.clone()
    weight.grad = torch.ones(3, dtype=dtype)
    without.step()
    assert torch.equal(weight, before)


@pytest.mark.usefixtures("move_detection")
def test_master_follows_a_weight_written_by_the_user():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = headroom.torch.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    weight.detach().fill_(4.0)
    optimizer.step()
    assert weight.tolist() == [3.0, 3.0]
    weight.data = torch.full((2,), 7.0, dtype=torch.bfloat16)
    optimizer.step()
    assert weight.tolist() == [6.0, 6.0]


def test_step_bumps_weight_versions_for_autograd():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = headroom.torch.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2)
    loss = weight.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_are_bumped_with_a_torch_that_takes_one_tensor_at_a_time(monkeypatch):
    bump = torch.autograd.graph.increment_version

    def of_torch_2_3(tensor):
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")
        bump(tensor)

    monkeypatch.setattr(headroom.torch._memory, "increment_version", of_torch_2_3)
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2)
    headroom.torch.SGD(weights, lr=0.5).step()
    assert [weight._version for weight in weights] == [1, 1]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_resumes_exactly_from_a_state_dict(pair, dtype):
    _, ours_class, options = PAIRS[pair]
    a = make_model(dtype=dtype)
    first = ours_class(a.parameters(), **options)
    for step in range(3):
        run_backward(a, step), first.step()
    file = io.BytesIO()
    torch.save({"model": a.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    b = make_model(seed=2, dtype=dtype)
    second = ours_class(b.parameters(), lr=5.0, **{k: v for k, v in options.items() if k != "lr"})
    b.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert second.param_groups[0]["lr"] == options["lr"]
    for step in range(3, 6):
        run_backward(a, step), first.step()
        run_backward(b, step), second.step()
    assert_models_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("from_torch", [True, False])
def test_state_dicts_are_interchangeable_with_torch_optim(pair, from_torch):
    theirs_class, ours_class, options = PAIRS[pair]
    first, second = (theirs_class, ours_class) if from_torch else (ours_class, theirs_class)
    a, b = make_model(), make_model(seed=2)
    one, two = first(a.parameters(), **options), second(b.parameters(), **options)
    for step in range(3):
        run_backward(a, step), one.step()
    b.load_state_dict(a.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # torch.optim would share the tensors
    for step in range(3, 6):
        run_backward(a, step), one.step()
        run_backward(b, step), two.step()
    assert_models_close(b, a)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copied_optimizer_steps_like_the_original(duplicate):
    model = make_model(dtype=torch.bfloat16)
    optimizer = headroom.torch.AdamW(model.parameters(), max_norm=0.5)
    run_backward(model, 0), optimizer.step()
    again = duplicate(optimizer)
    assert again.max_norm == 0.5
    for group, other in zip(optimizer.param_groups, again.param_groups):
        for mine, theirs in zip(group["params"], other["params"]):
            assert mine is not theirs
            theirs.grad = mine.grad.clone()
    optimizer.step(), again.step()
    for mine, theirs in zip(model.parameters(), again.param_groups[0]["params"]):
        assert torch.equal(mine, theirs)


def test_damaged_state_dict_is_refused_and_changes_nothing():
    model = make_model()
    optimizer = headroom.torch.AdamW(model.parameters(), lr=0.5)
    run_backward(model, 0), optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    for damage in (lambda s: s["state"][0].update(exp_avg=torch.ones(3)),
                   lambda s: s["state"][0].update(exp_avg_sq=-torch.ones(4, 1, 3, 3)),
                   lambda s: s["state"][0].update(exp_avg=torch.full((4, 1, 3, 3), INF)),
                   lambda s: s["param_groups"][0].update(amsgrad=True)):
        bad = copy.deepcopy(good)
        bad["param_groups"][0]["lr"] = 0.25
        damage(bad)
        with pytest.raises(headroom.Error):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()
        assert now["param_groups"] == good["param_groups"]
        assert torch.equal(now["state"][0]["exp_avg"], good["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda weight: weight.grad.resize_(4),
        lambda weight: weight.grad.resize_(1),
        lambda weight: weight.grad.untyped_storage().resize_(0),
        lambda weight: weight.grad.untyped_storage().resize_(8),
        lambda weight: weight.untyped_storage().resize_(8),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.usefixtures("move_detection")
def test_tensors_resized_in_place_are_refused(damage, steps_before):
    weight = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    scaler = headroom.torch.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    weight.grad = torch.ones(2, 4)
    for _ in range(steps_before):
        scaler.step(optimizer)
        scaler.update()
    before = weight.detach().clone()
    damage(weight)
    with pytest.raises(headroom.InvalidArgument, match=r"param_groups\[0\].params\[0\]"):
        scaler.step(optimizer)
    if weight.untyped_storage().nbytes() == 32:
        assert torch.equal(weight.detach(), before)


def test_profiler_and_global_hooks_see_the_step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    weight.grad = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in [event.key for event in profile.key_averages()]
    order = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("all before")),
        optimizer.register_step_pre_hook(lambda *_: order.append("before")),
        optimizer.register_step_post_hook(lambda *_: order.append("after")),
        register_optimizer_step_post_hook(lambda *_: order.append("all after")),
    ]
    for handle in handles:
        optimizer.step()
        handle.remove()
    optimizer.step()
    assert order == [
        *("all before", "before", "after", "all after"),
        *("before", "after", "all after"),
        *("after", "all after"),
        "all after",
    ]
    torch.testing.assert_close(weight.detach(), torch.full((2,), -2.0))


def test_hooks_run_once_in_subclasses_with_the_arguments_of_torch():
    class Counting(headroom.torch.SGD):
        def step(self, closure=None):
            return super().step(closure)

    seen = []
    for kind in (torch.optim.SGD, headroom.torch.SGD, Counting):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = kind([weight], lr=0.5)
        weight.grad = torch.ones(2)
        seen.append([])
        optimizer.register_step_pre_hook(lambda _, *arguments: seen[-1].append(arguments))
        optimizer.step()
        assert [(args[1:], kwargs) for args, kwargs in seen[-1]] == [((), {})]


def test_groups_schedulers_closures_and_hooks_work():
    model, late = make_model(), torch.nn.Parameter(torch.ones(3))
    optimizer = headroom.torch.SGD(
        [{"params": [model[0].weight]}, {"params": [model[2].weight], "lr": 0.0}], lr=0.5
    )
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    frozen = model[2].weight.clone()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert optimizer.step(lambda: run_backward(model, 0)).requires_grad
    schedule.step()
    assert torch.equal(model[2].weight, frozen) and called == [1]
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(3)
    before = model[0].weight.clone()
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before - 0.25 * model[0].weight.grad)
    assert late.tolist() == [0.0, 0.0, 0.0]
    optimizer.zero_grad()
    assert late.grad is None


def test_learning_rate_may_be_a_tensor():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    headroom.torch.SGD([weight], lr=torch.tensor(0.5)).step()
    assert weight.item() == 0.5


@pytest.mark.usefixtures("move_detection")
def test_gradients_of_any_layout_are_applied():
    weights = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(4)]
    values = torch.arange(6.0).reshape(2, 3)
    weights[0].grad = values.clone()
    weights[1].grad = values.t().contiguous().t()
    weights[2].grad = torch.stack([values, values], -1)[..., 0]
    weights[3].grad = values.to_sparse()
    weights.append(torch.nn.Parameter(torch.zeros(3, 2).t()))
    weights[4].grad = values.clone()
    weights.append(torch.nn.Parameter(torch.ones(2)))  # without a gradient
    weights.append(torch.nn.Parameter(torch.zeros(2, 3)))
    weights[6].grad = torch.ones(()).expand(2, 3)
    headroom.torch.SGD(weights, lr=1.0).step()
    assert torch.equal(weights[6].detach(), torch.full((2, 3), -1.0))
    for weight in weights[:5]:
        assert torch.equal(weight.detach(), -values)
    assert weights[5].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_another_layout_may_stay_in_one_place(scaled):
    weight = torch.nn.Parameter(torch.zeros(3, 2).t())
    optimizer, memory = headroom.torch.SGD([weight], lr=1.0), torch.zeros(2, 3)
    scaler = headroom.torch.GradScaler(weight.device.type, init_scale=2.0)
    for step in range(1, 4):
        weight.grad = memory.copy_(torch.arange(6.0).view(2, 3) * step * (2.0 if scaled else 1.0))
        if scaled:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert torch.equal(weight, torch.arange(6.0).view(2, 3) * -6.0)


def test_unsupported_parameters_are_refused():
    for bad in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.complex64),
                torch.zeros(2, device="meta"), torch.zeros(4)[::2]):
        with pytest.raises(headroom.Error) as caught:
            headroom.torch.AdamW([torch.nn.Parameter(bad)])
        assert caught.value.code == "unsupported"
    with pytest.raises(ValueError):
        headroom.torch.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=-1.0)
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(headroom.Error):
        headroom.torch.AdamW([weight]).add_param_group(
            {"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]}
        )
    optimizer = headroom.torch.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(headroom.Error, match="changed"):
        optimizer.step()


def test_array_api_accepts_torch_tensors():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    grad = torch.full((2,), 65536.0, dtype=torch.bfloat16)
    optimizer = headroom.SGD({"w": (weight, grad)}, lr=0.5)
    scaler = headroom.GradScaler()
    scaler.scale(1.0)
    assert scaler.step(optimizer).applied
    assert weight.tolist() == [0.5, 0.5]


def test_sharded_parameters_need_our_scaler():
    """torch's scalers decide for each process by itself where the optimizer takes the scale."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight._fsdp_flattened = True  # as FSDP1 marks its parameters
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(headroom.Error, match="headroom.torch.GradScaler"):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0] * 4
    del optimizer.grad_scale, optimizer.found_inf  # which torch's scaler leaves behind after an exception
    weight.grad = torch.ones(4)
    optimizer.step()
    assert weight.tolist() == [0.5] * 4


def test_a_step_does_not_look_through_a_state_that_nobody_has_read(monkeypatch):
    """It would take longer than the step of many small tensors."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = headroom.torch.AdamW([weight])

    def refuse(*_):
        raise AssertionError("looked")

    monkeypatch.setattr(type(optimizer), "_was_changed", refuse)
    for _ in range(3):
        optimizer.step()
    assert optimizer.state[weight]["step"] == 3
    with pytest.raises(AssertionError, match="looked"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("from_torch", [True, False])
def test_distributed_checkpoints_are_interchangeable_with_torch_optim(tmp_path, from_torch, dtype):
    checkpoints = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def stepped(cls, gradient):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = cls(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        return model, optimizer

    classes = [torch.optim.AdamW, headroom.torch.AdamW]
    source, target = classes if from_torch else classes[::-1]
    model, optimizer = stepped(source, 2.0)
    checkpoints.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    other, loaded = stepped(target, 1.0)
    state = get_optimizer_state_dict(other, loaded)
    planner = checkpoints.DefaultLoadPlanner(allow_partial_load=True)
    checkpoints.load(state, checkpoint_id=tmp_path, planner=planner)
    set_optimizer_state_dict(other, loaded, state)
    moments = optimizer.state[model.weight]["exp_avg"].float()
    torch.testing.assert_close(loaded.state[other.weight]["exp_avg"].float(), moments, rtol=1e-3, atol=0.0)
