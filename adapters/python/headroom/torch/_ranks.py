"""Several processes that train one model: one verdict, one norm, over torch.distributed."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch
import torch.distributed as dist

from headroom import _core
from headroom._errors import make


def check_ranks(ranks: Any, gradients: Optional[str]) -> None:
    """Checks two arguments of GradScaler."""
    known = ranks in ("auto", None, True, False) if isinstance(ranks, (str, bool, type(None))) else (
        hasattr(ranks, "get_group") or (dist.is_available() and isinstance(ranks, dist.ProcessGroup)))
    if not known:
        raise make("invalid argument", f"ranks is {ranks!r}; it is 'auto', None, True, a process group that this process "
                   "is in, or a DeviceMesh.")
    if gradients not in (None, "replicated", "sharded"):
        raise make("invalid argument", f"gradients is {gradients!r}; it is 'replicated', 'sharded' or None.")


def group_of(ranks: Any) -> Any:
    """The process group that ``ranks`` stands for: one, a DeviceMesh, or True for all processes."""
    if ranks is True:
        return dist.group.WORLD
    if hasattr(ranks, "get_group"):  # a DeviceMesh
        return ranks.get_group() if ranks.ndim == 1 else ranks._flatten().get_group()
    return ranks


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this process may have a part of the parameter only: DTensor (FSDP2, tensor and expert
    parallelism), or flattened by FSDP1."""
    return hasattr(parameter, "_local_tensor") or getattr(parameter, "_fsdp_flattened", False)


def ranks_over(group: Any) -> _core.CallbackRanks:
    """The core's ranks, which exchange some 300 bytes in every step."""
    size = dist.get_world_size(group)
    on_cuda = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def reduce(sums: memoryview, maxima: memoryview) -> None:
        mine = torch.tensor([*sums, *maxima], dtype=torch.float64, device=device)
        everybody = [torch.empty_like(mine) for _ in range(size)]
        try:
            dist.all_gather(everybody, mine, group=group)
            numbers = [each.tolist() for each in everybody]
        except RuntimeError as error:
            why = str(error).partition("\n")[0].rstrip(".")
            raise make("rank lost", f"Another rank did not reach the same step ({why}); it has ended, is stuck or is out "
                       "of step. Look at its output, end the job and start from the last checkpoint.") from error
        # Added in the order of the ranks, so that all of them get the same bits.
        count = len(sums)
        for i in range(count):
            sums[i] = sum(each[i] for each in numbers)
        for i in range(len(maxima)):
            maxima[i] = max(each[count + i] for each in numbers)

    def enqueue(sums: int, sum_count: int, maxima: int, maximum_count: int, stream: int) -> None:
        def at(address: int, count: int) -> torch.Tensor:
            view = _core.Tensor.from_pointer(address, "float64", count, device.index, False, None)
            return torch.from_dlpack(view)

        dist.all_reduce(at(sums, sum_count), dist.ReduceOp.SUM, group=group)
        dist.all_reduce(at(maxima, maximum_count), dist.ReduceOp.MAX, group=group)

    return _core.CallbackRanks(dist.get_rank(group), size, reduce, enqueue if on_cuda else None)


def _block_of(name: str, parameter: torch.Tensor, named: bool, rank: int) -> tuple[Any, ...]:
    """Which elements of which parameter this process has. Two processes with the same block have copies."""
    if getattr(parameter, "_fsdp_flattened", False):
        return (name, "flat", rank)
    if not hasattr(parameter, "_local_tensor"):
        return (name, (0,) * parameter.dim(), tuple(parameter.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = parameter
    mesh = dtensor.device_mesh
    shape, offset = compute_local_shape_and_global_offset(dtensor.shape, mesh, dtensor.placements)
    # Names from the model distinguish parameters. Without them two meshes may be two stages of a pipeline.
    place = () if named else tuple(mesh.mesh.flatten().tolist())
    return (name, tuple(offset), tuple(shape), *place)


def share_counting(
    group: Any, names: list[str], parameters: list[torch.Tensor], has_loss: bool
) -> tuple[list[bool], bool]:
    """Which gradients this process counts in the norm, so that every element is counted once; and whether all
    processes have the same whole gradients. Every process of the group has to call it. Raises if no process
    ``has_loss``."""
    rank = dist.get_rank(group)
    mine = [_block_of(name, parameter, not name.startswith("param_groups["), rank)
            for name, parameter in zip(names, parameters)]
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, (mine, has_loss), group=group)
    if not any(each[1] for each in everybody):
        raise make("wrong order", "No process has scaled a loss; give scaler.loss_fn(loss_fn) to the schedule of the pipeline.")
    earlier = {block for blocks, _ in everybody[:rank] for block in blocks}
    replicated = all(blocks == mine for blocks, _ in everybody) and not any(map(is_sharded, parameters))
    return [block not in earlier for block in mine], replicated


class RankGroup:
    """The processes that decide together under one scaler, and which gradients this one counts in the norm."""

    def __init__(self, ranks: Any, gradients: Optional[str]) -> None:
        self._ranks = None if ranks is False else ranks
        self._gradients = gradients
        self.group: Any = None  # None until an optimizer has joined, and for a process that decides alone
        self.replicated = False  # all processes have the same whole gradients
        # By optimizer: how many parameters it had, and which of them are counted (None: all).
        self._joined: weakref.WeakKeyDictionary[Any, tuple[int, Optional[list[bool]]]] = weakref.WeakKeyDictionary()

    def join(self, optimizer: torch.optim.Optimizer, names: Any, has_loss: bool) -> bool:
        """Lets an optimizer take part, if it has to. Returns whether it is the first one. The first step of an
        optimizer, and of one that has more parameters, communicates."""
        if self._ranks is None:
            return False
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._joined.get(optimizer, (-1, None))[0] == size:
            return False
        params = [param for group in optimizer.param_groups for param in group["params"]]
        group = self._group_for(params, names)
        if group is None or dist.get_world_size(group) == 1:
            self._joined[optimizer] = size, None
            return False
        counted, replicated = share_counting(group, names.of_all(optimizer), params, has_loss)
        if self._gradients is not None:
            counted, replicated = [True] * len(params), self._gradients == "replicated"
        elif names.any_sharded():
            replicated = False
        first = self.group is None
        if first:
            self.group, self.replicated = group, replicated
            self._joined.clear()  # optimizers that were stepped alone take part from now on
        if self.replicated and not replicated:
            raise make("unsupported", "An optimizer with sharded parameters follows one without under this scaler; pass "
                       "model= to the scaler, or step the sharded one first.")
        self._joined[optimizer] = size, None if self.replicated else counted
        return first

    def _group_for(self, params: list[torch.Tensor], names: Any) -> Any:
        if self.group is not None:
            return self.group
        if self._ranks != "auto":
            return group_of(self._ranks)
        if not dist.is_available() or not dist.is_initialized():
            return None
        return dist.group.WORLD if any(map(is_sharded, params)) or names.any_sharded() else None

    def counted(self, optimizer: torch.optim.Optimizer) -> Optional[list[bool]]:
        """Which gradients of an optimizer this process counts in the norm. None: all."""
        return self._joined.get(optimizer, (0, None))[1]
