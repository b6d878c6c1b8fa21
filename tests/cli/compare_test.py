#!/usr/bin/env python3
"""compare_test.py PROGRAM MODEL [SEED...]: `headroom compare` gives the result that docs/trainer.md shows, for these seeds.

FP16 without scaling ends clearly worse than FP32. FP16 with dynamic scaling, FP16 with the policy headroom and BF16 without
scaling do not.
"""
import re
import subprocess
import sys
import tempfile

from pictures import read_png
from runs import history, train

program, model, seeds = sys.argv[1], sys.argv[2], sys.argv[3:]
runs = {"fp32": ("--precision", "fp32"),
        "none": ("--precision", "fp16", "--loss-scale", "none"),
        "dynamic": ("--precision", "fp16", "--loss-scale", "dynamic"),
        "headroom": ("--precision", "fp16", "--loss-scale", "headroom"),
        "bf16": ("--precision", "bf16", "--loss-scale", "none")}


def check_curves(path, page):
    """The curves of all runs are visible, also where they coincide, in the colours of the report."""
    with open(page) as file:
        style = file.read()
    names = re.findall(r"--run\d: var\(--(\w+)\)", style)
    assert len(names) == 6, names
    pixels = [pixel for row in read_png(path)[70:] for pixel in row]  # below the legend
    for name in names:
        wanted = bytes.fromhex(re.search(rf"--{name}: #(\w+);", style).group(1))
        count = sum(max(abs(a - b) for a, b in zip(pixel, wanted)) < 12 for pixel in pixels)
        assert count > 20, (name, count)


with tempfile.TemporaryDirectory() as temp:
    for seed in seeds:
        score = {}
        for name, arguments in runs.items():
            short = ("--steps", 30) if model == "lm" else ()
            summary, _ = train(program, temp, model, "--seed", seed, "--threads", 1, *short, *arguments)
            score[name] = summary["score"] if model == "field" else summary["loss"]
        print(model, seed, score)
        if model == "field":  # R2
            assert score["none"] < score["fp32"] - 0.1, score
            assert abs(score["dynamic"] - score["fp32"]) < 0.002, score
            assert abs(score["headroom"] - score["fp32"]) < 0.002, score
            assert abs(score["bf16"] - score["fp32"]) < 0.005, score
        else:  # loss
            assert score["none"] > score["fp32"] + 0.2, score
            assert abs(score["dynamic"] - score["fp32"]) < 0.002, score
            assert abs(score["headroom"] - score["fp32"]) < 0.002, score
            assert abs(score["bf16"] - score["fp32"]) < 0.02, score

    # The command makes six runs and writes a table, advice, histories and plots.
    count = 60 if model == "field" else 2
    result = subprocess.run([program, "compare", model, "--steps", str(count), "--batch", "512", "--threads", "1",
                             "--out", f"{temp}/compare"],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for row in ("fp32", "fp16, no scaling", "fp16, static scale", "fp16, dynamic scale", "fp16, headroom policy", "bf16"):
        assert f"\n  {row}" in result.stdout, result.stdout
    assert "gradients lost" in result.stdout and "final loss" in result.stdout
    if model == "field":
        assert "\n  fp16, no scaling: --loss-scale headroom" in result.stdout, result.stdout
        assert not re.search(r"^  (fp32|bf16.*): ", result.stdout, re.MULTILINE), result.stdout
    folders = ("fp32", "fp16-none", "fp16-static", "fp16-dynamic", "fp16-headroom", "bf16-none")
    for folder in folders:
        header, steps, _, end = history(f"{temp}/compare/{model}/{folder}")
        assert header["group"] == model and len(steps) == count and end["end"] == "finished"
    with open(f"{temp}/compare/report.html") as file:
        assert file.read().count('"group":') >= len(folders)
    check_curves(f"{temp}/compare/{model}/curves.png", f"{temp}/compare/report.html")

    # A scale below 1 is printed exactly. The folder of a single run is refused: its report would be replaced.
    small = [program, "compare", model, "--steps", "1", "--batch", "512", "--threads", "1", "--static", "0.25", "--out"]
    result = subprocess.run([*small, f"{temp}/quarter"], capture_output=True, text=True)
    row, = [line for line in result.stdout.splitlines() if line.startswith("  fp16, static scale")]
    assert " 0.25 " in row, result
    result = subprocess.run([*small, temp], capture_output=True, text=True)
    assert result.returncode == 2 and "is the folder of a single run" in result.stderr and not result.stdout, result
print("1 passed, 0 failed")
