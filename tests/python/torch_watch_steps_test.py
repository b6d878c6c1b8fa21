"""headroom.torch.watch in programs whose steps are no plain ones: copies of the model, passes without gradients, writes in
place, several watches."""

import copy
import io
import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_watch_test import nothing_left_over  # noqa: F401

import headroom.torch

DEVICE = os.environ.get("HEADROOM_TEST_DEVICE", "cpu")



def test_a_watched_model_can_be_copied_and_pickled():
    model = nn.Sequential(nn.Linear(2, 2)).to(DEVICE)
    watch = headroom.torch.watch(model)
    x = torch.ones(1, 2, device=DEVICE)
    loss = model(x).sum()  # the watch is in the middle of a step
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for duplicate in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        duplicate(x).sum().backward()
    loss.backward()
    assert watch.report().first_bad is None
    watch.remove()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("reference_first", [True, False])
def test_passes_without_gradients_are_no_steps(reference_first):
    """As in reinforcement learning, whose loop asks a model for references between forward and backward."""
    model = nn.Sequential(nn.Linear(2, 2)).to(DEVICE)
    watch = headroom.torch.watch(model, every=2)
    x = torch.ones(1, 2, device=DEVICE)

    def refer():
        with torch.no_grad():
            model(x)

    for _ in range(3):
        if reference_first:
            refer()
        loss = model(x).sum() * float("inf")
        if not reference_first:
            refer()
        loss.backward()
    report = watch.report()
    assert watch._steps == 3 and any(row.backward for row in report.rows)
    assert report.first_bad.operation == "mul"
    watch.remove()


@pytest.mark.parametrize("write", ["copy_", "setitem", "index_add_"])
def test_writes_to_new_buffers_are_no_inputs(write):
    class Combine(nn.Module):
        def forward(self, x):
            result = torch.zeros(2, 2, device=x.device, dtype=torch.float16)
            wide = x.float() * 1e6
            if write == "copy_":
                result.copy_(wide)
            elif write == "setitem":
                result[:] = wide
            else:
                rows = torch.tensor([0, 0], device=x.device)
                result.index_add_(0, rows, x * 40000)
            return result * 1

    model = nn.Sequential(Combine()).to(DEVICE)
    watch = headroom.torch.watch(model)
    model(torch.ones(2, 2, device=DEVICE).half())
    report = watch.report()
    assert report.inputs_finite and report.islands() == ["0"], str(report)
    watch.remove()


def test_reentrant_checkpoints_do_not_hide_where_the_overflow_is():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.constant_(self.first.weight, 30.0)
            nn.init.constant_(self.second.weight, 300.0)

        def forward(self, x):
            return checkpoint(lambda y: self.second(self.first(y)), x, use_reentrant=True)

    model = nn.Sequential(Block()).to(DEVICE)
    watch = headroom.torch.watch(model)
    with torch.autocast(DEVICE, torch.float16):
        model(torch.ones(3, 4, device=DEVICE, requires_grad=True)).float().mean().backward()
    assert str(watch.report().first_bad) == "0.second: linear" and watch.report().islands() == ["0.second"]
    watch.remove()


def test_watches_of_two_models_may_end_in_any_order():
    models = [nn.Linear(2, 2).to(DEVICE) for _ in range(2)]
    watches = [headroom.torch.watch(model, every=1) for model in models]
    x = torch.ones(1, 2, device=DEVICE)
    for _ in range(5):
        loss = sum(model(x).sum() for model in models)
        watches[0].report()
        loss.backward()
    for watch in watches:
        watch.remove()


def test_a_scaler_with_the_watch_as_alarm_can_be_copied():
    scaler = headroom.torch.GradScaler("cpu", on_alarm=headroom.torch.watch(nn.Linear(2, 2)).on_alarm)
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()
