#!/usr/bin/env python3
"""Trains GPT-2 124M with 16-bit weights on a CUDA device, with each format of optimizer state and several seeds, and compares
the losses: does a format differ more from `full` than the seeds do? Tokens are pairs of bytes of a text.

    PYTHONPATH=build/gpu/python python3 bench/gpt2_state.py TEXT [STEPS [SEEDS]]
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import headroom.torch as ours

WORDS, CONTEXT, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
BATCH, WARM_UP, HELD_OUT = 8, 50, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                deep = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * LAYERS) ** 0.5 if deep else 0.02)

    def forward(self, rows):
        x = self.embed(rows[:, :-1]) + self.position.weight
        scores = self.norm(self.blocks(x)) @ self.embed.weight.T
        return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


def tokens_of(path):
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    text = text[: len(text) // 2 * 2].view(-1, 2)
    return (text[:, 0] * 256 + text[:, 1]).remainder(WORDS).cuda()


def train(tokens, dtype, state, seed, steps):
    """Returns the losses of all steps, the loss on text that was held out, and the number of skipped steps."""
    held_out, tokens = tokens[: HELD_OUT * BATCH * (CONTEXT + 1)], tokens[HELD_OUT * BATCH * (CONTEXT + 1) :]
    torch.manual_seed(seed)
    model = Gpt2().cuda().to(dtype)
    optimizer = ours.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, state=state, seed=seed)
    scaler = ours.GradScaler("cuda", policy="torch" if dtype is torch.float16 else "none")
    offsets = torch.arange(CONTEXT + 1, device="cuda")
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-4 * min(1.0, (step + 1) / WARM_UP)
        at = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1), device="cuda")
        loss = model(tokens[at + offsets])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        losses.append(loss.detach())
    with torch.no_grad():
        rows = held_out.view(HELD_OUT, BATCH, CONTEXT + 1)
        final = torch.stack([model(batch) for batch in rows]).mean().item()
    return torch.stack(losses).tolist(), final, scaler.report().skipped


def main():
    tokens = tokens_of(sys.argv[1])
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    seeds = range(1, 1 + (int(sys.argv[3]) if len(sys.argv) > 3 else 3))
    print(f"GPT-2 124M, {BATCH} x {CONTEXT} tokens, {steps} steps, PyTorch {torch.__version__} on "
          f"{torch.cuda.get_device_name()}; mean loss of the last tenth, and on text that was held out")
    for dtype in (torch.float16, torch.bfloat16):
        for seed in seeds:
            for state in ("full", "half", "byte"):
                start = time.perf_counter()
                losses, final, skipped = train(tokens, dtype, state, seed, steps)
                tenths = [statistics.mean(losses[i : i + steps // 10]) for i in range(0, steps, steps // 10)]
                print(f"{str(dtype)[6:]:9} seed {seed} {state:5} {tenths[-1]:.4f} {final:.4f}   {skipped} skipped "
                      f"{(time.perf_counter() - start) / steps * 1e3:.1f} ms a step   " +
                      " ".join(f"{mean:.3f}" for mean in tenths), flush=True)


if __name__ == "__main__":
    main()
