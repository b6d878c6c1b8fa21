#!/usr/bin/env python3
"""Fine-tunes a small transformer by reinforcement learning in FP16 and BF16, and compares.

    python3 examples/rl_fp16.py --quick          # a small model on the CPU, about a minute
    python3 examples/rl_fp16.py --device cuda    # a larger one, a few minutes

The task is to sort digits ("3141=" -> "1134"): a program can check the answer. The model first learns from examples, in
FP32, until it solves a part of the prompts; then it learns from its own answers by policy gradients (GRPO: several answers
to each prompt, advantage = reward minus the mean of the group, clipped importance ratios).

Answers are sampled token by token with a KV cache, and trained on as whole sequences with fused attention, as an inference
engine and a trainer do. The two paths round differently, so the log-probabilities of the same tokens differ; the program
measures by how much in FP32, BF16 and FP16. FP16 needs a loss scaler. A step that the scaler skips throws a batch of rollouts
away; the program counts these with torch's rule and with a policy that retries. Needs torch and headroom only.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import headroom.torch

VOCABULARY = 64  # tokens are ASCII codes; digits and "=" are below 64
CLIP = 0.2  # importance ratios are clipped to 1 - CLIP ... 1 + CLIP
MAX_NORM = 1.0  # of the gradients


@dataclasses.dataclass(frozen=True)
class Settings:
    layers: int
    width: int
    heads: int
    digits: int  # in a prompt, and in its answer
    prompts: int  # in a batch
    samples: int  # of each prompt: the group that is compared
    supervised_lr: float
    lr: float  # of fine-tuning
    steps: int  # of fine-tuning, one for each batch of rollouts
    start: float = 0.2  # supervised learning ends when this share of the answers is right
    checkpoint_interval: int = 500


CPU = Settings(layers=2, width=32, heads=4, digits=5, prompts=16, samples=8, supervised_lr=1e-2, lr=1e-3, steps=1500)
QUICK = dataclasses.replace(CPU, lr=2e-3, steps=40)
CUDA = Settings(layers=4, width=512, heads=8, digits=12, prompts=32, samples=16, supervised_lr=3e-4, lr=3e-5, steps=3000)


# Name, precision of weights, activations and gradients, and policy of the loss scale. "none": scale 1, inf still caught.
RUNS = (
    ("bf16", torch.bfloat16, "none"),
    ("fp16, torch, interval 400", torch.float16, "torch:growth_interval=400"),
    ("fp16, headroom-retry", torch.float16, "headroom-retry"),
)


# The model: a causal transformer with two ways to compute the same function.


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        if length > 1:  # the trainer's whole sequences, the sampler's prompts
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # the sampler's next token, against the keys and values of those before it
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            mixed = scores.float().softmax(-1).to(v.dtype) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, settings.width)
        self.position = nn.Embedding(2 * settings.digits + 1, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, caches: list[Any] | None = None, start: int = 0) -> torch.Tensor:
        """Log-probabilities of the next token, in FP32, after each of `tokens`, whose first has the position `start`."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches else None)
        return self.head(self.norm(x)).float().log_softmax(-1)


# The task.


def make_prompts(settings: Settings, count: int, generator: torch.Generator) -> torch.Tensor:
    digits = torch.randint(10, (count, settings.digits), generator=generator, device=generator.device)
    return F.pad(digits + ord("0"), (0, 1), value=ord("="))


def right_answers(prompts: torch.Tensor) -> torch.Tensor:
    return prompts[:, :-1].sort(1).values


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """1 for each sequence (prompt and answer) whose answer is right, otherwise 0."""
    prompts, answers = tokens.split(tokens.shape[1] // 2 + 1, 1)
    return (answers == right_answers(prompts)).all(1).float()


def learn_from_examples(settings: Settings, device: torch.device, seed: int) -> tuple[Model, int]:
    """The supervised start, in FP32: stops when the model solves a share `settings.start` of the prompts."""
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    model = Model(settings).to(device)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=settings.supervised_lr)
    for step in range(5000):
        if step % 5 == 0 and evaluate(settings, model, seed) >= settings.start:
            return model, step
        prompts = make_prompts(settings, 256, generator)
        optimizer.zero_grad()
        (-trainer_logp(model, torch.cat((prompts, right_answers(prompts)), 1)).mean()).backward()
        optimizer.step()
    raise RuntimeError("The supervised start has not learned the task in 5000 steps; lower supervised_lr.")


# Sampler and trainer.


