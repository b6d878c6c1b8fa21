#!/usr/bin/env python3
"""parity_test.py PROGRAM MODEL [--write]: FP16 with scaling and BF16 end where FP32 ends.

Over three seeds the mean score differs from FP32's by no more than FP32's own seeds differ from each
other (or the small allowance below, where they hardly differ at all). The FP16 course of seed 1 is
compared with a stored one: tightly at first, loosely later, because training amplifies rounding.
--write stores it anew.
"""
import json
import os
import sys
import tempfile

from runs import train

program, model = sys.argv[1], sys.argv[2]
allowance = {"field": 0.002, "mlp": 0.01, "cnn": 0.01, "gpt": 0.03}[model]  # R2, accuracy, bits/byte
stored_path = os.path.join(os.path.dirname(__file__), "traces", f"{model}_fp16.json")

scores = {}
course = None
with tempfile.TemporaryDirectory() as temp:
    for precision in ("fp32", "fp16", "bf16"):
        for seed in (1, 2, 3):
            summary, losses = train(program, temp, model, "--precision", precision, "--seed", seed,
                                    "--threads", 1)
            assert summary["skipped"] < 0.1 * summary["steps"], summary
            scores.setdefault(precision, []).append(summary["score"])
            if (precision, seed) == ("fp16", 1):
                course = losses

mean = {precision: sum(values) / 3 for precision, values in scores.items()}
noise = max(max(scores["fp32"]) - min(scores["fp32"]), allowance)
for precision in ("fp16", "bf16"):
    print(f"{model} {precision}: {mean[precision]:.4f}, fp32 {mean['fp32']:.4f}, noise {noise:.4f}")
    assert abs(mean[precision] - mean["fp32"]) <= noise, scores

every = max(1, len(course) // 60)
if "--write" in sys.argv:
    with open(stored_path, "w") as file:
        json.dump({"every": every, "loss": [float(f"{x:.6g}") for x in course[::every]]}, file)
with open(stored_path) as file:
    stored = json.load(file)
assert stored["every"] == every and len(stored["loss"]) == len(course[::every])
for i, (now, then) in enumerate(zip(course[::every], stored["loss"])):
    relative = abs(now - then) / then
    assert relative < (0.01 if i * every < 20 else 0.6), (i * every, now, then)
tail = len(stored["loss"]) // 4
ratio = sum(course[::every][-tail:]) / sum(stored["loss"][-tail:])
assert 0.7 < ratio < 1.4, ratio
print("1 passed, 0 failed")
