#!/usr/bin/env python3
"""`headroom train --inject` injects reproducible faults; `--escape` leaves FP16 when no scale helps."""
import os
import shutil
import subprocess
import sys

from runs import check, history, run_tests

program = sys.argv[1]
SMALL = ["mlp", "--precision", "fp16", "--loss-scale", "dynamic", "--width", 32, "--batch", 16, "--steps", 60]
STUCK = [*SMALL[:-1], 120, "--inject", "overflow:step=50-75"]  # skips steps until no scale is left


def train(*arguments):
    return subprocess.run([program, "train", *map(str, arguments), "--threads", "1"],
                          capture_output=True, text=True)


def course(folder):
    return [(step["step"], step["loss"], step["overflow"], step["scale"]) for step in history(folder)[1]]


def notes(folder):
    with open(f"{folder}/history.jsonl") as file:
        return [line for line in file if '"note"' in line]


def test_faults_are_reproducible_by_seed_and_after_resume(temp):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = train(*SMALL, "--inject", "overflow:p=0.1,nan:p=0.05,tensor=out.bias", "--inject-seed", seed,
                       "--out", f"{temp}/{name}")
        hits = sum(int(step["injected"]) for step in history(f"{temp}/{name}")[1])
        check(result.returncode == 0 and f"faults injected   {hits}\n" in result.stdout, result.stderr)
    check(course(f"{temp}/a") == course(f"{temp}/b") != course(f"{temp}/c"), "the seed decides")
    steps = history(f"{temp}/a")[1]
    hit = [step for step in steps if step["injected"] > 0]
    check(3 <= len(hit) <= 20 and all(step["overflow"] for step in hit), hit)
    check(all(step["injected"] >= 1 for step in steps if step["overflow"]), "only steps with faults are skipped")
    check(any("out.bias: 0 inf, 1 nan" in step.get("culprit", "") for step in hit), hit)
    # A resumed run has the same faults.
    whole = course(f"{temp}/a")
    for checkpoint in sorted(os.listdir(f"{temp}/a")):
        if checkpoint.endswith("60.safetensors"):
            os.remove(f"{temp}/a/{checkpoint}")
    result = train("--resume", "--out", f"{temp}/a")
    check(result.returncode == 0 and course(f"{temp}/a") == whole, result.stderr)
    check(f"faults injected   {sum(int(step['injected']) for step in steps)}\n" in result.stdout, result.stdout)
    result = train("--resume", "--out", f"{temp}/a", "--inject", "nan")
    check(result.returncode == 2 and "--inject is nan, but the run in" in result.stderr, result.stderr)


def test_faults_can_be_limited_to_a_step_tensor_and_rank(temp):
    train(*SMALL, "--inject", "nan:step=5,tensor=hidden0.weight,count=3,flip:rank=1", "--out", f"{temp}/one")
    steps = history(f"{temp}/one")[1]
    check([step["step"] for step in steps if step["overflow"]] == [5], steps)
    check(steps[4]["culprit"].startswith("hidden0.weight: 0 inf, "), steps[4])


def test_invalid_faults_are_refused(temp):
    for faults, part in (("foo:p=1", "There is no fault 'foo'"), ("nan:p=2", "from 0 to 1"), ("", "no fault ''"),
                         ("nan:tensor=nope", "no parameter of that name"), ("p=1", "begin with a kind")):
        result = train(*SMALL, "--inject", faults) if faults else train(*SMALL, "--inject", ",")
        check(result.returncode == 2 and part in result.stderr, f"{faults}: {result.returncode} {result.stderr}")


def test_run_without_a_usable_scale_stops_and_can_escape_later(temp):
    result = train(*STUCK, "--out", f"{temp}/stuck")
    check(result.returncode == 3 and "stopped at step 66. The gradients overflowed at a scale of 1" in result.stderr,
          (result.returncode, result.stderr))
    check(history(f"{temp}/stuck")[3]["end"].startswith("stopped: "), "the history records the stop")
    result = train("--resume", "--escape", "bf16", "--out", f"{temp}/stuck")
    check(result.returncode == 0 and "mlp in bf16" in result.stdout, result.stderr)


def test_escape_continues_in_another_precision_from_the_last_checkpoint(temp):
    for level in ("O1", "O2", "O3"):
        for precision in ("bf16", "fp32"):
            out = f"{temp}/{level}-{precision}"
            result = train(*STUCK, "--opt-level", level, "--escape", precision, "--out", out)
            check(result.returncode == 0 and f"switching from fp16 to {precision} because of step 66." in result.stderr
                  and f"mlp in {precision}, loss scale none: 120 of 120 steps" in result.stdout,
                  f"{level} {precision}: {result.returncode} {result.stderr}")
            check(len(notes(out)) == 1 and '"step":60' in notes(out)[0], notes(out))
            steps = history(out)[1]
            check([step["step"] for step in steps] == list(range(1, 121)), "no step is duplicated")
            check(steps[-1]["loss"] < steps[55]["loss"] and steps[-1]["scale"] == 1, steps[-1])
    # Killed after the escape, it resumes in the new precision with the same command.
    whole = course(out)
    shutil.copytree(out, f"{temp}/again")
    os.remove(f"{temp}/again/checkpoint-000120.safetensors")
    result = train(*STUCK, "--opt-level", "O3", "--escape", "fp32", "--resume", "--out", f"{temp}/again")
    check(result.returncode == 0 and course(f"{temp}/again") == whole, result.stderr)
    check(len(notes(f"{temp}/again")) == 1, notes(f"{temp}/again"))


def test_escape_before_the_first_checkpoint_restarts_the_run(temp):
    result = train(*SMALL[:-1], 120, "--inject", "overflow:step=1-20", "--escape", "bf16",
                   "--checkpoint-every", 200, "--out", f"{temp}/start")
    check("resuming after step 0" in result.stderr and result.returncode == 0, (result.returncode, result.stderr))
    check(history(f"{temp}/start")[1][0]["scale"] == 1, "the first step has the new precision")


def test_infinite_loss_with_finite_gradients_stops_the_run(temp):
    result = train("field", "--precision", "fp32", "--lr", "3e18", "--clip", 1, "--schedule", "constant", "--steps", 50)
    check(result.returncode == 3 and "stopped at step 11. The loss was inf in 10 steps in a row" in result.stderr,
          result.stderr)


def test_invalid_escape_is_refused_and_writes_nothing(temp):
    for arguments, part in ((["fp16", "--escape", "fp8"], "--escape is 'fp8'"),
                            (["fp16", "--escape", "bf16"], "give --out"),
                            (["fp32", "--escape", "bf16", "--out", f"{temp}/x"], "does not help")):
        result = train("mlp", "--precision", *arguments)
        check(result.returncode == 2 and part in result.stderr, result.stderr)
    check(not os.path.exists(f"{temp}/x"), "nothing is written")


run_tests(globals())
