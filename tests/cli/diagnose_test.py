#!/usr/bin/env python3
"""diagnose_test.py PROGRAM: the advice on recorded runs. Runs with known faults, made by the trainer with bad settings or
injected faults, get the right cure first; healthy runs get none. (Two faults that the trainer cannot have are in
tests/python/torch_diagnose_test.py, and the borders of every rule in tests/diagnose.)"""
import glob
import json
import os
import subprocess
import sys

import chromium
from runs import check, run_tests

PROGRAM = sys.argv[1]


def train(folder, *arguments, codes=(0,)):
    """Trains and returns what the program printed at the end of the run."""
    result = subprocess.run([PROGRAM, "train", "--out", folder, "--threads", "1", *arguments], capture_output=True,
                            text=True)
    assert result.returncode in codes, result
    return result.stdout.split("report.html\n")[1]


def diagnose(folder):
    result = subprocess.run([PROGRAM, "diagnose", "--json", folder], capture_output=True, text=True)
    assert result.returncode == 0, result
    [run] = json.loads(result.stdout)["runs"]
    return run


def expect(temp, rule, cure, *arguments, codes=(0,), model="mlp", precision="fp16", resumed=False):
    """The first finding is of this rule and has this cure, and the trainer prints it at the end of the run."""
    folder = f"{temp}/{rule}"
    policy = [] if "--loss-scale" in arguments else ["--loss-scale", "dynamic"]
    printed = train(folder, model, "--precision", precision, *policy, *arguments, codes=codes)
    if resumed:  # go back to the checkpoint before the last one
        os.remove(sorted(glob.glob(f"{folder}/checkpoint-*.safetensors"))[-1])
        printed = train(folder, "--resume")
    findings = diagnose(folder)["findings"]
    check(findings and findings[0]["rule"] == rule, f"{rule}: {findings}")
    check(findings and any(findings[0][key].startswith(cure) for key in ("command", "code")), f"{rule}: {findings}")
    check(f"[{rule}]" in printed and cure in printed, f"{rule}: {printed}")
    return findings


def test_faulty_runs_get_the_right_cure_first(temp):
    headroom = "--loss-scale headroom"
    expect(temp, "scale-too-low", "--loss-scale headroom:init_scale=", "--loss-scale", "none", "--steps", "40",
           "--batch", "4096", model="lm")
    expect(temp, "at-ceiling", headroom, "--loss-scale", "dynamic:init_scale=16,max_scale=16", "--steps", "40",
           "--batch", "4096", model="lm")
    expect(temp, "at-floor", headroom, "--loss-scale",
           "dynamic:init_scale=268435456,min_scale=67108864,max_scale=1073741824", "--steps", "40", codes=(3,))
    expect(temp, "growth-fails", headroom, "--loss-scale", "dynamic:growth_interval=4", "--steps", "150", "--lr", "1e-5")
    expect(temp, "skips-in-row", "--clip 1", "--inject", "overflow:step=40-48", "--steps", "80")
    expect(temp, "forward-overflow", "--precision bf16", "--lr", "1e5", "--optimizer", "sgd", "--steps", "60", codes=(3,))
    expect(temp, "same-step", "assert torch.isfinite(batch).all()", "--inject", "nan:step=35", "--steps", "40",
           "--checkpoint-every", "10", resumed=True)
    expect(temp, "no-scaler-needed", "--loss-scale none", "--loss-scale", "dynamic", "--steps", "60", precision="bf16")


def test_gradients_that_are_nan_at_every_scale_are_no_matter_of_the_scale(temp):
    expect(temp, "forward-overflow", "--precision bf16", "--inject", "nan:step=40-80", "--steps", "80", codes=(3,))


def test_a_static_scale_that_is_too_high_gets_one_that_follows(temp):
    expect(temp, "at-floor", "--loss-scale headroom", "--loss-scale", "static:16777216", "--steps", "60")


