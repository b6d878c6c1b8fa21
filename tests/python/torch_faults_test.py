"""The faults of docs/reliability.md under headroom.torch.GradScaler: with torch's optimizers and with ours."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "reliability"
# torch.optim's own load_state_dict, which no scaler sees.
NOT_OURS = {"optimizer-state-of-another-model", "optimizer-state-in-another-order"}

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the faults are tried on the CPU")


def outcomes_with(optimizer, *options):
    environment = {**os.environ, "HEADROOM_FAULTS_SCALER": "headroom", "HEADROOM_FAULTS_OPTIMIZER": optimizer}
    run = subprocess.run([sys.executable, FOLDER / "pytorch.py", *options], env=environment, text=True,
                         capture_output=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return {name: result["outcome"] for name, result in json.loads(run.stdout)["faults"].items()}


@pytest.mark.parametrize("optimizer", ["plain", "foreach", "fused"])
def test_no_fault_corrupts_or_is_silent_with_torch_optimizers(optimizer):
    bad = {name for name, word in outcomes_with(optimizer, "--quick").items() if word not in ("fine", "reported")}
    assert bad == NOT_OURS


def test_no_fault_corrupts_or_is_silent_with_our_optimizers():
    found = outcomes_with("headroom")
    assert set(found.values()) == {"fine", "reported"}
    recorded = json.loads((FOLDER / "headroom_torch.json").read_text())["faults"]
    # Where ranks wait 5 seconds for each other, a slow machine may report what is fine.
    expected = {name: result["outcome"] for name, result in recorded.items() if "rank" not in name}
    assert {name: found.get(name, word) for name, word in expected.items()} == expected
