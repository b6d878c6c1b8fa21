#!/usr/bin/env python3
"""Times PyTorch's scaled step on a CUDA device for the shapes of headroom_cuda_bench, and that of headroom.torch if it
can be imported: medians of single steps in alternation, and many steps in a row, both by device events.

    PYTHONPATH=build/gpu/python python3 bench/pytorch.py
"""
import statistics
from functools import partial

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


def elapsed_ms(work):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def alternating_ms(before, works, times):
    """The median time of each work. Every round runs all of them, in alternating order, so that a disturbance affects
    all. `before` writes the gradients in the same run, as backward would; its own time is subtracted."""
    taken = {name: [] for name in works}
    alone = []
    for i in range(times + 5):
        alone.append(elapsed_ms(before))
        for name, work in list(works.items())[:: -1 if i % 2 else 1]:
            taken[name].append(elapsed_ms(lambda work=work: (before(), work())))
    return {name: statistics.median(all_[5:]) - statistics.median(alone[5:])
            for name, all_ in taken.items()}


def consecutive_ms(work, times):
    """The time per step without waits between steps, as in training: the host prepares a step while another runs. All
    steps use the same gradients, which unscaling and clipping in place make smaller in each step."""
    return elapsed_ms(lambda: [work() for _ in range(times)]) / times


def make_scaler(kind):
    scaler = kind("cuda")
    scaler.scale(torch.zeros((), device="cuda"))
    return scaler


def unscale_clip_step(scaler, optimizer, params):
    scaler.scale(params[0].new_ones(()))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()


def clip_in_step(scaler, optimizer, params):
    scaler.scale(params[0].new_ones(()))
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


def step_update(scaler, optimizer, params):
    scaler.scale(params[0].new_ones(()))
    scaler.step(optimizer)
    scaler.update()


def main():
    try:
        import headroom.torch as ours
    except ImportError as error:
        ours = None
        print(f"headroom.torch is not measured: {error}")
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}: one step and update in ms, FP32")
    for name, sizes, times in (("resnet50", resnet50(), 60), ("gpt2-124M", gpt2(12, 768), 60),
                               ("gpt2-xl", gpt2(48, 1600), 15), ("2000 x 100", [100] * 2000, 30)):
        params = [torch.nn.Parameter(torch.randn(n, device="cuda") * 0.02) for n in sizes]
        source = [torch.randn(n, device="cuda") * 65.0 for n in sizes]
        for p in params:
            p.grad = torch.empty_like(p)

        def reset(params=params, source=source):
            torch._foreach_copy_([p.grad for p in params], source)

        options = dict(lr=1e-6, weight_decay=0.1)
        for label, optimizer, way in (
            ("fused AdamW, clip", torch.optim.AdamW(params, fused=True, **options), unscale_clip_step),
            ("fused AdamW", torch.optim.AdamW(params, fused=True, **options), step_update),
            ("AdamW, clip", torch.optim.AdamW(params, foreach=True, **options), unscale_clip_step),
        ):
            works = {"torch's scaler": partial(way, make_scaler(torch.amp.GradScaler), optimizer, params)}
            if ours is not None:
                our_way = clip_in_step if way is unscale_clip_step else way
                works["ours"] = partial(our_way, make_scaler(ours.GradScaler), optimizer, params)
            if ours is not None and label == "fused AdamW, clip":
                both = ours.AdamW(params, max_norm=1.0, **options)
                works["our AdamW too"] = partial(step_update, make_scaler(ours.GradScaler), both, params)
            taken = alternating_ms(reset, works, times)
            text = "   ".join(f"{who} {ms:7.3f}" for who, ms in taken.items())
            if "ours" in taken:
                ratio = taken["torch's scaler"] / taken["ours"]
                text += f"   {ratio:.2f} times"
            if "our AdamW too" in taken:
                faster = taken["torch's scaler"] / taken["our AdamW too"]
                text += f"   {faster:.1f} times"
            print(f"{name:12}{label:20}{text}", flush=True)
            if "our AdamW too" in taken:
                row = {who: consecutive_ms(work, times) for who, work in works.items()}
                text = "   ".join(f"{who} {ms:7.3f}" for who, ms in row.items())
                faster = row["torch's scaler"] / row["our AdamW too"]
                print(f"{name:12}{'  in a row':20}{text}   {faster:.1f} times", flush=True)
            del optimizer, works
        del params, source
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
