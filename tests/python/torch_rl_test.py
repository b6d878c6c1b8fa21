"""examples/rl_fp16.py: FP16 brings sampler and trainer closer, fine-tuning learns, and overflows cost no batch."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import torch

import headroom.torch

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "examples" / "rl_fp16.py"
TOO_HIGH = 2**30  # a scale at which the gradients of the small model overflow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the program writes for its shortest run."""
    path = tmp_path_factory.mktemp("rl") / "rl.json"
    command = [sys.executable, PROGRAM, "--quick", "--json", path]
    shown = subprocess.run(command, text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def example():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("rl_fp16", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def start(example):
    """Settings of a task of two digits, and a model that solves a part of it."""
    settings = dataclasses.replace(example.QUICK, digits=2, prompts=8)
    return settings, example.learn_from_examples(settings, torch.device("cpu"), seed=1)[0]


@pytest.fixture
def fine_tune(example, start, tmp_path):
    """Fine-tunes in FP16 for some steps; returns the record and the last checkpoint."""

    def run(policy, steps, name="a"):
        path = tmp_path / f"{name}.pt"
        settings, model = start
        chosen = dataclasses.replace(settings, steps=steps)
        record = example.fine_tune(chosen, model, torch.float16, policy, 1, str(path))
        return record, headroom.torch.load(path)

    return run


def test_fp16_brings_sampler_and_trainer_closer_than_bf16(results):
    fp32, bf16, fp16 = (results["mismatch"][name] for name in ("fp32", "bf16", "fp16"))
    assert 0 < fp32["mean_difference"] < fp16["mean_difference"] < bf16["mean_difference"] / 3
    assert fp16["kl"] < bf16["kl"] / 9
    assert fp16["sequence_spread"] < bf16["sequence_spread"] / 3


def test_fine_tuning_raises_the_reward_in_every_precision(results):
    assert len(results["runs"]) == 3
    for name, run in results["runs"].items():
        assert run["reward"] > results["start_reward"], name
        assert run["step"] == results["settings"]["steps"]


def test_retry_loses_no_batch(results, fine_tune):
    assert results["runs"]["fp16, headroom-retry"]["lost"] == []
    record, _ = fine_tune(f"headroom-retry:init_scale={TOO_HIGH}", 3)
    assert record["lost"] == [] and record["retried"] > 0


def test_the_schedule_waits_for_skipped_steps(fine_tune):
    record, saved = fine_tune(f"torch:init_scale={TOO_HIGH}", 4)
    assert 0 < len(record["lost"]) and "inf" in record["lost"][0]["report"]
    assert saved["schedule"]["last_epoch"] == 4 - len(record["lost"])


def test_a_resumed_run_equals_an_uninterrupted_one(fine_tune):
    policy = f"headroom-retry:init_scale={TOO_HIGH}"
    whole, state = fine_tune(policy, 6, "whole")
    fine_tune(policy, 3, "parts")
    resumed, resumed_state = fine_tune(policy, 6, "parts")
    assert resumed == whole
    assert resumed_state["scaler"] == state["scaler"]
    assert all(torch.equal(resumed_state["model"][name], tensor) for name, tensor in state["model"].items())
