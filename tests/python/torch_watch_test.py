"""The range watch."""

import gc
import io
import os
import pathlib
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from watch_faults import FAULTS, Block, Fault, Transformer, tokens, under_autocast, watched

import headroom
import headroom.torch

DEVICE = os.environ.get("HEADROOM_TEST_DEVICE", "cpu")
BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)


def left_over():
    """What a watch has changed in torch."""
    hooks = torch.nn.modules.module
    return (torch._C._len_torch_function_stack(), len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks),
            (torch.Tensor.backward, torch.autograd.backward) == BACKWARDS)


@pytest.fixture(autouse=True)
def nothing_left_over():
    before = left_over()
    yield
    assert left_over() == before


def labels(report, backward=False):
    return [str(row) for row in report.rows if row.backward == backward]


class Layers(nn.Module):
    """Two blocks, through `call`: directly, or checkpointed."""

    def __init__(self, call=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Block(), Block()
        self.call = call

    def forward(self, x):
        return self.call(self.b, self.call(self.a, x))


def train(model, x):
    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def batch():
    torch.manual_seed(1)
    return torch.randn(2, 4, 16, device=DEVICE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_first_faulty_operation_is_named(fault: Fault):
    torch.manual_seed(0)
    model, step = fault.build(DEVICE)
    report = watched(model, step)
    assert str(report.first_bad) == fault.expected
    assert report.inputs_finite == fault.inputs_finite
    assert report.advice()


def test_a_healthy_step_has_nothing_to_report():
    model = Transformer().to(DEVICE)
    report = watched(model, under_autocast(model, DEVICE, tokens(), scale=2.0**10))
    assert report.first_bad is None and report.inputs_finite
    assert report.near_overflow == [] and report.islands() == [] and report.advice() == []
    assert "All results are finite" in str(report)
    assert {"blocks.0.attn: softmax", "blocks.1.mlp: mul", "parameter head.weight"} <= set(labels(report))
    assert "blocks.1.mlp: backward of mul" in labels(report, backward=True)


def test_watching_does_not_change_gradients():
    model, plain = Layers().to(DEVICE), Layers().to(DEVICE)
    watched(model, train(model, batch()))
    train(plain, batch())()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))


def test_every_nth_step_is_watched_and_reported_without_waiting():
    reports = []
    model = Layers().to(DEVICE)
    watch = headroom.torch.watch(model, every=3, on_report=reports.append)
    for _ in range(7):
        train(model, batch())()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    with torch.no_grad():
        model(batch())  # not a training step
    assert len(reports) == 3
    assert watch.try_report() is reports[-1]
    watch.remove()


def test_nothing_is_left_in_torch_between_watched_steps():
    model = Layers().to(DEVICE)
    before = left_over()
    watch = headroom.torch.watch(model, every=2)
    for _ in range(3):
        train(model, batch())()
        assert left_over() == before
    watch.remove()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_report_before_any_watched_step_raises_and_try_report_is_none():
    model = Layers().to(DEVICE)
    watch = headroom.torch.watch(model, every=0)
    train(model, batch())()
    assert watch.try_report() is None
    with pytest.raises(headroom.Error, match="No step was watched"):
        watch.report()
    watch.next_step()
    train(model, batch())()
    assert watch.report().first_bad is None
    watch.remove()


def test_next_step_watches_a_forward_pass_without_gradients():
    model = Layers().to(DEVICE)
    watch = headroom.torch.watch(model, every=0)
    watch.next_step()
    with torch.no_grad():
        model(batch())
    assert "a.mlp: mul" in labels(watch.report()) and not labels(watch.report(), backward=True)
    watch.remove()


def test_results_of_a_watched_step_can_be_pickled_and_freed_ones_are_not_read():
    kept = []

    class Odd(nn.Module):
        def forward(self, x):
            kept.append(torch.cumsum(x, -1))
            empty = x * 2
            empty.untyped_storage().resize_(0)
            torch.ops.aten.view(empty, x.shape).detach().requires_grad_()
            torch.vmap(lambda row: row * 3)(x)
            torch.ones(2, device="meta") * 2
            torch.ones(0, device=x.device) * 2
            return x * x.new_ones(1).expand(16) * 2

    model = nn.Sequential(nn.Linear(16, 16), Odd()).to(DEVICE)
    report = watched(model, train(model, batch()))
    assert report.first_bad is None and "1: cumsum" in labels(report)
    assert "_headroom_op" not in kept[0].__dict__
    file = io.BytesIO()
    torch.save(kept[0].detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), kept[0])


