"""The table in docs/python.md of faults that headroom.torch.GradScaler shares with torch's is correct."""

import math
import pathlib
import re

import pytest
import torch

import headroom.torch

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="the table is about the CPU"
)
GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
OPTIMIZERS = {"torch.optim": torch.optim.SGD, "headroom.torch": headroom.torch.SGD}


class Training:
    """One weight of four ones. A correct step with a gradient of 1 subtracts 0.1."""

    def __init__(self, optimizer_type, **options):
        self.make = lambda: optimizer_type([self.weight], lr=0.1)
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.optimizer = self.make()
        self.scaler = headroom.torch.GradScaler("cpu", **options)

    def backward(self, gradient=1.0):
        self.scaler.scale((self.weight * gradient).sum()).backward()

    def step(self, overwrite=None):
        if overwrite is not None:
            self.weight.grad.fill_(overwrite)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.weight.grad = None

    def clean_steps(self, count=3):
        for _ in range(count):
            self.backward()
            self.step()
        return self.classify(1 - 0.1 * count)

    def classify(self, expected):
        if torch.equal(self.weight, torch.ones(4)):
            return "skipped"
        return "right" if torch.allclose(self.weight, torch.tensor(expected)) else "corrupted"


def try_bad_scale(optimizer_type, value):
    def set_scale(run):
        run.scaler.update(value)

    def load_scale(run):
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": value})

    outcomes = {Training(optimizer_type, init_scale=value).clean_steps()}
    for change in (set_scale, load_scale):
        run = Training(optimizer_type)
        run.scaler.scale(torch.ones(1))
        change(run)
        outcomes.add(run.clean_steps())
    (outcome,) = outcomes
    return "stuck" if outcome == "skipped" else outcome


def try_repeated_overflow(optimizer_type):
    run = Training(optimizer_type)
    for _ in range(145):
        run.backward()
        run.step(math.inf)
    outcome = run.clean_steps()
    return "stuck" if outcome == "skipped" else outcome


def try_nan_after_unscale(optimizer_type):
    run = Training(optimizer_type)
    run.backward()
    run.scaler.unscale_(run.optimizer)
    run.step(math.nan)
    return run.classify(0.9)


def try_overflow_in_unscaling(optimizer_type):
    run = Training(optimizer_type, init_scale=2.0**-20)
    run.backward()
    run.step(1e36)
    return run.classify(0.9)


def try_two_optimizers(optimizer_type):
    run = Training(optimizer_type)
    other = run.make()
    run.backward()
    run.scaler.step(other)
    run.step()
    return run.classify(0.8)


def try_shared_gradient(optimizer_type):
    run = Training(optimizer_type)
    twin = torch.nn.Parameter(torch.ones(4))
    run.optimizer = optimizer_type([run.weight, twin], lr=0.1)
    run.backward()
    twin.grad = run.weight.grad
    try:
        run.step()
    except headroom.InvalidArgument:
        return "refused"
    return run.classify(0.9)


def try_micro_batches(optimizer_type):
    run = Training(optimizer_type)
    run.backward()
    run.scaler.update(1024.0)
    run.backward()
    run.step()
    return run.classify(0.8)


def try_disabled_scaler(optimizer_type):
    run = Training(optimizer_type, enabled=False)
    run.backward(math.inf)
    run.step()
    return run.classify(0.9)


FAULTS = {
    "a scale of 0": lambda kind: try_bad_scale(kind, 0.0),
    "a scale of NaN": lambda kind: try_bad_scale(kind, math.nan),
    "145 overflows": try_repeated_overflow,
    "a gradient becomes NaN": try_nan_after_unscale,
    "a scale below 1": try_overflow_in_unscaling,
    "a parameter in two optimizers": try_two_optimizers,
    "two parameters": try_shared_gradient,
    "micro-batches": try_micro_batches,
    "inf under a disabled scaler": try_disabled_scaler,
}


def table_rows():
    section = GUIDE.read_text().split("### What it shares with torch")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", section, re.MULTILINE)
    return {fault: words for fault, *words in cells[1:]}


def test_every_row_of_the_table_has_a_fault():
    assert len(table_rows()) == len(FAULTS)
    assert all(any(fault.startswith(name) for fault in table_rows()) for name in FAULTS)


@pytest.mark.parametrize("column", range(2), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", FAULTS)
def test_table_states_the_outcome(name, column):
    (words,) = [words for fault, words in table_rows().items() if fault.startswith(name)]
    outcome = FAULTS[name](list(OPTIMIZERS.values())[column])
    assert words[column].split(":")[0] == outcome