def test_a_run_of_subnormal_gradients_with_much_room_gets_the_headroom_policy(temp):
    folder = f"{temp}/run"
    train(folder, "field", "--precision", "fp16", "--loss-scale", "none", "--steps", "200")
    [finding] = diagnose(folder)["findings"]
    check(finding["rule"] == "scale-too-low" and finding["command"].startswith("--loss-scale headroom"), finding)
    check("% of the remaining gradients are subnormal, and there is room for 3" in finding["problem"], finding)


def test_healthy_runs_have_nothing_wrong(temp):
    for name, arguments in {
        "fp32": ["mlp", "--precision", "fp32", "--steps", "60"],
        "bf16": ["mlp", "--precision", "bf16", "--steps", "60"],
        "dynamic": ["cnn", "--precision", "fp16", "--loss-scale", "dynamic", "--steps", "40"],
        "headroom": ["gpt", "--precision", "fp16", "--loss-scale", "headroom", "--steps", "40"],
        "retry": ["mlp", "--precision", "fp16", "--loss-scale", "headroom-retry", "--steps", "60"],
        "descent": ["mlp", "--precision", "fp16", "--loss-scale", "megatron", "--steps", "80"],
        "one overflow": ["mlp", "--precision", "fp16", "--inject", "overflow:step=40", "--steps", "60"],
    }.items():
        printed = train(f"{temp}/{name}", *arguments)
        check(printed.startswith("\nNothing is wrong: "), f"{name}: {printed}")
        check(diagnose(f"{temp}/{name}")["findings"] == [], name)


def test_following_the_advice_cures_the_run(temp):
    """The cure of a run with too low a scale, taken as it is printed, leaves nothing to advise."""
    findings = expect(temp, "scale-too-low", "--loss-scale headroom:init_scale=", "--loss-scale", "none", "--steps",
                      "40", "--batch", "4096", model="lm")
    printed = train(f"{temp}/cured", "lm", "--precision", "fp16", "--steps", "40", "--batch", "4096",
                    *findings[0]["command"].split())
    check(printed.startswith("\nNothing is wrong: "), printed)


def test_report_prints_and_shows_the_advice(temp):
    expect(temp, "at-floor", "--loss-scale headroom", "--loss-scale", "static:16777216", "--steps", "30")
    train(f"{temp}/healthy", "mlp", "--precision", "fp32", "--steps", "30")
    result = subprocess.run([PROGRAM, "report", temp], capture_output=True, text=True)
    check("[at-floor]" in result.stdout and "mlp fp32 none (healthy)\nNothing is wrong" in result.stdout, result)
    if chromium.missing():
        return
    with chromium.Browser() as browser:
        for name, text in (("at-floor", "Let the scale follow the gradients."), ("healthy", "Nothing is wrong"),
                           ("at-floor", "headroom train \u2026 --loss-scale headroom")):
            browser.open(f"{temp}/{name}/report.html")
            shown = browser.run("document.querySelector('section.advice').innerText")
            check(shown.startswith("Advice") and text in shown, shown)
            check(browser.problems() == [], browser.problems())
        browser.open(f"{temp}/report.html")  # of both runs: which one the advice is for, and how much there is for each
        heading = browser.run("document.querySelector('section.advice h2').innerText")
        counts = browser.run("[...document.querySelectorAll('table')][0].innerText")
        check(heading.startswith("Advice on mlp fp"), heading)
        check(sorted(line.split("\t")[-1] for line in counts.splitlines() if "mlp" in line) == ["1", "\u2013"], counts)


def test_folders_without_runs_and_missing_arguments_are_refused(temp):
    for arguments in ([temp], [f"{temp}/nothing"], []):
        result = subprocess.run([PROGRAM, "diagnose", *arguments], capture_output=True, text=True)
        check(result.returncode == 2 and result.stdout == "", result)
    result = subprocess.run([PROGRAM, "diagnose", "--rules"], capture_output=True, text=True)
    check(result.returncode == 0 and result.stdout.count("\n") == 13, result)


run_tests(globals())
