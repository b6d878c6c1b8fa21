"""headroom.diagnose on runs recorded in PyTorch: faults that headroom train cannot have. tests/cli/diagnose_test.py has
the others."""

import os

import pytest
import torch

import headroom
import headroom.torch

DEVICE = os.environ.get("HEADROOM_TEST_DEVICE", "cpu")


def train(folder, model, batch, loss_of, steps=60, policy="dynamic:growth_interval=10", layers_every=10, **options):
    """Trains in FP16 and returns the diagnosis; loss_of(result) is a number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = headroom.torch.GradScaler(DEVICE, policy=policy, model=model)
    with headroom.torch.Recorder(folder, scaler, layers_every=layers_every, **options) as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                result = model(batch)
            loss = loss_of(result.float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(loss)
        return recorder.diagnose()


class Gained(torch.nn.Module):
    """The gradient of `gain` is many times larger than those of the other parameters."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(32, 32)
        self.gain = torch.nn.Linear(32, 1, bias=False)

    def forward(self, x):
        return torch.cat([self.body(x), self.gain(x) * 1e3], 1)


def test_the_tensor_that_bounds_the_scale_is_named(tmp_path):
    torch.manual_seed(0)
    weights = torch.cat([torch.full((32,), 1e-2), torch.ones(1)])
    found = train(tmp_path, Gained(), torch.randn(64, 32), lambda y: (y * weights).square().mean(),
                  settings={"precision": "fp16"})
    assert found.findings[0].rule == "one-tensor", str(found)
    assert found.findings[0].code == 'headroom.torch.keep_fp32(model, ["gain"])'


def test_gradients_that_need_more_range_than_fp16_get_bf16(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 24, bias=False)
    features = torch.tensor([1.0] + 23 * [2.0**-16])
    targets = torch.tensor([1.0] + 23 * [2.0**-7])
    found = train(tmp_path, model, torch.randn(64, 24) * features, lambda y: ((y - 1) * targets).square().mean(),
                  steps=150, settings={"precision": "fp16"})
    assert found.findings[0].rule == "no-scale-left", str(found)
    assert found.findings[0].command == "--precision bf16"


def test_the_precision_of_a_16_bit_model_is_recorded(tmp_path):
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = headroom.torch.GradScaler(DEVICE, model=model)
    with headroom.torch.Recorder(tmp_path, scaler, settings={"lr": 1e-3}) as recorder:
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(loss)
    diagnosis = headroom.diagnose(tmp_path)
    assert [finding.rule for finding in diagnosis.findings] == ["no-scaler-needed"]
    assert "GradScaler(enabled=False)" in str(diagnosis)


def test_a_healthy_run_has_nothing_wrong(tmp_path):
    torch.manual_seed(0)
    found = train(tmp_path, torch.nn.Linear(32, 32), torch.randn(64, 32), lambda y: (y - 1).square().mean(),
                  policy="headroom")
    assert not found.findings and str(found).startswith("Nothing is wrong: "), str(found)


def test_a_folder_of_several_runs_is_refused(tmp_path):
    for name in "ab":
        headroom.Recorder(tmp_path / name).finish()
    with pytest.raises(ValueError, match="2 runs"):
        headroom.diagnose(tmp_path)
    assert "too short" in headroom.diagnose(tmp_path / "a").summary
