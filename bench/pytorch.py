#!/usr/bin/env python3
"""PyTorch's own scaled step on a CUDA device, for the shapes of headroom_cuda_bench, and beside it that
of headroom.torch where it can be imported. Device events around single steps, in turns, medians; and
around many steps in a row.

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


def in_turns_ms(before, works, times):
    """The median of each, one after the other in every round, there and back: what disturbs one
    disturbs all. As backward would, `before` makes the gradients in the same run; its own time is
    taken off."""
    taken = {name: [] for name in works}
    alone = []
    for i in range(times + 5):
        alone.append(elapsed_ms(before))
        for name, work in list(works.items())[:: -1 if i % 2 else 1]:
            taken[name].append(elapsed_ms(lambda work=work: (before(), work())))
    return {name: statistics.median(all_[5:]) - statistics.median(alone[5:])
            for name, all_ in taken.items()}


def in_a_row_ms(work, times):
    """Without waits between the steps, as in training: the host prepares one while another runs. On
    the same gradients all the time, which torch's way makes smaller in each."""
    return elapsed_ms(lambda: [work() for _ in range(times)]) / times


def scaler_of(kind):
    scaler = kind("cuda")
    scaler.scale(torch.zeros((), device="cuda"))
    return scaler


def unscale_clip_step(scaler, optimizer, params):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()


def step_update(scaler, optimizer, params):
    scaler.step(optimizer)
    scaler.update()


def main():
    try:
        import headroom.torch as ours
    except ImportError as error:
        ours = None
        print(f"headroom.torch is left out: {error}")
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
            works = {"torch's scaler": partial(way, scaler_of(torch.amp.GradScaler), optimizer, params)}
            if ours is not None:
                works["ours"] = partial(way, scaler_of(ours.GradScaler), optimizer, params)
            if ours is not None and label == "fused AdamW, clip":
                both = ours.AdamW(params, max_norm=1.0, **options)
                works["our AdamW too"] = partial(step_update, scaler_of(ours.GradScaler), both, params)
            taken = in_turns_ms(reset, works, times)
            told = "   ".join(f"{who} {ms:7.3f}" for who, ms in taken.items())
            if "our AdamW too" in taken:
                faster = taken["torch's scaler"] / taken["our AdamW too"]
                told += f"   {faster:.1f} times"
            print(f"{name:12}{label:20}{told}", flush=True)
            if "our AdamW too" in taken:
                row = {who: in_a_row_ms(work, times) for who, work in works.items()}
                told = "   ".join(f"{who} {ms:7.3f}" for who, ms in row.items())
                faster = row["torch's scaler"] / row["our AdamW too"]
                print(f"{name:12}{'  in a row':20}{told}   {faster:.1f} times", flush=True)
            del optimizer, works
        del params, source
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
