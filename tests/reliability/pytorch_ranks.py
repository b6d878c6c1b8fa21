"""Faults of two ranks with PyTorch: processes over Gloo. Either DistributedDataParallel averages the gradients and
each rank has a GradScaler, or each rank has its own tensors and FSDP's ShardedGradScaler."""
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

from pytorch_faults import INF, OURS, SGD, GradScaler, fault, first_sentence

LIMIT = 5  # timeout of collectives in seconds; PyTorch's default is half an hour


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

    def result(self):
        return round(self.w[0].item(), 6), self.scaler.get_scale()


def run_rank(rank, work, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=LIMIT))
    try:
        result = work(rank)
    except Exception as error:  # noqa: BLE001
        result = first_sentence(error)
    torch.save(result, f"{folder}/{rank}")
    os._exit(0)  # a clean shutdown would wait for the other rank


def run_on_two_ranks(work):
    """The result of `work` on each rank, or the first sentence of its error; None for a rank that died."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.get_context("spawn").Process(target=run_rank, args=(rank, work, folder)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            rank.kill()
        return [torch.load(f"{folder}/{rank}") if os.path.exists(f"{folder}/{rank}") else None for rank in range(2)]


def classify_skip(ends):
    if ends == [(1.0, 32768.0)] * 2:
        return "reported", "skipped on both" if OURS else "skipped on both; only the smaller scale shows it"
    if all(isinstance(end, tuple) for end in ends):
        return "corrupted", "the ranks diverge: weights are {} and {}, scales {:g} and {:g}".format(
            *(f"{end[0]:.4g}" for end in ends), *(end[1] for end in ends))
    return classify_error(ends)


def classify_error(ends):
    """Reported if a rank raised an error."""
    errors = [end for end in ends if isinstance(end, str)]
    return ("reported", errors[0]) if errors else ("silent", "no rank reports an error")


def overflow_before_averaging(rank):
    one = Rank(rank)
    one.backward(INF if rank == 1 else 1.0)
    one.step()
    return one.result()


@fault
def rank_overflows_before_averaging():
    return classify_skip(run_on_two_ranks(overflow_before_averaging))


def overflow_after_averaging(rank):
    one = Rank(rank)
    one.backward(1.0)
    if rank == 1:
        one.w.grad[0] = INF
    one.step()
    return one.result()


@fault
def rank_overflows_after_averaging():
    return classify_skip(run_on_two_ranks(overflow_after_averaging))


def overflow_in_shard(rank):
    one = Rank(rank, sharded=True)
    one.backward(INF if rank == 1 else 1.0)
    one.step()
    return one.result()


@fault
def rank_overflows_in_its_shard():
    outcome, what = classify_skip(run_on_two_ranks(overflow_in_shard))
    return outcome, what if OURS else f"FSDP's ShardedGradScaler: {what}"


def step_without_gradients(rank):
    one = Rank(rank, sharded=True)
    one.backward(1.0)
    if rank == 1:
        one.w.grad = None
    one.step()
    return one.result()


@fault
def rank_without_gradients():
    ends = run_on_two_ranks(step_without_gradients)
    if any(isinstance(end, str) for end in ends):
        return classify_error(ends)
    weights = [end[0] for end in ends]
    return ("fine", "it participates") if weights == [0.9, 1.0] else ("corrupted", f"weights are {weights}")


def die_in_third_step(rank):
    one = Rank(rank)
    for i in range(4):
        if rank == 1 and i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        one.backward(1.0)
        one.step()
    return one.result()


@fault
def rank_dies():
    return classify_error(run_on_two_ranks(die_in_third_step))


def omit_a_step(rank):
    one = Rank(rank)
    for i in range(4):
        one.backward(1.0)
        if rank == 0 or i != 2:  # like a `continue` on a condition that is true on this rank only
            one.step()
    return one.result()


@fault
def rank_omits_a_step():
    ends = run_on_two_ranks(omit_a_step)
    if any(isinstance(end, str) for end in ends):
        return classify_error(ends)
    return "corrupted", "the ranks diverge: weights are {:.4g} and {:.4g}; nothing is reported".format(
        *(end[0] for end in ends))


def train_one_batch_less(rank):
    one = Rank(rank)
    for _ in range(4 - rank):
        one.backward(1.0)
        one.step()
    if rank == 1:  # does other work, such as validation
        time.sleep(3 * LIMIT)
    return one.result()


@fault
def rank_has_one_batch_less():
    return classify_error(run_on_two_ranks(train_one_batch_less))


def start_with_different_scales(rank):
    one = Rank(rank, init_scale=65536.0 if rank == 0 else 16384.0)
    one.backward(1.0)
    one.step()
    return one.result()


@fault
def ranks_start_with_different_scales():
    ends = run_on_two_ranks(start_with_different_scales)
    if any(isinstance(end, str) for end in ends):
        return classify_error(ends)
    if all(abs(end[0] - 0.9) < 1e-6 for end in ends):
        return "fine", ""
    return "corrupted", "each divides the average by its own scale: weights are {:.4g} and {:.4g}, and not 0.9".format(
        *(end[0] for end in ends))
