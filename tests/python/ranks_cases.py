#!/usr/bin/env python3
"""One of four processes over Gloo: several optimizers, parameter groups that come late, and pipelines under one scaler.
Rank 0 writes what every rank found as JSON: ranks_cases.py OUTPUT."""

import inspect
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from ranks_job import INF, WIDTH, gather, local, mesh_of
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import headroom.torch


def matrix(mesh=None, *placements):
    values = torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) / 64.0
    return nn.Parameter(values if mesh is None else distribute_tensor(values, mesh, placements))


def sharded_and_copied():
    """A matrix that two pairs of ranks share, and one that every rank has."""
    model = nn.ParameterDict({"sharded": matrix(mesh_of(2, 2), Replicate(), Shard(0)), "copied": matrix()})
    return model, float(matrix().norm())


def set_gradients(parameters, scale):
    for parameter in parameters:
        parameter.grad = parameter.detach() * scale


def step(scaler, optimizer):
    return float(scaler.step(optimizer, max_norm=1e9))


def make(kind):
    return {"torch": torch.optim.SGD, "headroom": headroom.torch.SGD}[kind]


def two_optimizers(kind, sharded_first, named):
    """The norms of both, in two rounds."""
    model, norm = sharded_and_copied()
    scaler = headroom.torch.GradScaler("cpu", init_scale=4.0, model=model if named else None)
    optimizers = [make(kind)([model[name]], lr=0.0) for name in ("sharded", "copied")]
    found = []
    for _ in range(2):
        scaler.scale(torch.ones(()))
        set_gradients(model.values(), scaler.get_scale())
        found += [step(scaler, each) / norm for each in optimizers[:: 1 if sharded_first else -1]]
        scaler.update()
    return found


def inf_in_one_copy(kind, named):
    """One rank has an inf in its copy, and the optimizer of the copies is stepped first."""
    model, _ = sharded_and_copied()
    scaler = headroom.torch.GradScaler("cpu", init_scale=4.0, model=model if named else None)
    optimizers = [make(kind)([model[name]], lr=0.5) for name in ("copied", "sharded")]
    found = []
    for number in range(2):
        scaler.scale(torch.ones(()))
        set_gradients(model.values(), scaler.get_scale())
        if number == 0 and dist.get_rank() == 2:
            model["copied"].grad[0, 0] = INF
        try:
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            found.append([scaler.get_scale(), float(local(model["copied"].detach()).sum())])
        except headroom.Error as error:
            found.append(str(error)[:30])
    return found


def late_group(kind):
    """The norms before and after a group is added."""
    model, norm = sharded_and_copied()
    scaler = headroom.torch.GradScaler("cpu", init_scale=4.0, model=model)
    optimizer = make(kind)([model["sharded"]], lr=0.0)
    found = []
    for count in (1, 2):
        if count == 2:
            optimizer.add_param_group({"params": [model["copied"]]})
        scaler.scale(torch.ones(()))
        set_gradients(model.values(), scaler.get_scale())
        found.append(step(scaler, optimizer) / (norm * count**0.5))
        scaler.update()
    return found


def under_another_scaler_before(kind):
    """The norm of gradients that stay where they were when a scaler of this process alone stepped them."""
    model, norm = sharded_and_copied()
    optimizer = make(kind)(model.values(), lr=0.0)
    set_gradients(model.values(), 1.0)
    for ranks in (None, "auto"):
        scaler = headroom.torch.GradScaler("cpu", init_scale=1.0, ranks=ranks)
        scaler.scale(torch.ones(()))
        found = step(scaler, optimizer) / (norm * 2**0.5)
        scaler.update()
    return found


