"""headroom.torch.GradScaler with a policy: every preset, retries, alarms, state, and under torch.compile."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type
INF = float("inf")


def make_run(policy=None, optimizer_class=torch.optim.SGD, **options):
    weight = torch.nn.Parameter(torch.ones(4))
    return weight, optimizer_class([weight], lr=0.5), headroom.torch.GradScaler(DEVICE, policy=policy, **options)


def run_step(weight, optimizer, scaler, gradient=1.0):
    optimizer.zero_grad()
    scaler.scale((weight * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("preset", headroom.presets())
def test_presets_move_the_scale_as_the_core_does(preset):
    weight, optimizer, scaler = make_run(preset, on_alarm=lambda alarm: None)
    values = torch.ones(4).numpy(force=True).copy(), torch.zeros(4).numpy(force=True).copy()
    core = headroom.GradScaler(preset, on_alarm=lambda alarm: None)
    other = headroom.SGD({"w": values}, lr=0.5)
    for step in range(12):
        gradient = INF if step in (3, 4, 8) else 2.0**-12
        run_step(weight, optimizer, scaler, gradient)
        values[1][:] = core.scale(1.0) * gradient
        core.step(other)
        core.update()
        assert scaler.get_scale() == core.get_scale()
    assert weight.tolist() == values[0].tolist()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, headroom.torch.SGD])
def test_attempts_lose_no_batch(optimizer_class):
    weight, optimizer, scaler = make_run("headroom-retry", optimizer_class)
    counts = []
    for limit in (2.0**20, 2.0**10, 2.0**10):  # the largest gradient that the "hardware" can hold
        attempts = []
        for attempt in scaler.attempts():
            attempts.append(attempt)
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            if weight.grad[0] > limit:
                weight.grad.fill_(INF)
            scaler.step(optimizer)
            scaler.update()
        counts.append(len(attempts) - 1)
        assert scaler.last_step_applied
    assert counts[0] == 0 and counts[1] > 0 and counts[2] == 0
    assert weight.tolist() == [-0.5] * 4


def test_alarm_is_raised_or_passed_on():
    alarms = []
    for on_alarm in (alarms.append, None):
        weight, optimizer, scaler = make_run("torch:max_skips_in_row=3", on_alarm=on_alarm)
        for _ in range(2):
            run_step(weight, optimizer, scaler, INF)
        if on_alarm is None:
            with pytest.raises(headroom.Error, match="3 steps in a row were skipped"):
                run_step(weight, optimizer, scaler, INF)
                scaler.report()  # on a device the alarm comes later
        else:
            run_step(weight, optimizer, scaler, INF)
            scaler.report()
    assert [alarm.skips_in_row for alarm in alarms] == [3]


def test_an_exception_of_on_alarm_ends_the_round():
    def stop(alarm):
        raise KeyboardInterrupt

    weight, optimizer, scaler = make_run("torch:max_skips_in_row=3", on_alarm=stop)
    for _ in range(2):
        run_step(weight, optimizer, scaler, INF)
    with pytest.raises(KeyboardInterrupt):
        run_step(weight, optimizer, scaler, INF)
        scaler.report()  # on a device the alarm comes later
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == scaler.get_scale()
    before = weight.tolist()
    run_step(weight, optimizer, scaler, 1.0)
    assert scaler.last_step_applied and weight.tolist() != before


@pytest.mark.parametrize("policy", ["headroom", "megatron", headroom.DynamicScale(growth_interval=2)])
def test_state_round_trips(policy):
    weight, optimizer, scaler = make_run(policy)
    for step in range(5):
        run_step(weight, optimizer, scaler, INF if step == 1 else 1e-3)
    copies = [headroom.torch.GradScaler(DEVICE, policy="torch"), pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]
    copies[0].load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for other in copies:
        assert other.state_dict() == scaler.state_dict() and other.get_scale() == scaler.get_scale()


def test_torch_state_is_refused_by_other_rules():
    _, _, scaler = make_run("headroom")
    with pytest.raises(headroom.Error, match="torch.amp.GradScaler"):
        scaler.load_state_dict(torch.amp.GradScaler(DEVICE).state_dict())


def test_loss_fn_scales_and_keeps_the_name():
    _, _, scaler = make_run("static:scale=8")
    scaled = scaler.loss_fn(torch.nn.functional.mse_loss)
    assert scaled.__name__ == "mse_loss" and scaled(torch.ones(2), torch.zeros(2)).item() == 8.0


def test_skip_above_norm_leaves_the_scale():
    weight, optimizer, scaler = make_run()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer, skip_above_norm=1.0)  # the norm is 2
    scaler.update()
    assert weight.tolist() == [1.0] * 4 and scaler.get_scale() == 65536.0
    assert "above skip_above_norm" in str(scaler.report())


@pytest.mark.parametrize("optimizer_name", ["torch", "fused", "headroom"])
def test_compiled_training_steps_give_the_same_bits(optimizer_name):
    makers = {
        "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        "headroom": lambda params: headroom.torch.AdamW(params, lr=1e-2),
    }
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = makers[optimizer_name](model.parameters())
        scaler = headroom.torch.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)

        def train(x, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

        train = torch.compile(train, backend="eager") if compiled else train
        for step in range(5):
            train(torch.full((4, 8), INF if step == 3 else 0.1 * step))
        ends.append([scaler.get_scale(), *(p.tolist() for p in model.parameters())])
        torch.compile(optimizer.step, backend="eager")()
        torch._dynamo.reset()
    assert ends[0] == ends[1]


def test_import_does_not_load_the_compiler():
    code = "import sys, torch, headroom.torch; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_unknown_devices_and_policies_are_refused():
    with pytest.raises(ValueError, match="is a policy"):
        headroom.torch.GradScaler("headroom")
    with pytest.raises(ValueError, match="unknown"):
        headroom.torch.GradScaler("gpu")
    with pytest.raises(ValueError, match="no preset"):
        headroom.torch.GradScaler(DEVICE, policy="pytorch")
    with pytest.raises(ValueError, match="beside a policy"):
        headroom.torch.GradScaler(DEVICE, growth_interval=5, policy="torch")
    with pytest.raises(ValueError, match="growth_interval"):
        headroom.torch.GradScaler(DEVICE, growth_interval=0)


def test_attempts_end_when_the_body_makes_no_update():
    weight, optimizer, scaler = make_run("headroom-retry")
    attempts = []
    for attempt in scaler.attempts():
        attempts.append(attempt)
        if attempt < 1:
            run_step(weight, optimizer, scaler, INF)
    assert attempts == [0, 1]
    assert list(scaler.attempts()) == [0]