def test_a_compiled_loss_is_not_compiled_again():
    model = Layers().to(DEVICE)
    loss = torch.compile(lambda y: y.square().mean(), backend="aot_eager")

    def step():
        loss(model(batch())).backward()

    step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert "square" in labels(watched(model, step))
    step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_loss_outside_of_the_model_is_watched():
    model = Layers().to(DEVICE)
    x = batch()

    def step():
        torch.log(model(x) * 0).mean().backward()

    report = watched(model, step)
    assert str(report.first_bad) == "log" and report.inputs_finite


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_do_not_appear_twice(reentrant):
    def call(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    x = batch().requires_grad_()
    plain, model = Layers().to(DEVICE), Layers(call).to(DEVICE)
    expected, report = watched(plain, train(plain, x)), watched(model, train(model, x))
    operations = [str(row) for row in report.rows if not row.backward and row.source == "operation"]
    wanted = [str(row) for row in expected.rows if not row.backward and row.source == "operation"]
    # With use_reentrant=True a block is one autograd function for the rest of the graph.
    assert [name for name in operations if "CheckpointFunction" not in name] == wanted
    if not reentrant:
        assert labels(report, backward=True) == labels(expected, backward=True)


def test_a_compiled_model_is_watched_eagerly_and_not_compiled_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4)).to(DEVICE)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 4, device=DEVICE)
    train(compiled, x)()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report = watched(compiled, train(compiled, x))
    assert "_orig_mod.1: softplus" in labels(report)
    train(compiled, x)()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_model_compiled_in_place_is_refused():
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    with pytest.raises(headroom.Error, match=r"torch.compile\(model\)"):
        headroom.torch.watch(model)


def test_autograd_functions_are_named():
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C.DisableTorchFunction():  # as a kernel of another library
                return x / 0

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Custom(nn.Module):
        def forward(self, x):
            return Overflow.apply(x) + 1

    model = nn.Sequential(nn.Linear(16, 16), Custom()).to(DEVICE)
    assert str(watched(model, train(model, batch())).first_bad) == "1: Overflow"


def test_a_mode_of_the_program_may_end_between_forward_and_backward():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = Layers().to(DEVICE)
    x = batch()

    def step():
        with Mode(), torch.device(DEVICE):
            loss = model(x).square().mean()
        loss.backward()

    assert "a.mlp: backward of mul" in labels(watched(model, step), backward=True)


def test_an_exception_in_forward_does_not_end_watching():
    model = Layers().to(DEVICE)
    watch = headroom.torch.watch(model, every=1)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3, device=DEVICE))
    train(model, batch())()
    assert "b.mlp: backward of mul" in labels(watch.report(), backward=True)
    watch.remove()


def test_masks_are_no_fault_and_not_near_overflow():
    class Masked(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4, 4), value).triu(1))

        def forward(self, x):
            scores = self.fc(x).half()
            return (scores + self.mask.half()).softmax(-1)

    for value in (float("-inf"), torch.finfo(torch.float16).min):
        model = Masked(value).to(DEVICE)
        report = watched(model, train(model, torch.ones(4, 4, device=DEVICE)))
        assert report.first_bad is None and report.near_overflow == []


def test_masks_that_forward_computes_are_not_near_overflow():
    class Masked(nn.Module):
        def __init__(self, added):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.added = added

        def forward(self, x, mask):
            return (self.fc(x).half() + self.added(mask)).softmax(-1)

    lowest = torch.finfo(torch.float16).min
    for added in (lambda mask: (1 - mask.half()) * lowest, lambda mask: ((1.0 - mask) * -10000.0).half(),
                  lambda mask: ((1.0 - mask.float()) * torch.finfo(torch.float32).min).half()):
        model = Masked(added).to(DEVICE)
        x, mask = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE, dtype=torch.int64).tril()
        watch = headroom.torch.watch(model)
        model(x, mask).float().square().mean().backward()
        report = watch.report()
        watch.remove()
        assert report.first_bad is None and report.near_overflow == [], str(report)


def test_what_is_near_overflow_is_listed_and_proposed_as_islands():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    nn.init.constant_(model[1].weight, 0.0)
    nn.init.constant_(model[1].bias, 60000.0)

    def step():
        with torch.autocast(DEVICE, torch.float16):
            loss = model(torch.ones(2, 4, device=DEVICE)).float().mean()
        loss.backward()

    report = watched(model, step)
    assert report.first_bad is None
    assert [str(row) for row in report.near_overflow] == ["1: linear"]
    assert 0 < report.near_overflow[0].stats.headroom_bits < 1
    assert report.islands() == ["1"] and 'keep_fp32(model, ["1"])' in report.advice()[0]


def test_subnormal_gradients_ask_for_a_larger_scale():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(DEVICE).half()

    def step():
        (model(torch.ones(2, 16, device=DEVICE).half()).float().sum() * 2.0**-18).backward()

    report = watched(model, step)
    assert report.first_bad is None and "the loss scale can be doubled" in report.advice()[-1]
    gradient = next(row for row in report.rows if row.backward and row.dtype == "f16")
    assert gradient.stats.subnormal == gradient.stats.count


