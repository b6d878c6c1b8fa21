#!/usr/bin/env python3
"""One of four processes over Gloo: trains a small model in each layout of sharded training, with one inf in one
shard of one gradient, and compares what the ranks decided. Rank 0 writes the outcomes as JSON.

    torchrun-like environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; arguments: OUTPUT torch|headroom"""

import copy
import json
import pathlib
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


class Block(nn.Module):
    """A norm and two matrices, in this order."""

    def __init__(self, norm_last=False):
        super().__init__()
        if not norm_last:
            self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        if norm_last:
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def block(**options):
    torch.manual_seed(3)
    return Block(**options)


def tensor_parallel(module, mesh):
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def replicate(module, mesh):
    """The norm as DTensors that every rank has whole."""
    for name, parameter in list(module.norm.named_parameters()):
        whole = distribute_tensor(parameter.data, mesh, [Replicate()] * mesh.ndim)
        setattr(module.norm, name, nn.Parameter(whole))
    return module


class Layout:
    """A model in its layout, and how to fill its gradients from those of the whole model."""

    def __init__(self, module, backward=None):
        self.module = module
        self.parameters = dict(module.named_parameters())

    def set_gradients(self, whole):
        """What backward and the reductions of the layout leave behind, made from the whole model's gradients."""
        for name, parameter in self.parameters.items():
            grad = whole[name]
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad.clone(), parameter.device_mesh, parameter.placements)
            parameter.grad = grad.clone()


def fsdp2(mesh, **options):
    module = block()
    fully_shard(module, mesh=mesh, **options)
    return module


def two_dimensional():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def layout_dp():
    return fsdp2(init_device_mesh("cpu", (RANKS,)))


def layout_hsdp():
    return fsdp2(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def layout_tp():
    return tensor_parallel(block(), init_device_mesh("cpu", (RANKS,)))


def layout_dp_tp():
    mesh = two_dimensional()
    module = tensor_parallel(block(), mesh["tp"])
    fully_shard(module, mesh=mesh["dp"])
    return module


def layout_replicated_first():
    mesh = two_dimensional()
    return tensor_parallel(replicate(block(), mesh["tp"]), mesh["tp"])


def layout_replicated_last():
    mesh = two_dimensional()
    return tensor_parallel(replicate(block(norm_last=True), mesh["tp"]), mesh["tp"])


def layout_dp_ep():
    """Two experts, each on two of the ranks; the norm on all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    module = block()
    for name in ("up", "down"):
        linear = getattr(module, name)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["ep"], [Shard(0)]))
        fully_shard(linear, mesh=mesh["edp"])
    fully_shard(module.norm, mesh=init_device_mesh("cpu", (RANKS,)))
    return module


def layout_pp_dp():
    """Stages of a pipeline: ranks 0 and 1 have the first half of the model, 2 and 3 the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    module = block()
    stage = mesh.get_coordinate()[0]
    for name in (("down",) if stage == 0 else ("norm", "up")):
        setattr(module, name, nn.Identity())
    fully_shard(module, mesh=mesh["dp"])
    return module


def layout_plain_beside():
    """The matrices are sharded, the norm is an ordinary tensor on every rank."""
    module = block()
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in ("up", "down"):
        fully_shard(getattr(module, name), mesh=mesh)
    return module


def layout_empty_shards():
    module = block()
    module.down = nn.Linear(2 * WIDTH, 3, bias=False)  # three rows over four ranks
    fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
    return module


def layout_offload():
    return fsdp2(init_device_mesh("cpu", (RANKS,)), offload_policy=CPUOffloadPolicy(pin_memory=False))


LAYOUTS = {name[len("layout_"):]: made for name, made in list(globals().items()) if name.startswith("layout_")}


def whole_gradients(module_like):
    """Gradients of the whole model, the same on every rank."""
    torch.manual_seed(11)
    grads = {}
    for name, shape in module_like.items():
        grads[name] = torch.randn(shape)
    return grads


def gather(value):
    everybody = [None] * RANKS
    dist.all_gather_object(everybody, value)
    return everybody


def run(name, scaler_class, bad_rank, which, steps=1):
    """One step with an inf in local gradient `which` of `bad_rank`; None: nowhere."""
    module = LAYOUTS[name]()
    layout = Layout(module)
    shapes = {}
    for each in gather({key: tuple(p.shape) for key, p in layout.parameters.items()}):
        shapes.update(each)
    whole = whole_gradients(shapes)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    options = {} if scaler_class is torch.amp.GradScaler else {"model": module}
    if name == "pp_dp" and options:
        options["ranks"] = True
    scaler = scaler_class("cpu", init_scale=4.0, **options)
    scaler.scale(torch.ones(()))
    layout.set_gradients({key: 4.0 * grad for key, grad in whole.items()})
    locals_ = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in layout.parameters.values()]
    if dist.get_rank() == bad_rank and which is not None:
        locals_[which].view(-1)[0] = float("inf")
    before = [p.detach().clone() for p in layout.parameters.values()]
    norm = None
    try:
        if options:
            norm = float(scaler.step(optimizer, max_norm=1e9))
        else:
            scaler.step(optimizer)
        scaler.update()
        moved = not all(
            torch.equal(a.to_local() if isinstance(a, DTensor) else a, b.to_local() if isinstance(b, DTensor) else b)
            for a, b in zip(before, layout.parameters.values()))
        mine = {"scale": scaler.get_scale(), "moved": moved, "norm": norm}
    except Exception as error:
        mine = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    everybody = gather(mine)
    expected = float(torch.cat([grad.flatten() for grad in whole.values()]).norm())
    return {"ranks": everybody, "norm": expected, "locals": gather([g.numel() for g in locals_])}


def agreed(outcome):
    ranks = outcome["ranks"]
    return all(each == ranks[0] for each in ranks) and "error" not in ranks[0]


def main():
    output, kind = sys.argv[1:]
    dist.init_process_group("gloo")
    if kind == "torch":
        scaler_class = torch.amp.GradScaler
    else:
        import headroom.torch

        scaler_class = headroom.torch.GradScaler
    found = {}
    for name in LAYOUTS:
        try:
            clean = run(name, scaler_class, 0, None)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        found[name] = {"clean": clean, "bad": {}}
        for rank in range(RANKS):
            for which, count in enumerate(clean["locals"][rank]):
                if count > 0:
                    found[name]["bad"][f"{rank}.{which}"] = run(name, scaler_class, rank, which)
    if dist.get_rank() == 0:
        pathlib.Path(output).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
