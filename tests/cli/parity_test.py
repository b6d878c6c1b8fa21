#!/usr/bin/env python3
"""parity_test.py PROGRAM MODEL: FP16 with scaling and BF16 reach the score of FP32.

Over three seeds the mean score differs from FP32's by no more than the seeds of FP32 differ from each
other, or by the allowance below if that is larger. With the same seed, the loss of FP16 follows that of
FP32: closely in the first steps, until one is skipped, and on average at the end, because training
amplifies rounding differences. All runs are made on the same machine, because losses depend on its BLAS.
"""
import sys
import tempfile

from runs import train

program, model = sys.argv[1], sys.argv[2]
allowance = {"field": 0.002, "mlp": 0.01, "cnn": 0.01, "gpt": 0.03}[model]  # R2, accuracy, bits/byte
SEEDS = (1, 2, 3)

scores, losses, comparable = {}, {}, {}
with tempfile.TemporaryDirectory() as temp:
    for precision in ("fp32", "fp16", "bf16"):
        for seed in SEEDS:
            summary, losses[precision, seed] = train(program, temp, model, "--precision", precision,
                                                     "--seed", seed, "--threads", 1)
            assert summary["skipped"] < 0.1 * summary["steps"], summary
            scores.setdefault(precision, []).append(summary["score"])
            comparable[precision, seed] = min(20, summary["first_skip"] + 1)  # losses that no skip has affected

mean = {precision: sum(values) / len(values) for precision, values in scores.items()}
noise = max(max(scores["fp32"]) - min(scores["fp32"]), allowance)
for precision in ("fp16", "bf16"):
    print(f"{model} {precision}: {mean[precision]:.4f}, fp32 {mean['fp32']:.4f}, noise {noise:.4f}")
    assert abs(mean[precision] - mean["fp32"]) <= noise, scores

for seed in SEEDS:
    fp16, fp32 = losses["fp16", seed], losses["fp32", seed]
    count = comparable["fp16", seed]
    first = max(abs(a - b) / b for a, b in zip(fp16[:count], fp32[:count]))
    tail = len(fp32) // 4
    last = sum(fp16[-tail:]) / sum(fp32[-tail:])
    print(f"{model} seed {seed}: {first:.2%} off in the first {count} steps, {last:.3f} of FP32's loss at the end")
    assert first < 0.05, (seed, first)
    assert 0.7 < last < 1.4, (seed, last)
print("1 passed, 0 failed")
