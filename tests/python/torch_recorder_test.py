"""headroom.torch.Recorder writes what the trainer writes, and advise() picks a scale."""

import json
import math
import os

import pytest
import torch

import headroom
import headroom.torch

DEVICE = os.environ.get("HEADROOM_TEST_DEVICE", "cpu")


def history(folder):
    with open(os.path.join(folder, "history.jsonl")) as lines:
        return [json.loads(line) for line in lines]


def of_type(folder, key):
    return [line for line in history(folder) if key in line]


def train(folder, steps=20, optimizer_of=None, bad=(7,), **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = (optimizer_of or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=1024.0, model=model)
    recorder = headroom.torch.Recorder(folder, scaler, **options)
    losses = []
    for step in range(1, steps + 1):
        x = torch.ones(3, 4) * (math.inf if step in bad else 1.0)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step(loss, lr=0.1)
        losses.append(loss.item())
    return recorder, losses


OPTIMIZERS = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "ours": lambda params: headroom.torch.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_step_is_recorded_with_its_own_loss_and_outcome(tmp_path, kind):
    recorder, losses = train(tmp_path, optimizer_of=OPTIMIZERS[kind], tensorboard=True, name="a run")
    recorder.finish(accuracy=0.5)
    steps = of_type(tmp_path, "loss")
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert losses[6] != losses[6] and steps[6]["loss"] == "nan"
    assert [line["loss"] for line in steps if line["step"] != 7] == pytest.approx(losses[:6] + losses[7:], rel=1e-6)
    assert [line["step"] for line in steps if line["overflow"]] == [7]
    assert steps[6]["culprit"].startswith("weight: ")
    assert {"history.jsonl", "report.html", "events.out.tfevents.headroom"} <= set(os.listdir(tmp_path))
    assert "a run" in (tmp_path / "report.html").read_text()


def test_layers_are_recorded_as_they_are_in_memory(tmp_path):
    recorder, _ = train(tmp_path, layers_every=10, bad=())
    recorder.finish()
    layers = of_type(tmp_path, "layers")
    assert [line["step"] for line in layers] == [1, 11]
    assert "weight" in json.dumps(layers[0]) and layers[0]["scale"] == 1024.0


def test_an_exception_ends_the_history(tmp_path):
    with pytest.raises(KeyError), train(tmp_path, steps=3, bad=())[0]:
        raise KeyError("batch")
    assert "stopped by KeyError" in json.dumps(history(tmp_path)[-1])
    assert len(of_type(tmp_path, "loss")) == 3


def test_a_resumed_run_continues_from_its_checkpoint(tmp_path):
    recorder, _ = train(tmp_path, steps=12, bad=())
    recorder.finish()
    recorder, _ = train(tmp_path, steps=5, bad=(), resume=True, first_step=9)
    recorder.finish()
    assert [line["step"] for line in of_type(tmp_path, "loss")] == list(range(1, 14))


def test_a_finished_recorder_refuses_steps(tmp_path):
    recorder, _ = train(tmp_path, steps=2, bad=())
    recorder.finish()
    with pytest.raises(ValueError, match="after finish"):
        recorder.step(1.0)


def test_advice_follows_the_scale_of_the_gradients():
    model = torch.nn.Linear(8, 8)
    loss = model(torch.ones(2, 8)).square().sum() * 1e-8
    loss.backward()
    advice = headroom.torch.advise(model)
    assert advice.verdict == "scale" and advice.scale > 1.0 and advice.flushed == 0
    model.zero_grad()
    (model(torch.ones(2, 8)).square().sum() * 1e-8 * 4096.0).backward()
    assert headroom.torch.advise(model, scale=4096.0).scale == advice.scale
    scaler = headroom.torch.GradScaler(DEVICE, policy=f"static:scale={advice.scale}")
    assert scaler.get_scale() == advice.scale


def test_advice_mentions_gradients_that_are_not_finite():
    model = torch.nn.Linear(2, 2)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.bias.grad[0] = math.inf
    assert "1 gradient is inf or NaN" in str(headroom.torch.advise(model))
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(headroom.Error, match="finite number above 0"):
            headroom.torch.advise(model, scale=scale)


def test_a_step_that_is_refused_leaves_no_gap_in_the_history(tmp_path):
    recorder, _ = train(tmp_path)
    with pytest.raises(headroom.Error, match="reserved"):
        recorder.step(1.0, scale=1.0)
    with pytest.raises(RuntimeError):
        recorder.step(torch.ones(2))
    recorder.step(1.0)
    recorder.finish()
    assert [line["step"] for line in of_type(tmp_path, "loss")] == list(range(1, 22))


def test_advice_without_gradients_says_so():
    assert headroom.torch.advise(torch.nn.Linear(2, 2)).verdict == "nothing"
    with pytest.raises(headroom.Error, match="no format"):
        headroom.torch.advise(torch.nn.Linear(2, 2), format="fp12")


def test_the_step_of_an_alarm_is_recorded(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = headroom.torch.GradScaler(DEVICE, policy="dynamic:init_scale=2,min_scale=1")
    with pytest.raises(headroom.Error), headroom.torch.Recorder(tmp_path / "run", scaler) as recorder:
        for _ in range(9):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(1.0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [line["scale"] for line in lines if "loss" in line] == [2.0, 1.0]
    assert [finding.rule for finding in headroom.diagnose(tmp_path / "run").findings] == ["at-floor"]