@torch.no_grad()
def sample(model: Model, prompts: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers, token by token. Returns prompts with answers, and the log-probability of each token of the answers."""
    length = prompts.shape[1]
    caches: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    logp = model(prompts, caches)[:, -1]
    tokens, chosen = [prompts], []
    for position in range(length, 2 * length - 1):
        if position > length:
            logp = model(tokens[-1], caches, position - 1)[:, 0]
        tokens.append(torch.multinomial(logp.exp(), 1, generator=generator))
        chosen.append(logp.gather(1, tokens[-1]))
    return torch.cat(tokens, 1), torch.cat(chosen, 1)


def trainer_logp(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token of the answers, by one pass over whole sequences."""
    digits = tokens.shape[1] // 2
    logp = model(tokens[:, :-1])[:, -digits:]
    return logp.gather(2, tokens[:, -digits:, None])[:, :, 0]


def evaluate(settings: Settings, model: Model, seed: int) -> float:
    """The share of right answers to 512 prompts, always the same ones."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed + 1)
    tokens, _ = sample(model, make_prompts(settings, 512, generator), generator)
    return reward(tokens).mean().item()


@torch.no_grad()
def mismatch(settings: Settings, model: Model, seed: int) -> dict[str, float]:
    """How far the log-probabilities of sampler and trainer are apart, over 2048 answers."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed + 2)
    tokens, sampled = sample(model, make_prompts(settings, 2048, generator), generator)
    log_ratio = (trainer_logp(model, tokens) - sampled).double()
    return {
        "mean_difference": log_ratio.abs().mean().item(),
        "kl": (log_ratio.exp() - 1 - log_ratio).mean().item(),  # of each token; never negative
        "sequence_spread": log_ratio.sum(1).std().item(),
    }


def policy_loss(model: Model, tokens: torch.Tensor, sampled: torch.Tensor, samples: int) -> torch.Tensor:
    """GRPO's loss. `sampled` are the sampler's log-probabilities: they are what the tokens were drawn by."""
    groups = reward(tokens).view(-1, samples)
    advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ratio = (trainer_logp(model, tokens) - sampled).exp()
    advantage = advantage.view(-1, 1)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


# Fine-tuning.


def fine_tune(
    settings: Settings, start: Model, dtype: torch.dtype, policy: str, seed: int, checkpoint: str | None = None
) -> dict[str, Any]:
    """Policy gradients in `dtype` with FP32 masters. Resumes from the file `checkpoint` if there is one."""
    model = copy.deepcopy(start).to(dtype)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed + 3)
    optimizer = headroom.torch.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    scaler = headroom.torch.GradScaler(device.type, policy=policy, model=model)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    record: dict[str, Any] = {"step": 0, "retried": 0, "lost": [], "rewards": []}
    if checkpoint and os.path.exists(checkpoint):
        saved = headroom.torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        generator.set_state(saved["generator"])
        record = saved["record"]

    while record["step"] < settings.steps:
        prompts = make_prompts(settings, settings.prompts, generator).repeat_interleave(settings.samples, 0)
        tokens, sampled = sample(model, prompts, generator)
        # Runs once, and again at a lower scale if the gradients overflowed and the policy retries.
        for attempt in scaler.attempts():
            optimizer.zero_grad()
            scaler.scale(policy_loss(model, tokens, sampled, settings.samples)).backward()
            scaler.step(optimizer, max_norm=MAX_NORM)  # unscales, clips, updates masters and weights; or skips
            scaler.update()
            record["retried"] += attempt > 0
        if scaler.last_step_applied:
            schedule.step()  # not after a skipped step
        else:
            record["lost"].append({"step": record["step"], "report": str(scaler.report())})
        record["step"] += 1
        record["rewards"].append(reward(tokens).mean().item())
        if record["step"] % math.ceil(settings.steps / 5) == 0:
            print(f"  step {record['step']}: reward {record['rewards'][-1]:.2f}, {scaler.report()}", file=sys.stderr)
        if checkpoint and (record["step"] % settings.checkpoint_interval == 0 or record["step"] == settings.steps):
            state = {name: part.state_dict() for name, part in parts.items()}
            headroom.torch.save({**state, "generator": generator.get_state(), "record": record}, checkpoint)

    record["reward"] = evaluate(settings, model, seed)
    record["mismatch"] = mismatch(settings, model, seed)
    record["final_scale"] = scaler.get_scale()
    return record


# The program.


def print_table(results: dict[str, Any]) -> None:
    settings = results["settings"]
    rollouts = settings["prompts"] * settings["samples"]
    print(f"{results['device']}, torch {results['torch']}, {results['parameters']:,} parameters, {settings['digits']} digits, "
          f"{settings['steps']} batches of {rollouts} rollouts, seed {results['seed']}")
    print(f"{results['supervised_steps']} supervised steps, then {results['start_reward']:.1%} of the answers are right\n")
    print("                        sampler against trainer               fine-tuned by policy gradients")
    print("run                     mean |dlogp|       KL  seq. spread    reward  lost  retried  final scale    time")
    rows = [("fp32", None), *results["runs"].items()]
    for name, run in rows:
        numbers = results["mismatch"][name.split(",")[0]]
        line = f"{name:<22}  {numbers['mean_difference']:12.1e}  {numbers['kl']:7.1e}  {numbers['sequence_spread']:11.1e}"
        if run:
            line += (f"  {run['reward']:8.1%}  {len(run['lost']):4}  {run['retried']:7}  {run['final_scale']:11g}"
                     f"  {run['seconds']:4.0f} s")
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, which has a larger model")
    parser.add_argument("--quick", action="store_true", help="a few steps of the small model")
    parser.add_argument("--steps", type=int, help="batches to fine-tune on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--checkpoints", metavar="DIR", help="save there, and resume from what is there")
    options = parser.parse_args()
    device = torch.device(options.device)
    settings = QUICK if options.quick else CUDA if device.type == "cuda" else CPU
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)

    start, supervised_steps = learn_from_examples(settings, device, options.seed)
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "seed": options.seed,
        "settings": dataclasses.asdict(settings),
        "parameters": sum(parameter.numel() for parameter in start.parameters()),
        "supervised_steps": supervised_steps,
        "start_reward": evaluate(settings, start, options.seed),
        "mismatch": {name: mismatch(settings, copy.deepcopy(start).to(dtype), options.seed)
                     for name, dtype in precisions.items()},
        "runs": {},
    }
    for name, dtype, policy in RUNS:
        print(f"fine-tuning: {name} ...", file=sys.stderr)
        path = None
        if options.checkpoints:
            os.makedirs(options.checkpoints, exist_ok=True)
            path = os.path.join(options.checkpoints, policy.split(":")[0] + ".pt")
        begin = time.perf_counter()
        run = fine_tune(settings, start, dtype, policy, options.seed, path)
        results["runs"][name] = {"policy": policy, "seconds": time.perf_counter() - begin, **run}
    print_table(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
