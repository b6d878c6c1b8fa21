#!/usr/bin/env python3
"""PyTorch's own scaled step on a CUDA device, for the shapes of headroom_cuda_bench: GradScaler with
unscale_, clip_grad_norm_, fused AdamW and update. Device events around single runs, medians."""
import statistics

import torch


def gpt2(layers, d):
    sizes = [50257 * d, 1024 * d]
    for _ in range(layers):
        sizes += [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return sizes + [d, d]


def resnet50():
    sizes, inside = [64 * 3 * 49, 64, 64], 64
    for w, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            sizes += [w * inside, w, w, w * w * 9, w, w, 4 * w * w, 4 * w, 4 * w]
            if i == 0:
                sizes += [4 * w * inside, 4 * w, 4 * w]
            inside = 4 * w
    return sizes + [1000 * 2048, 1000]


def median_ms(work, before=lambda: None, times=30):
    all_times = []
    for i in range(times + 5):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            all_times.append(begin.elapsed_time(end))
    return statistics.median(all_times)


print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}: unscale_, clip, fused AdamW, update")
for name, sizes in (("resnet50", resnet50()), ("gpt2-124M", gpt2(12, 768)),
                    ("gpt2-xl", gpt2(48, 1600)), ("2000 x 100", [100] * 2000)):
    params = [torch.nn.Parameter(torch.randn(n, device="cuda") * 0.02) for n in sizes]
    source = [torch.randn(n, device="cuda") * 65.0 for n in sizes]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.zeros((), device="cuda"))

    def step():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    ms = median_ms(step, lambda: torch._foreach_copy_([p.grad for p in params], source))
    print(f"{name:12} f32   {ms:8.3f} ms")
    del params, source, optimizer
    torch.cuda.empty_cache()
