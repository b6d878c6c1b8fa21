"""Faults of two ranks under PyTorch: processes over Gloo, gradients averaged by DistributedDataParallel
with a GradScaler on each rank, or each rank with tensors of its own and FSDP's ShardedGradScaler."""
import datetime
import os
import signal
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from pytorch_faults import INF, OURS, SGD, GradScaler, fault, sentence

LIMIT = 5  # seconds that ranks wait for each other; PyTorch's own choice is half an hour


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.w * x).sum()


class Rank:
    """One rank's model, optimizer and scaler."""

    def __init__(self, rank, sharded=False, **options):
        self.rank = rank
        self.model = Model() if sharded else torch.nn.parallel.DistributedDataParallel(Model())
        self.w = next(self.model.parameters())
        self.optimizer = SGD([self.w], lr=0.1)
        if OURS:
            options |= {"ranks": True, "gradients": "sharded" if sharded else None}
            self.scaler = GradScaler("cpu", **options)
        else:
            self.scaler = (ShardedGradScaler if sharded else GradScaler)("cpu", **options)

    def backward(self, grad):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.full((4,), grad))).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def end(self):
        return round(self.w[0].item(), 6), self.scaler.get_scale()


def one_rank(rank, work, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=LIMIT))
    try:
        result = work(rank)
    except Exception as error:  # noqa: BLE001
        result = sentence(error)
    torch.save(result, f"{folder}/{rank}")
    os._exit(0)  # no good-bye that would wait for the other


def on_two_ranks(work):
    """What `work` returned on each rank, or the sentence of its error; None for one that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.get_context("spawn").Process(target=one_rank, args=(rank, work, folder)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            rank.kill()
        return [torch.load(f"{folder}/{rank}") if os.path.exists(f"{folder}/{rank}") else None for rank in range(2)]


def both_skipped(ends):
    if ends == [(1.0, 32768.0)] * 2:
        return "reported", "skipped on both; a smaller scale tells"
    if all(isinstance(end, tuple) for end in ends):
        return "corrupted", "the ranks part: weights are {} and {}, scales {:g} and {:g}".format(
            *(f"{end[0]:.4g}" for end in ends), *(end[1] for end in ends))
    return error_of(ends)


def error_of(ends):
    """The error that a rank raised."""
    errors = [end for end in ends if isinstance(end, str)]
    return ("reported", errors[0]) if errors else ("silent", "no word on any rank")


def averaged_with_overflow(rank):
    one = Rank(rank)
    one.backward(INF if rank == 1 else 1.0)
    one.step()
    return one.end()


@fault
def rank_overflows_before_averaging():
    return both_skipped(on_two_ranks(averaged_with_overflow))


def bad_after_averaging(rank):
    one = Rank(rank)
    one.backward(1.0)
    if rank == 1:
        one.w.grad[0] = INF
    one.step()
    return one.end()


@fault
def rank_overflows_after_averaging():
    return both_skipped(on_two_ranks(bad_after_averaging))


def bad_shard(rank):
    one = Rank(rank, sharded=True)
    one.backward(INF if rank == 1 else 1.0)
    one.step()
    return one.end()


@fault
def rank_overflows_in_its_shard():
    outcome, what = both_skipped(on_two_ranks(bad_shard))
    return outcome, what if OURS else f"FSDP's ShardedGradScaler: {what}"


def shard_without_gradients(rank):
    one = Rank(rank, sharded=True)
    one.backward(1.0)
    if rank == 1:
        one.w.grad = None
    one.step()
    return one.end()


@fault
def rank_without_gradients():
    ends = on_two_ranks(shard_without_gradients)
    if any(isinstance(end, str) for end in ends):
        return error_of(ends)
    weights = [end[0] for end in ends]
    return ("fine", "it takes part") if weights == [0.9, 1.0] else ("corrupted", f"weights are {weights}")


def dies(rank):
    one = Rank(rank)
    for i in range(4):
        if rank == 1 and i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        one.backward(1.0)
        one.step()
    return one.end()


@fault
def rank_dies():
    return error_of(on_two_ranks(dies))


def leaves_out_a_step(rank):
    one = Rank(rank)
    for i in range(4):
        one.backward(1.0)
        if rank == 0 or i != 2:  # as a `continue` on what only this rank sees does
            one.step()
    return one.end()


@fault
def rank_leaves_out_a_step():
    ends = on_two_ranks(leaves_out_a_step)
    if any(isinstance(end, str) for end in ends):
        return error_of(ends)
    return "corrupted", "the ranks part: weights are {:.4g} and {:.4g}, and no word of it".format(*(end[0] for end in ends))


def has_a_batch_less(rank):
    one = Rank(rank)
    for _ in range(4 - rank):
        one.backward(1.0)
        one.step()
    if rank == 1:  # busy with other work, such as validation
        time.sleep(3 * LIMIT)
    return one.end()


@fault
def rank_has_a_batch_less():
    return error_of(on_two_ranks(has_a_batch_less))


def different_scales(rank):
    one = Rank(rank, init_scale=65536.0 if rank == 0 else 16384.0)
    one.backward(1.0)
    one.step()
    return one.end()


@fault
def ranks_begin_with_different_scales():
    ends = on_two_ranks(different_scales)
    if any(isinstance(end, str) for end in ends):
        return error_of(ends)
    if all(abs(end[0] - 0.9) < 1e-6 for end in ends):
        return "fine", ""
    return "corrupted", "each divides the average by its own scale: weights are {:.4g} and {:.4g}, and not 0.9".format(
        *(end[0] for end in ends))
