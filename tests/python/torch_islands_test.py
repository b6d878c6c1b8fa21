"""keep_fp32: modules that compute in FP32 under autocast."""

import copy
import os
from typing import NamedTuple

import pytest
import torch
from torch import nn
from watch_faults import gate_times_up, watched

import headroom
import headroom.torch

DEVICE = os.environ.get("HEADROOM_TEST_DEVICE", "cpu")


def test_islands_cure_the_overflow_and_can_be_removed():
    model, step = gate_times_up(DEVICE)
    names, kept = [], []
    report = watched(model, step)
    while report.first_bad is not None and len(kept) < 4:  # behind the first overflow there may be others
        names += report.islands()
        kept.append(headroom.torch.keep_fp32(model, report.islands()))
        report = watched(model, step)
    assert report.first_bad is None and names == ["blocks.1.mlp", "head"]
    forward = [row for row in report.rows if row.module.startswith("blocks.1.mlp") and not row.backward]
    assert forward and all(row.dtype == "f32" for row in forward)
    for islands in kept:
        islands.remove()
    assert str(watched(model, step).first_bad) == "blocks.1.mlp: mul"
    assert "forward" not in model.blocks[1].mlp.__dict__


def test_kept_modules_can_be_copied_nested_and_cast_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))).to(DEVICE)
    x = torch.ones(1, 2, device=DEVICE, dtype=torch.float16)
    inner = headroom.torch.keep_fp32(model, ["1.0"])
    outer = headroom.torch.keep_fp32(model, ["1", "1.0"], cast_outputs=True)
    twin = copy.deepcopy(model)
    nn.init.zeros_(model[1][0].weight)
    with torch.autocast(DEVICE, torch.float16):
        assert model(x).dtype == twin(x).dtype == torch.float16
        assert not torch.equal(model(x), twin(x))  # the copy has its own weights
        outer.remove()
        assert model(x).dtype == torch.float32
        inner.remove()
        assert model(x).dtype == torch.float16


def test_keep_fp32_refuses_unknown_names_and_16_bit_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()).to(DEVICE)
    with pytest.raises(headroom.Error, match="no module 'head'"):
        headroom.torch.keep_fp32(model, ["0", "head"])
    with pytest.raises(headroom.Error, match=r"1\.weight is a 16-bit parameter"):
        headroom.torch.keep_fp32(model, ["0", "1"])
    assert "forward" not in model[0].__dict__


def test_advice_for_16_bit_models_and_for_the_model_itself_is_what_works():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h * h

    model = Squares().to(DEVICE).half()
    nn.init.constant_(model.fc.weight, 0.0)
    nn.init.constant_(model.fc.bias, 300.0)
    x = torch.ones(2, 4, device=DEVICE).half()
    report = watched(model, lambda: model(x).square().mean().backward())
    [advice] = report.advice()
    assert "mul (8 inf, 0 nan) overflows FP16 in forward" in advice and "division by 0" not in advice
    nested = nn.Sequential(nn.Identity(), nn.Linear(4, 4)).to(DEVICE).half()
    nn.init.constant_(nested[1].bias, 60000.0)
    report = watched(nested, lambda: nested(x).float().mean().backward())
    assert report.islands() == ["1"]
    assert "keep_fp32(model" not in report.advice()[0] and "16-bit, which keep_fp32 refuses" in report.advice()[0]


class Output(NamedTuple):
    hidden: torch.Tensor
    count: int


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, batch):
        return Output(self.fc(batch["layers"][0]), 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_in_structures_are_cast(compiled):
    model = nn.Sequential(Structured()).to(DEVICE)
    headroom.torch.keep_fp32(model, ["0"], cast_outputs=True)
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    with torch.autocast(DEVICE, torch.float16):
        result = call({"layers": [torch.ones(1, 2, device=DEVICE).half()]})
    assert type(result) is Output and result.hidden.dtype is torch.float16 and result.count == 3
    torch._dynamo.reset()


def test_the_whole_model_is_no_island():
    with pytest.raises(headroom.Error, match="the whole model"):
        headroom.torch.keep_fp32(nn.Linear(2, 2), [""])


def test_autocast_is_off_without_tensor_arguments():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 2), 300.0))

        def forward(self):
            return self.weight @ self.weight

    model = nn.ModuleDict({"table": Table()}).to(DEVICE)
    headroom.torch.keep_fp32(model, ["table"])
    with torch.autocast(DEVICE, torch.float16):
        assert model["table"]().dtype is torch.float32


def test_islands_can_be_removed_in_any_order_and_by_any_name():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    first = headroom.torch.keep_fp32(model, ["a"])
    second = headroom.torch.keep_fp32(model, ["b"])
    first.remove()
    assert "forward" in shared.__dict__
    second.remove()
    assert "forward" not in shared.__dict__
