#!/usr/bin/env python3
"""`headroom train --loss-scale headroom-retry`: batches that overflow are retried."""
import os
import subprocess
import sys
import tempfile

from runs import check, finish, history

program = sys.argv[1]


def train(*arguments):
    return subprocess.run([program, "train", *map(str, arguments), "--threads", "1"],
                          capture_output=True, text=True)


def course(folder):
    return [(step["step"], step["loss"], step["overflow"], step["scale"], step["retries"])
            for step in history(folder)[1]]


with tempfile.TemporaryDirectory() as temp:
    # A learning rate so high that the gradients jump: nothing is skipped, where torch's rule skips.
    wild = ["field", "--precision", "fp16", "--optimizer", "adam", "--lr", 0.5, "--steps", 200]
    result = train(*wild, "--loss-scale", "torch", "--out", f"{temp}/torch")
    check(sum(step["overflow"] for step in history(f"{temp}/torch")[1]) > 0, "torch skips some")
    check("retries" not in result.stdout and "retries" not in history(f"{temp}/torch")[1][0], result.stdout)
    result = train(*wild, "--loss-scale", "headroom-retry", "--out", f"{temp}/wild", "--checkpoint-every", 50)
    steps = history(f"{temp}/wild")[1]
    again = sum(step["retries"] for step in steps)
    check(again > 0 and not any(step["overflow"] for step in steps), steps)
    check(f"retries           {int(again)}\n" in result.stdout and "skipped steps     0\n" in result.stdout, result)

    check(history(f"{temp}/wild")[3]["results"]["retries"] == again, "the report shows it")

    # A retried step says at which scale it failed, by which the run can be replayed.
    check(all(step["overflow_at"] > step["scale"] for step in steps if step["retries"]), steps)
    result = subprocess.run([program, "replay", "--policy", "headroom-retry", f"{temp}/wild/history.jsonl"],
                            capture_output=True, text=True)
    check(f"200 steps, 0 skipped (0.00 %), {int(again)} retries" in result.stdout, result)

    # It goes on from a checkpoint as if nothing had been.
    whole = course(f"{temp}/wild")
    for name in os.listdir(f"{temp}/wild"):
        if name.endswith("200.safetensors"):
            os.remove(f"{temp}/wild/{name}")
    result = train("--resume", "--out", f"{temp}/wild")
    check(course(f"{temp}/wild") == whole, result.stderr)
    check(f"retries           {int(again)}\n" in result.stdout, result.stdout)

    # A batch that no scale helps is skipped after at most eight passes; those after it are the same ones.
    for extra in ([], ["--accumulate", 3]):
        small = ["mlp", "--width", 32, "--batch", 16, "--steps", 12, "--inject", "nan:step=5", *extra]
        train(*small, "--loss-scale", "none", "--out", f"{temp}/plain")
        result = train(*small, "--loss-scale", "headroom-retry", "--out", f"{temp}/bad")
        check(result.returncode == 0 and "skipped steps     1\n" in result.stdout, result)
        plain, bad = history(f"{temp}/plain")[1], history(f"{temp}/bad")[1]
        check([step["loss"] for step in plain] == [step["loss"] for step in bad], (plain, bad))
        check([step["step"] for step in bad if step["overflow"]] == [5] and 1 < bad[4]["retries"] <= 8, bad)
        check(bad[4]["culprit"].endswith(": 0 inf, 1 nan") and bad[5]["scale"] == 65536, bad[4:6])

    # Where all batches are bad it gives up.
    result = train(*small[:7], "--inject", "nan", "--loss-scale", "headroom-retry")
    check(result.returncode == 3 and "passes in a row were skipped" in result.stderr, result)

finish()
