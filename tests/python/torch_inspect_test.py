"""headroom.inspect for PyTorch modules and tensors."""

import math

import pytest
import torch

import headroom


def oracle(tensor):
    values = tensor.detach().double().flatten()
    values = values[values != 0]
    half = values.to(torch.float16).abs()
    return (int((half == 0).sum()), int(((half > 0) & (half < 2.0**-14)).sum()), int(half.isinf().sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_counts_of_a_module_equal_those_of_torchs_conversion(dtype):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64) * 2.0 ** (torch.rand(64, 64) * 47 - 30))
    report = headroom.inspect(model)
    names = [name for name, _ in model.named_parameters()] + ["1.running_mean", "1.running_var"]
    assert [tensor.name for tensor in report.tensors] == names
    first = report.tensors[0]
    assert (first.flushed, first.subnormal, first.overflow) == oracle(model[0].weight) and first.overflow > 0
    assert report.keep_fp32[0] == "0.weight" and report.left_out == [("", "1.num_batches_tracked", "int64")]


def test_a_healthy_model_is_safe_also_as_a_state_dict_and_transposed():
    model = torch.nn.Linear(8, 4)
    assert headroom.inspect(model).safe and headroom.inspect(model.state_dict()).safe
    report = headroom.inspect({"w": model.weight.T, "v": model.weight[:, ::2]})
    assert [tensor.count for tensor in report.tensors] == [32, 16]


class Masked(torch.nn.Module):
    def __init__(self, fill, persistent, other=0.0):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        mask = torch.full((4, 4), fill).triu(1)
        mask[3, 0] = other
        self.register_buffer("mask", mask, persistent=persistent)


def test_masks_in_buffers_are_no_damage():
    lowest = torch.finfo(torch.float32).min
    for fill in (-math.inf, lowest):
        assert headroom.inspect(torch.nn.Sequential(Masked(fill, True))).safe
        report = headroom.inspect(torch.nn.Sequential(Masked(fill, False, other=7e4)))
        assert report.safe and [tensor.name for tensor in report.tensors] == ["0.fc.weight", "0.fc.bias"]
    for other in (7e4, math.inf, math.nan):  # beside the mask
        assert not headroom.inspect(Masked(lowest, True, other)).safe
    model = Masked(0.0, True)
    torch.nn.init.constant_(model.fc.bias, lowest)
    assert headroom.inspect(model).keep_fp32 == ["fc.bias"]


def test_weights_of_a_type_that_is_not_read_leave_the_verdict_open():
    weights = {"w": torch.zeros(10, 10).to(torch.float8_e4m3fn), "b": torch.ones(4)}
    report = headroom.inspect(weights)
    assert not report.safe and not report.complete and "only 4 of 104 floating-point weights" in report.verdict
    assert headroom.inspect({"b": torch.ones(4), "step": torch.zeros(1, dtype=torch.int64)}).complete


def test_a_model_without_values_is_refused():
    with pytest.raises(ValueError, match="meta device"):
        headroom.inspect(torch.nn.Linear(2, 2, device="meta"))
    assert not headroom.inspect({"w": torch.tensor([math.nan])}).safe
