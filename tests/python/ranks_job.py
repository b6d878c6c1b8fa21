#!/usr/bin/env python3
"""One of four processes over Gloo: steps a small model in each layout of sharded training, with one inf in one shard of
one gradient, and compares what the ranks decided. Rank 0 writes the outcomes as JSON.

    ranks_job.py OUTPUT torch|headroom [STEPS]
    ranks_job.py OUTPUT save|load FOLDER            with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment

With STEPS it trains the layouts whose backward runs over Gloo for so many steps with random faults."""

import json
import os
import pathlib
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4
WIDTH = 8
INF = float("inf")


class Block(nn.Module):
    """A norm and two matrices; the optimizer lists them in the order in which they are made."""

    def __init__(self, norm_last=False, outputs=WIDTH):
        super().__init__()
        if not norm_last:
            self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, outputs, bias=False)
        if norm_last:
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def block(**options):
    torch.manual_seed(3)
    return Block(**options)


def mesh_of(*shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tensor_parallel(module, mesh):
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def replicate_norm(module, mesh):
    """Makes DTensors of the norm, whole on every rank."""
    for name, parameter in list(module.norm.named_parameters()):
        setattr(module.norm, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
    return module


def dp():
    return fully_shard(block(), mesh=mesh_of(RANKS))


def hsdp():
    return fully_shard(block(), mesh=mesh_of(2, 2, names=("replicate", "shard")))


def tp():
    return tensor_parallel(block(), mesh_of(RANKS))


def dp_tp():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    return fully_shard(tensor_parallel(block(), mesh["tp"]), mesh=mesh["dp"])


def dp_ep():
    """Experts: each matrix is split over two ranks and sharded over two; the norm is sharded over all four."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))
    module = block()
    for linear in (module.up, module.down):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["ep"], [Shard(0)]))
        fully_shard(linear, mesh=mesh["edp"])
    fully_shard(module.norm, mesh=mesh_of(RANKS))
    return module


def pp_dp():
    """Stages of a pipeline: two ranks have the first part of the model, two the rest."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    module = block()
    first_stage = mesh.get_coordinate()[0] == 0
    for name in ("down",) if first_stage else ("norm", "up"):
        setattr(module, name, nn.Identity())
    return fully_shard(module, mesh=mesh["dp"])


def replicated_first():
    mesh = mesh_of(2, 2, names=("dp", "tp"))["tp"]
    return tensor_parallel(replicate_norm(block(), mesh), mesh)


def replicated_last():
    mesh = mesh_of(2, 2, names=("dp", "tp"))["tp"]
    return tensor_parallel(replicate_norm(block(norm_last=True), mesh), mesh)


def plain_beside_dtensor():
    module = block()
    for linear in (module.up, module.down):
        fully_shard(linear, mesh=mesh_of(RANKS))
    return module


def empty_shards():
    return fully_shard(block(outputs=3), mesh=mesh_of(RANKS))  # three rows for four ranks


def cpu_offload():
    return fully_shard(block(), mesh=mesh_of(RANKS), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp1():
    return FullyShardedDataParallel(block(), device_id=torch.device("cpu"))


LAYOUTS = [dp, hsdp, tp, dp_tp, dp_ep, pp_dp, replicated_first, replicated_last, plain_beside_dtensor, empty_shards,
           cpu_offload, fsdp1]
TRAINED = [dp, hsdp, tp, dp_tp, empty_shards, cpu_offload]  # whose backward needs nothing that Gloo lacks


def optimizer_of(scaler):
    """torch's SGD; that of headroom.torch with our scaler and HEADROOM_FUSED in the environment."""
    if "HEADROOM_FUSED" not in os.environ or type(scaler) is torch.amp.GradScaler:
        return torch.optim.SGD
    return sys.modules["headroom.torch"].SGD


def gather(value):
    everybody = [None] * RANKS
    dist.all_gather_object(everybody, value)
    return everybody


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_gradients(layout, parameters):
    """Gradients of the whole model by name, the same on every rank."""
    shapes = {}
    for each in gather({name: tuple(parameter.shape) for name, parameter in parameters.items()}):
        shapes |= each
    if layout is fsdp1:  # one flat parameter, of which each rank has its own quarter
        shapes = {name: (RANKS * count,) for name, (count,) in shapes.items()}
    torch.manual_seed(11)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def set_gradients(layout, parameters, whole):
    """What backward and the reductions of the layout leave behind."""
    for name, parameter in parameters.items():
        grad = whole[name].clone()
        if layout is fsdp1:
            grad = grad.chunk(RANKS)[dist.get_rank()].clone()
        elif isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad


def place_of_inf(layout, parameters, rank, which):
    """The name of gradient `which` of a rank, and an element of the whole gradient that is in that rank's shard."""
    name = list(parameters)[which]
    shape = tuple(local(parameters[name]).shape)
    numbers = torch.arange(parameters[name].numel() * (RANKS if layout is fsdp1 else 1)).view(
        -1 if layout is fsdp1 else parameters[name].shape)
    set_gradients(layout, {name: parameters[name]}, {name: numbers.float()})
    element = int(local(parameters[name].grad).flatten()[0]) if 0 not in shape else None
    return gather((name, element))[rank]


def run(layout, make_scaler, bad=None):
    """One step; with `bad`, (rank, index of a gradient there), an inf in an element of that rank's shard."""
    module = layout()
    parameters = dict(module.named_parameters())
    whole = {name: 4.0 * grad for name, grad in whole_gradients(layout, parameters).items()}
    norm = float(torch.cat([grad.flatten() for grad in whole.values()]).norm()) / 4.0
    if bad is not None:
        counts = gather(len(parameters))
        name, element = place_of_inf(layout, parameters, bad[0], min(bad[1], counts[dist.get_rank()] - 1))
        if element is None:
            return None
        whole[name].view(-1)[element] = INF
    scaler = make_scaler(module, layout)
    optimizer = optimizer_of(scaler)(module.parameters(), lr=0.5)
    scaler.scale(torch.ones(()))
    set_gradients(layout, parameters, whole)
    before = [local(parameter.detach()).clone() for parameter in parameters.values()]
    try:
        clip = {} if type(scaler) is torch.amp.GradScaler else {"max_norm": 1e9}
        measured = scaler.step(optimizer, **clip)
        scaler.update()
        moved = any(not torch.equal(old, local(new)) for old, new in zip(before, parameters.values()))
        mine = {"scale": scaler.get_scale(), "moved": moved, "norm": None if measured is None else float(measured)}
    except Exception as error:
        mine = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return {"ranks": gather(mine), "norm": norm}


def try_all(layout, make_scaler):
    clean = run(layout, make_scaler)
    counts = gather(len(dict(layout().named_parameters())))
    bad = [run(layout, make_scaler, (rank, which)) for rank in range(RANKS) for which in range(counts[rank])]
    return {"clean": clean, "bad": [each for each in bad if each is not None]}


def train(layout, make_scaler, steps):
    """Trains with random faults beside the whole model; every rank has to decide as that one does."""
    whole = block(outputs=3) if layout is empty_shards else block()
    module = layout()
    scaler, other = make_scaler(module, layout), torch.amp.GradScaler("cpu", growth_interval=5)
    optimizer = optimizer_of(scaler)(module.parameters(), lr=0.01)
    expected = torch.optim.SGD(whole.parameters(), lr=0.01)
    chance = random.Random(5)
    worst, skipped, norms = 0.0, 0, []
    for _ in range(steps):
        x = torch.tensor([[chance.gauss(0, 1) for _ in range(WIDTH)]])
        if chance.random() < 0.1:
            x[0, chance.randrange(WIDTH)] = chance.choice([INF, float("nan")])
        for model, each, by in ((module, optimizer, scaler), (whole, expected, other)):
            each.zero_grad()
            by.scale(local(model(x)).square().sum()).backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
        right = float(nn.utils.get_total_norm(grads)) / scaler.get_scale()
        norm = float(scaler.step(optimizer, max_norm=1e9))
        norms.append(norm)
        other.step(expected)
        scaler.update(), other.update()
        if scaler.last_step_applied:
            worst = max(worst, abs(norm / right - 1.0))
        skipped += not scaler.last_step_applied
        assert scaler.get_scale() == other.get_scale()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    numbers = [scaler.get_scale(), skipped, norms, *(each.tolist() for each in weights)]
    gap = max(float((p - q).detach().abs().max()) for p, q in zip(weights, whole.parameters()))
    return {"same": all(str(each) == str(numbers) for each in gather(numbers)), "worst": worst, "skipped": skipped, "gap": gap}


def checkpoint(folder, action):
    """Saves model, optimizer and scaler with torch.distributed.checkpoint, or loads them, and trains on. Returns the
    whole weights after each further step, and the scale."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import headroom.torch

    module = fully_shard(block(), mesh=mesh_of(dist.get_world_size()))
    optimizer = headroom.torch.AdamW(module.parameters(), lr=0.01)
    scaler = headroom.torch.GradScaler("cpu", policy="headroom", model=module)

    def step(number):
        optimizer.zero_grad()
        torch.manual_seed(number)
        scaler.scale(module(torch.randn(4, WIDTH)).square().sum()).backward()
        scaler.step(optimizer, max_norm=0.5)
        scaler.update()
        return [parameter.full_tensor().tolist() for parameter in module.parameters()]

    for number in range(3 if action == "save" else 1):  # the state of one that loads is replaced
        step(number)
    weights, moments = get_state_dict(module, optimizer)
    state = {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}
    if action == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    return {"weights": [step(number) for number in (3, 4)], "scale": scaler.get_scale()}


def main():
    output, kind, *steps = sys.argv[1:]
    dist.init_process_group("gloo")
    if kind in ("save", "load"):
        found = checkpoint(steps[0], kind)
        if dist.get_rank() == 0:
            pathlib.Path(output).write_text(json.dumps(found))
        dist.destroy_process_group()
        return

    def make_scaler(module, layout):
        if kind == "torch":
            return torch.amp.GradScaler("cpu", init_scale=4.0)
        import headroom.torch

        options = {"growth_interval": 5} if steps else {"init_scale": 4.0}
        return headroom.torch.GradScaler("cpu", model=module, ranks=True if layout is pp_dp else "auto", **options)

    if steps:
        found = {layout.__name__: train(layout, make_scaler, int(steps[0])) for layout in TRAINED}
    else:
        found = {layout.__name__: try_all(layout, make_scaler) for layout in LAYOUTS}
    if dist.get_rank() == 0:
        pathlib.Path(output).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo that still run when the interpreter ends may abort the process
