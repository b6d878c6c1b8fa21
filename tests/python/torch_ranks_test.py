"""headroom.torch.GradScaler on four processes over Gloo, in twelve layouts of sharded training."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

import headroom.torch

JOB = pathlib.Path(__file__).with_name("ranks_job.py")
LAYOUTS = ["dp", "hsdp", "tp", "dp_tp", "dp_ep", "pp_dp", "replicated_first", "replicated_last", "plain_beside_dtensor",
           "empty_shards", "cpu_offload", "fsdp1"]

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the ranks communicate over Gloo")
needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this PyTorch (2.6) does not train on the CPU")


def run_job(folder, *arguments, ranks=4, fused=False, job=JOB):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = folder / "outcomes.json"
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **({"HEADROOM_FUSED": "1"} if fused else {})}
        command = [sys.executable, job, output, *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                          text=True))
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), printed[0][-3000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "headroom"])
def outcomes(tmp_path_factory, request):
    return run_job(tmp_path_factory.mktemp("ranks"), "headroom", fused=request.param)


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


@needs_fsdp_on_cpu
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "headroom"])
def test_training_with_random_faults_follows_the_whole_model(tmp_path, fused):
    for layout, found in run_job(tmp_path, "headroom", 40, fused=fused).items():
        assert found["same"] and found["skipped"] > 0, layout
        assert found["worst"] < 1e-6 and found["gap"] < 1e-6, layout


@needs_fsdp_on_cpu
def test_distributed_checkpoints_are_loaded_by_any_number_of_ranks(tmp_path):
    saved = run_job(tmp_path, "save", tmp_path / "saved", ranks=2)
    for ranks in (4, 1):
        loaded = run_job(tmp_path, "load", tmp_path / "saved", ranks=ranks)
        assert loaded["scale"] == saved["scale"]
        for mine, theirs in zip(loaded["weights"], saved["weights"]):
            for a, b in zip(mine, theirs):
                torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("cases"), job=JOB.with_name("ranks_cases.py"))


def on_every_rank(expected):
    return [pytest.approx(expected, rel=1e-6)] * 4


KINDS = pytest.mark.parametrize("kind", ["torch", "headroom"])


@KINDS
@pytest.mark.parametrize("order", ["True True", "True False", "False True", "False False"])
def test_norms_of_sharded_and_copied_optimizers_count_once(cases, kind, order):
    assert cases[f"two_optimizers {kind} {order}"] == on_every_rank([1.0] * 4)


@KINDS
def test_an_inf_in_one_copy_never_parts_the_ranks_silently(cases, kind):
    named, unnamed = (cases[f"inf_in_one_copy {kind} {named}"] for named in (True, False))
    assert all(rank == named[0] for rank in named) and named[0][0][0] == 2.0
    assert all(rank[1] == "The ranks have gradients of di" for rank in unnamed)  # without model=, one step later


@KINDS
def test_parameter_groups_may_be_added_late(cases, kind):
    assert cases[f"late_group {kind}"] == on_every_rank([1.0, 1.0])


@KINDS
def test_an_optimizer_that_was_stepped_alone_before_counts_every_element_once(cases, kind):
    assert cases[f"counted {kind}"] == [pytest.approx(1.0, rel=1e-6)] * 4


@KINDS
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_of_a_pipeline_without_a_loss_step_with_the_others(cases, kind, schedule):
    if f"pipeline {kind} {schedule}" not in cases:
        pytest.skip("the pipeline schedules of this PyTorch (2.6) cannot leave the scale of gradients alone")
    assert cases[f"pipeline {kind} {schedule}"] == [[32.0, True, True]] * 4


@KINDS
def test_gradients_with_other_placements_are_refused(cases, kind):
    assert cases[f"other_placements {kind}"] == ["; redistribute the gradient first."[-33:]] * 4


def test_a_pipeline_whose_loss_is_not_scaled_is_refused(cases):
    assert cases["a_loss_that_nobody_scaled"] == ["No process has scaled a loss; "] * 4


@pytest.mark.parametrize("kind", ["torch", "headroom"])
def test_state_to_load_into_is_made_without_a_scaler(cases, kind):
    assert cases[f"state {kind}"] == [["exp_avg", "exp_avg_sq", "step", True]] * 4


@pytest.mark.parametrize("ranks", ["all", 5, 0.0, "none", object()])
def test_unknown_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match="ranks is"):
        headroom.torch.GradScaler("cpu", ranks=ranks)