def pipeline(kind, schedule):
    """Four stages under a schedule that calls backward itself, beside the whole model: norms, weights and the scale."""
    stages = []
    for number in range(4):
        torch.manual_seed(number)
        stages.append(nn.Linear(WIDTH, WIDTH))
    rank, whole = dist.get_rank(), nn.Sequential(*stages)
    into, out = (torch.ones(2, WIDTH, requires_grad=needed) for needed in (rank > 0, True))
    torch.manual_seed(rank)
    part = nn.Linear(WIDTH, WIDTH)
    stage = pipelining.PipelineStage(part, rank, 4, torch.device("cpu"), input_args=(into,), output_args=(out,))
    scaler = headroom.torch.GradScaler("cpu", init_scale=64.0, ranks=True, gradients="sharded")
    optimizer, expected = make(kind)(part.parameters(), lr=0.01), torch.optim.SGD(whole.parameters(), lr=0.01)

    def loss_of(output, target):
        return (output - target).square().sum()

    run = getattr(pipelining, schedule)(stage, 4, loss_fn=scaler.loss_fn(loss_of), scale_grads=False)
    worst = 0.0
    for number in range(4):
        torch.manual_seed(50 + number)
        x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        if number == 1:
            x[0, 0] = INF
        optimizer.zero_grad(), expected.zero_grad()
        run.step(*([x] if rank == 0 else []), **({"target": target} if rank == 3 else {}))
        norm = float(scaler.step(optimizer, max_norm=0.5))
        scaler.update()
        if number != 1:
            loss_of(whole(x), target).backward()
            worst = max(worst, abs(norm / float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)) - 1.0))
            expected.step()
    gap = max(float((p - q).detach().abs().max()) for p, q in zip(part.parameters(), stages[rank].parameters()))
    return [scaler.get_scale(), worst < 1e-5, gap < 1e-5]


def other_placements(kind):
    """A gradient whose shards have the shape of the parameter's, but are other elements."""
    mesh = mesh_of(2, 2)
    parameter = matrix(mesh, Shard(0), Replicate())
    parameter.grad = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Replicate(), Shard(0)])
    scaler = headroom.torch.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    try:
        scaler.step(make(kind)([parameter], lr=0.5))
    except headroom.Error as error:
        return str(error)[-33:]
    return "stepped"


def a_loss_that_nobody_scaled():
    parameter = matrix()
    scaler = headroom.torch.GradScaler("cpu", ranks=True, gradients="sharded")
    scaler.loss_fn(nn.functional.mse_loss)  # but the schedule was given mse_loss
    set_gradients([parameter], 1.0)
    try:
        scaler.step(torch.optim.SGD([parameter], lr=0.5))
    except headroom.Error as error:
        return str(error)[:30]
    return "stepped"


def state_of_a_sharded_optimizer(kind):
    """torch.distributed.checkpoint makes the state to load into by a step without a scaler."""
    parameter = matrix(mesh_of(4), Shard(0))
    model = nn.ParameterDict({"sharded": parameter})
    options = {"max_norm": 1.0} if kind == "headroom" else {}
    optimizer = {"torch": torch.optim.AdamW, "headroom": headroom.torch.AdamW}[kind](model.parameters(), **options)
    saved = get_optimizer_state_dict(model, optimizer)
    return sorted(saved["state"]["sharded"]) + [bool((parameter.full_tensor() == matrix()).all())]


def main():
    dist.init_process_group("gloo")
    found = {"a_loss_that_nobody_scaled": gather(a_loss_that_nobody_scaled())}
    for kind in ("torch", "headroom"):
        for sharded_first in (True, False):
            for named in (True, False):
                found[f"two_optimizers {kind} {sharded_first} {named}"] = gather(two_optimizers(kind, sharded_first, named))
        for named in (True, False):
            found[f"inf_in_one_copy {kind} {named}"] = gather(inf_in_one_copy(kind, named))
        found[f"late_group {kind}"] = gather(late_group(kind))
        found[f"counted {kind}"] = gather(under_another_scaler_before(kind))
        found[f"other_placements {kind}"] = gather(other_placements(kind))
        found[f"state {kind}"] = gather(state_of_a_sharded_optimizer(kind))
        takes = inspect.signature(pipelining.ScheduleGPipe).parameters  # PyTorch 2.6 has no scale_grads
        for schedule in ("ScheduleGPipe", "Schedule1F1B") if "scale_grads" in takes else ():
            found[f"pipeline {kind} {schedule}"] = gather(pipeline(kind, schedule))
    if dist.get_rank() == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as in ranks_job.py
