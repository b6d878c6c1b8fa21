#!/usr/bin/env python3
"""`headroom train --loss-scale headroom-retry`: batches that overflow are retried."""
import os
import subprocess
import sys

from runs import check, history, run_tests

program = sys.argv[1]


def train(*arguments):
    return subprocess.run([program, "train", *map(str, arguments), "--threads", "1"],
                          capture_output=True, text=True)


def course(folder):
    return [(step["step"], step["loss"], step["overflow"], step["scale"], step["retries"])
            for step in history(folder)[1]]


def test_overflowing_batches_are_retried_instead_of_skipped(temp):
    # With this learning rate gradients jump, and torch's rule skips steps.
    wild = ["field", "--precision", "fp16", "--optimizer", "adam", "--lr", 0.5, "--steps", 200]
    result = train(*wild, "--loss-scale", "torch", "--out", f"{temp}/torch")
    check(sum(step["overflow"] for step in history(f"{temp}/torch")[1]) > 0, "torch skips some")
    check("retries" not in result.stdout and "retries" not in history(f"{temp}/torch")[1][0], result.stdout)
    result = train(*wild, "--loss-scale", "headroom-retry", "--out", f"{temp}/wild", "--checkpoint-every", 50)
    steps = history(f"{temp}/wild")[1]
    retries = sum(step["retries"] for step in steps)
    check(retries > 0 and not any(step["overflow"] for step in steps), steps)
    check(f"retries           {int(retries)}\n" in result.stdout and "skipped steps     0\n" in result.stdout, result)
    check(history(f"{temp}/wild")[3]["results"]["retries"] == retries, "the history records the retries")
    # A retried step records the scale at which it failed, so the run can be replayed.
    check(all(step["overflow_at"] > step["scale"] for step in steps if step["retries"]), steps)
    result = subprocess.run([program, "replay", "--policy", "headroom-retry", f"{temp}/wild/history.jsonl"],
                            capture_output=True, text=True)
    check(f"200 steps, 0 skipped (0.00 %), {int(retries)} retries" in result.stdout, result)
    # Resuming from a checkpoint gives the same course.
    whole = course(f"{temp}/wild")
    for name in os.listdir(f"{temp}/wild"):
        if name.endswith("200.safetensors"):
            os.remove(f"{temp}/wild/{name}")
    result = train("--resume", "--out", f"{temp}/wild")
    check(course(f"{temp}/wild") == whole, result.stderr)
    check(f"retries           {int(retries)}\n" in result.stdout, result.stdout)


def test_batch_that_fits_no_scale_is_skipped_after_eight_passes(temp):
    # The batches after it are those of a run without retries.
    for extra in ([], ["--accumulate", 3]):
        small = ["mlp", "--precision", "fp32", "--width", 32, "--batch", 16, "--steps", 12, "--inject", "nan:step=5", *extra]
        train(*small, "--loss-scale", "none", "--out", f"{temp}/plain")
        result = train(*small, "--loss-scale", "headroom-retry", "--out", f"{temp}/bad")
        check(result.returncode == 0 and "skipped steps     1\n" in result.stdout, result)
        plain, bad = history(f"{temp}/plain")[1], history(f"{temp}/bad")[1]
        check([step["loss"] for step in plain] == [step["loss"] for step in bad], (plain, bad))
        check([step["step"] for step in bad if step["overflow"]] == [5] and 1 < bad[4]["retries"] <= 8, bad)
        check(bad[4]["culprit"].endswith(": 0 inf, 1 nan") and bad[5]["scale"] == 65536, bad[4:6])


def test_run_stops_if_every_batch_is_bad(temp):
    small = ["mlp", "--precision", "fp32", "--width", 32, "--batch", 16, "--steps", 12]
    result = train(*small, "--inject", "nan", "--loss-scale", "headroom-retry")
    check(result.returncode == 3 and "passes in a row were skipped" in result.stderr, result)


run_tests(globals())
