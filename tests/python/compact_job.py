#!/usr/bin/env python3
"""One of the processes of torch_compact_ranks_test.py: trains a small model of sharded BF16 and FP32 weights over Gloo, in each
compact state, saves it with torch.distributed.checkpoint or loads it, and trains on. Rank 0 writes whole weights and state as
JSON.

    compact_job.py OUTPUT save|load FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import headroom.torch

WIDTH = 12  # shards have parts of groups of 32 moments


class Model(nn.Module):
    """Weights in BF16 with masters, and in FP32 without."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 30, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(30, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x.bfloat16())).float())


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double().tolist()


class Training:
    def __init__(self, state):
        torch.manual_seed(3)
        self.model = Model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for linear in (self.model.up, self.model.down):
            fully_shard(linear, mesh=mesh)
        self.optimizer = headroom.torch.AdamW(self.model.parameters(), lr=0.01, state=state, seed=5)
        self.scaler = headroom.torch.GradScaler("cpu", init_scale=256.0, model=self.model)

    def step(self, number):
        self.optimizer.zero_grad()
        torch.manual_seed(number)
        self.scaler.scale(self.model(torch.randn(4, WIDTH)).square().sum()).backward()
        self.scaler.step(self.optimizer, max_norm=0.5)
        self.scaler.update()

    def saved(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "scaler": self.scaler.state_dict()}

    def load(self, folder):
        state = self.saved()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def now(self):
        """Everything that this training consists of, on every rank."""
        found = {name: whole(value) for name, value in self.model.named_parameters()}
        for name, value in self.model.named_parameters():
            entries = self.optimizer.state[value]
            found |= {f"{name}/{key}": whole(each) for key, each in entries.items() if key != "step"}
            found[f"{name}/step"] = float(entries["step"])
        return found


def run(action, folder, state, steps_before):
    training = Training(state)
    for number in range(steps_before):
        training.step(number)
    if action == "save":
        dcp.save(training.saved(), checkpoint_id=folder)
    else:
        training.load(folder)
    begin = training.now()
    for number in (5, 6, 7):
        training.step(number)
    return {"begin": begin, "end": training.now()}


def main():
    output, action, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    found = {}
    for state in ("half", "byte"):
        # Into an optimizer that has not stepped, and into one whose state is replaced.
        for steps_before in (5,) if action == "save" else (0, 1):
            found[f"{state} {steps_before}"] = run(action, f"{folder}/{state}", state, steps_before)
    if dist.get_rank() == 0:
        pathlib.Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo that still run when the interpreter ends may abort the process