def test_an_alarm_of_the_scaler_watches_the_next_step():
    model = nn.Linear(2, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = headroom.torch.watch(model, every=0)
    scaler = headroom.torch.GradScaler(DEVICE, policy="torch:max_skips_in_row=2", on_alarm=watch.on_alarm)
    x = torch.full((1, 2), float("inf"), device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            optimizer.zero_grad()
    assert any("The next step is watched" in str(warning.message) for warning in caught)
    assert str(watch.report().first_bad) == "input input"
    watch.remove()


@pytest.mark.skipif(DEVICE == "cpu" and not hasattr(torch.cpu.Stream, "record_event"),
                    reason="fully_shard of this PyTorch (2.6) does not train on the CPU")
def test_fsdp2_parameters_have_their_names(tmp_path):
    from torch.distributed.fsdp import fully_shard

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh(DEVICE, (1,))
        model = Layers().to(DEVICE)
        for block in (model.a, model.b):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = watched(model, train(model, batch()))
        assert report.first_bad is None
        assert {"a.mlp: mul", "parameter b.mlp.up.weight"} <= set(labels(report))
        assert "b.mlp: backward of mul" in labels(report, backward=True)
        with torch.no_grad():
            model.b.mlp.up.weight.to_local()[0, 0] = float("nan")
        assert str(watched(model, train(model, batch())).first_bad) == "parameter b.mlp.up.weight"
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu" or not torch.__version__.startswith("2.11"), reason="recorded on the CPU, torch 2.11")
def test_the_table_of_faults_in_the_documentation_is_current():
    pytest.importorskip("transformers")
    script = pathlib.Path(__file__).resolve().parents[2] / "scripts/watch-table"
    check = subprocess.run([sys.executable, script, "--check"], text=True, capture_output=True)
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA")
def test_a_watched_step_never_waits_for_the_device():
    model = Transformer().to(DEVICE)
    step = under_autocast(model, DEVICE, tokens())
    step()
    watch = headroom.torch.watch(model, every=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
            watch.try_report()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.report().first_bad is None
    watch.remove()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA")
def test_a_captured_forward_pass_is_not_watched_and_says_why():
    model = nn.Linear(4, 4).to(DEVICE)
    x = torch.ones(2, 4, device=DEVICE)
    model(x)
    watch = headroom.torch.watch(model, every=1)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="CUDA graph is not watched"), torch.cuda.graph(graph):
        model(x)
    assert watch.try_report() is None
    watch.remove()


def test_the_memory_of_a_removed_watch_is_freed_at_once():
    """Freeing device memory waits for the device: it must not happen whenever the garbage collector runs."""
    model = Layers().to(DEVICE)
    watch = headroom.torch.watch(model, every=1)
    for _ in range(2):
        train(model, batch())()
    watch.report()
    gone = [weakref.ref(watch), weakref.ref(watch._table)]
    gc.collect()
    gc.disable()
    try:
        watch.remove()
        del watch
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_transposed_tensors_and_those_with_gaps_are_measured():
    class Shapes(nn.Module):
        def forward(self, x):
            return torch.mul(x.transpose(0, 2), 1000) * 2

    wide = batch()
    wide[..., 1::2] = float("nan")  # in the gaps
    x = wide[..., ::2]
    model = nn.Sequential(Shapes())
    report = watched(model, lambda: model(x))
    rows = {str(row): row.stats for row in report.rows}
    assert report.first_bad is None
    assert rows["input input"].count == rows["0: mul"].count == x.numel()
    assert rows["input input"].amax == x.abs().max().item()


def test_a_full_table_is_warned_about():
    model = Layers().to(DEVICE)
    watch = headroom.torch.Watch(model, every=1, rows=5)
    with pytest.warns(RuntimeWarning, match="tensors were not measured"):
        train(model, batch())()
    assert len(watch.report().rows) == 5
    watch.remove()


@pytest.mark.parametrize("freed", [False, True])
def test_gradients_of_this_backward_are_reported_not_sums_and_not_nothing(freed):
    """Gradients are accumulated, or an optimizer inside of backward takes them at once."""
    layer = nn.Linear(2, 1, bias=False, device=DEVICE)
    x = torch.ones(1, 2, device=DEVICE)
    if freed:
        layer.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    else:
        layer.weight.grad = torch.full((1, 2), float("inf"), device=DEVICE)
    report = watched(layer, lambda: layer(x).sum().backward())
    rows = [row for row in report.rows if row.backward and row.tensor == "weight"]
    assert len(rows) == 1 and report.first_bad is None
    assert rows[0].stats.amax == 1.0
