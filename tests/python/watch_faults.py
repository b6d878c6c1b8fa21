"""Twenty planted faults in small transformer, convolutional and recurrent models, for the range watch.

Each has a model and a step, which runs forward and backward. ``expected`` is the first faulty operation,
``inputs_finite`` whether the tensors that it was computed from were finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import headroom
import headroom.torch

Step = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    name: str
    build: Callable[[str], tuple[nn.Module, Step]]
    expected: str
    inputs_finite: bool = True


FAULTS: list[Fault] = []


def fault(name: str, expected: str, inputs_finite: bool = True):
    def add(build):
        FAULTS.append(Fault(name, build, expected, inputs_finite))
        return build

    return add


def watched(model: nn.Module, step: Step) -> headroom.RangeReport:
    """What a watch of every step finds."""
    watch = headroom.torch.watch(model, every=1)
    step()
    report = watch.report()
    watch.remove()
    return report


def under_autocast(model: nn.Module, device: str, *batch: torch.Tensor, scale: float = 1.0) -> Step:
    batch = tuple(tensor.to(device) for tensor in batch)

    def step() -> None:
        with torch.autocast(device, torch.float16):
            loss = model(*batch).float().square().mean()
        (loss * scale).backward()

    return step


def in_half(model: nn.Module, device: str, *batch: torch.Tensor, scale: float = 1.0) -> Step:
    """For models whose parameters are FP16."""
    batch = tuple(tensor.to(device).half() if tensor.is_floating_point() else tensor.to(device) for tensor in batch)

    def step() -> None:
        (model(*batch).float().sum() * scale).backward()

    return step


class Attention(nn.Module):
    def __init__(self, width: int = 16, mask: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mask = mask

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores = scores / x.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        if self.mask == "all":  # no position is left for the first row
            hidden[0, 0] = True
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.mask == "times zero":
            scores = scores * (~hidden)
        return self.out(scores.softmax(-1) @ self.v(x))


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RmsNorm(nn.Module):
    """As in T5, but computed in the type of its input."""

    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Block(nn.Module):
    def __init__(self, mask: str = "") -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), Attention(mask=mask)
        self.norm2, self.mlp = nn.LayerNorm(16), Mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 2, mask: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(mask) for _ in range(blocks))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens() -> torch.Tensor:
    return torch.arange(16).view(2, 8) % 32


def filled(layer: nn.Module, value: float) -> None:
    for param in layer.parameters():
        nn.init.constant_(param, value)


@fault("gate times up product", "blocks.1.mlp: mul")
def gate_times_up(device):
    model = Transformer().to(device)
    for linear in (model.blocks[1].mlp.gate, model.blocks[1].mlp.up):
        filled(linear, 0.0)
        nn.init.constant_(linear.bias, 300.0)
    return model, under_autocast(model, device, tokens())


@fault("attention scores", "blocks.0.attn: matmul")
def attention_scores(device):
    model = Transformer().to(device)
    for linear in (model.blocks[0].attn.q, model.blocks[0].attn.k):
        filled(linear, 0.0)
        nn.init.constant_(linear.bias, 100.0)
    return model, under_autocast(model, device, tokens())


@fault("residual growth", "blocks.1: add")
def residual_growth(device):
    model = Transformer(3).to(device).half()
    for block in model.blocks:
        filled(block.mlp.down, 0.0)
        nn.init.constant_(block.mlp.down.bias, 4e4)
    return model, in_half(model, device, tokens())


@fault("square in a norm", "norm: pow")
def square_in_norm(device):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(16, 16))
    model.add_module("norm", RmsNorm())
    filled(model.fc, 20.0)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(4, 16))


class Standardise(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-8)  # 1e-8 is 0 in FP16


@fault("normalisation by a tiny variance", "norm: div")
def tiny_variance(device):
    model = nn.Sequential()
    model.add_module("conv", nn.Conv1d(2, 4, 3))
    model.add_module("norm", Standardise())
    filled(model.conv, 0.5)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 2, 8))


@fault("backward-only overflow", "fc1: backward of linear")
def backward_only(device):
    model = nn.Sequential()
    model.add_module("fc0", nn.Linear(8, 8, bias=False))
    model.add_module("fc1", nn.Linear(8, 8, bias=False))
    filled(model.fc0, 1e-3)
    filled(model.fc1, 200.0)
    model.to(device).half()
    return model, in_half(model, device, torch.full((4, 8), 1e-2), scale=128.0)


@fault("0 x inf", "blocks.0.attn: mul", inputs_finite=False)
def zero_times_inf(device):
    model = Transformer(mask="times zero").to(device)
    return model, under_autocast(model, device, tokens())


class NegativeLogLikelihood(nn.Module):
    def forward(self, logits):
        return -torch.log(logits.softmax(-1))


@fault("log of 0", "nll: log")
def log_of_zero(device):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("nll", NegativeLogLikelihood())
    filled(model.fc, 0.0)
    model.fc.bias.data[0] = 40.0
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 4))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        return self.fc(x.mean((-1, -2)))


@fault("bad batch", "input images")
def bad_batch(device):
    model = Images().to(device)
    batch = torch.randn(2, 3, 8, 8)
    batch[1, 2, 3, 4] = float("nan")
    return model, under_autocast(model, device, batch)


@fault("bad weight", "parameter conv2.weight")
def bad_weight(device):
    model = Images().to(device)
    model.conv2.weight.data[1, 2, 0, 0] = float("inf")
    return model, under_autocast(model, device, torch.ones(2, 3, 8, 8))


@fault("learning rate too large", "conv1: conv2d")
def learning_rate(device):
    torch.manual_seed(0)
    model = Images().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e7)
    step = under_autocast(model, device, torch.randn(2, 3, 8, 8), scale=100.0)

    def two_steps() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()
        step()

    return model, two_steps


class Share(nn.Module):
    def forward(self, x):
        return x / x.sum((-1, -2), keepdim=True)


@fault("division by zero", "share: div")
def division_by_zero(device):
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 2, 3))
    model.add_module("share", Share())
    filled(model.conv, -1.0)
    model.conv.register_forward_hook(lambda module, args, result: F.relu(result))
    model.to(device)
    return model, under_autocast(model, device, torch.ones(1, 1, 5, 5))


class Energy(nn.Module):
    def forward(self, x):
        return torch.log(torch.exp(x).sum(-1))


@fault("exp overflow", "energy: exp")
def exp_overflow(device):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("energy", Energy())
    filled(model.fc, 3.0)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 4))


class Distance(nn.Module):
    def forward(self, x):
        return torch.sqrt((x - x.roll(1, 0)).square().sum(-1))


@fault("sqrt of 0 in backward", "distance: backward of sqrt")
def sqrt_of_zero(device):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("distance", Distance())
    model.to(device)
    return model, under_autocast(model, device, torch.ones(3, 4))


@fault("embedding with a bad row", "parameter embed.weight")
def bad_row(device):
    model = Transformer().to(device)
    model.embed.weight.data[5] = float("nan")
    return model, under_autocast(model, device, tokens())


@fault("softmax with everything masked", "blocks.0.attn: softmax", inputs_finite=False)
def masked_softmax(device):
    model = Transformer(mask="all").to(device)
    return model, under_autocast(model, device, tokens())


class SumPool(nn.Module):
    def forward(self, x):
        return x.sum((-1, -2))


@fault("sum that overflows", "pool: sum")
def sum_overflow(device):
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 2, 1))
    model.add_module("pool", SumPool())
    filled(model.conv, 10.0)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(1, 1, 64, 64))


class Survival(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, -1)


@fault("cumulative product", "survival: cumprod")
def cumulative_product(device):
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 16))
    model.add_module("survival", Survival())
    filled(model.fc, 1.0)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 4))


@fault("loss scale too high", "head: backward of linear")
def loss_scale(device):
    torch.manual_seed(0)
    model = Transformer().to(device)
    nn.init.normal_(model.head.weight, std=8.0)

    def step() -> None:
        with torch.autocast(device, torch.float16):
            logits = model(tokens().to(device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens().to(device).flatten())
        (loss * 2.0**19).backward()

    return model, step


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.input, self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.kind = kind

    def forward(self, steps):
        state = torch.zeros(steps.shape[0], 8, device=steps.device, dtype=self.hidden.weight.dtype)
        for step in steps.unbind(1):
            state = F.relu(self.input(step) + self.hidden(state))
            if self.kind == "normalised":
                state = state / state.amax(-1, keepdim=True)
        return self.out(state)


@fault("recurrent state that grows", "hidden: linear")
def recurrent_growth(device):
    model = Recurrent("plain")
    filled(model, 1.0)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 12, 4))


@fault("recurrent state divided by 0", "div")
def recurrent_division(device):
    model = Recurrent("normalised")
    filled(model, -1.0)
    model.to(device)
    return model, under_autocast(model, device, torch.ones(2, 3, 4))


@fault("reciprocal in backward", "cell: backward of reciprocal")
def reciprocal_backward(device):
    class Cell(nn.Module):
        def forward(self, x):
            return torch.reciprocal(x)

    model = nn.Sequential()
    model.add_module("rnn", nn.Linear(4, 4))
    model.add_module("cell", Cell())
    filled(model.rnn, 0.0)
    nn.init.constant_(model.rnn.bias, 1e-3)
    model.to(device).half()
    return model, in_half(model, device, torch.ones(2, 4))
