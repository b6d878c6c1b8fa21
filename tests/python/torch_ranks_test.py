"""headroom.torch.GradScaler on four processes over Gloo, in twelve layouts of sharded training."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

JOB = pathlib.Path(__file__).with_name("ranks_job.py")
LAYOUTS = ["dp", "hsdp", "tp", "dp_tp", "dp_ep", "pp_dp", "replicated_first", "replicated_last", "plain_beside_dtensor",
           "empty_shards", "cpu_offload", "fsdp1"]

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the ranks communicate over Gloo")


def run_job(folder, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = folder / "outcomes.json"
    ranks = []
    for rank in range(4):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, JOB, output, *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), printed[0][-3000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("ranks"), "headroom")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_wherever_the_inf_is(outcomes, layout):
    found = outcomes[layout]
    assert all(rank == found["clean"]["ranks"][0] for rank in found["clean"]["ranks"])
    assert len(found["bad"]) >= 4
    for outcome in found["bad"]:
        assert outcome["ranks"] == [{"scale": 2.0, "moved": False, "norm": float("inf")}] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_counts_every_element_once(outcomes, layout):
    clean = outcomes[layout]["clean"]
    assert clean["ranks"][0]["norm"] == pytest.approx(clean["norm"], rel=1e-6)


def test_training_with_random_faults_follows_the_whole_model(tmp_path):
    for layout, found in run_job(tmp_path, "headroom", 40).items():
        assert found["same"] and found["skipped"] > 0, layout
        assert found["worst"] < 1e-6 and found["gap"] < 1e-6, layout
