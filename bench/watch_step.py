#!/usr/bin/env python3
"""Times training steps of GPT-2 with and without the range watch, beside Hugging Face's DebugUnderflowOverflow.

    PYTHONPATH=build/release/python python3 bench/watch_step.py                  # GPT-2 124M, 8 x 1024 tokens, CUDA
    PYTHONPATH=build/release/python python3 bench/watch_step.py --device cpu --layers 2 --width 64 --tokens 32

A step is forward under FP16 autocast, backward, headroom.torch.GradScaler and AdamW. Ways of running it alternate in
rounds; the table has the median of the rounds. On CUDA the watched steps run under
torch.cuda.set_sync_debug_mode("error"), and times are those of the device: a round is enqueued and then waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow

import headroom.torch

VOCABULARY = 50257


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width),
                                 nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """Of its own, because that of Transformers waits for the device while it makes its mask."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = args.device
        self.model = GPT2(args.layers, args.width).to(args.device)
        self.optimizer = headroom.torch.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = headroom.torch.GradScaler(args.device, init_scale=2.0**10)
        self.tokens = torch.randint(VOCABULARY, (args.batch, args.tokens), device=args.device)

    def step(self) -> None:
        with torch.autocast(self.device, torch.float16):
            loss = self.model(self.tokens)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def timed(device: str, step: Callable[[], None], steps: int) -> float:
    """Milliseconds per step."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


@contextlib.contextmanager
def no_waits(device: str):
    """Makes torch raise if a step waits for the device."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def time_with_hf(args: argparse.Namespace) -> float:
    """Its hooks cannot be removed, so it has a model of its own."""
    training = Training(args)
    with contextlib.redirect_stdout(io.StringIO()):
        DebugUnderflowOverflow(training.model)
        training.step()
        return min(timed(args.device, training.step, 3) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    training = Training(args)
    for _ in range(3):
        training.step()
    ways: dict[str, tuple[int | None, int]] = {"plain": (None, 50), "watched": (1, 10), "every=50": (50, 50)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    rows = 0
    for _ in range(args.rounds):
        for way, (every, steps) in ways.items():
            watch = None if every is None else headroom.torch.watch(training.model, every=every)
            if every == 1:
                training.step()
            with no_waits(args.device):
                times[way].append(timed(args.device, training.step, steps))
            if watch is not None:
                rows = len(watch.report().rows)
                watch.remove()
    # Each round against the plain steps of the same round: the clock of the device drifts.
    print(f"{'':12}{'ms per step':>12}{'ratio':>9}")
    for way, values in times.items():
        ratio = statistics.median(value / plain for value, plain in zip(values, times["plain"]))
        print(f"{way:12}{statistics.median(values):12.3f}{ratio:9.4f}")
    plain = statistics.median(times["plain"])
    hf = time_with_hf(args)
    print(f"{'HF tool':12}{hf:12.3f}{hf / plain:9.4f}")
    print(f"{rows} tensors per watched step")


if __name__ == "__main__":
    main()
