"""headroom.torch on a CUDA device: no host synchronisation, and CUDA graph capture."""

import gc

import pytest
import torch

import headroom.torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SIZES = (3, 70, 4096, 100_003)


def make_training(dtype=torch.float32, **options):
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, device="cuda").to(dtype)) for n in SIZES]
    for param in params:
        param.grad = torch.zeros_like(param)
    scaler = headroom.torch.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.ones((), device="cuda"))
    return params, headroom.torch.AdamW(params, lr=1e-2, **options), scaler


def fill_gradients(params, step):
    torch.manual_seed(step)
    for param in params:
        param.grad.copy_(torch.randn(param.shape, device="cuda") * 100)
    if step % 4 == 2:
        params[2].grad[7] = float("nan")


OPTIMIZERS = {
    "headroom": lambda params: headroom.torch.AdamW(params, lr=1e-2),
    "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "torch fused sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


def full_step(scaler, optimizer, unscale=False, max_norm=1.0):
    scaler.scale(torch.ones((), device="cuda"))
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    return norm


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_step_does_not_synchronize(optimizer_name, unscale):
    params, _, scaler = make_training()
    optimizer = OPTIMIZERS[optimizer_name](params)
    for step in range(3):
        fill_gradients(params, step)
        full_step(scaler, optimizer, unscale)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            full_step(scaler, optimizer, unscale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    for _ in range(5):
        full_step(scaler, optimizer, unscale)
    done.record()
    assert not done.query()  # the device still sleeps, so no call waited for it
    torch.cuda.synchronize()


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_compiled_steps_do_not_synchronize(optimizer_name):
    params, _, scaler = make_training()
    optimizer = OPTIMIZERS[optimizer_name](params)
    compiled = torch.compile(full_step, backend="eager")
    for step in range(5):
        fill_gradients(params, step)
        compiled(scaler, optimizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            compiled(scaler, optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.reset()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, headroom.torch.SGD])
def test_bf16_dtensors_step_as_ordinary_tensors_do(optimizer_class):
    """Torch's own kernel that unscales refuses them on CUDA."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        values = torch.linspace(-1.0, 1.0, 4096, device="cuda").bfloat16().view(64, 64)
        ends = []
        for place in (lambda tensor: tensor.clone(), lambda tensor: distribute_tensor(tensor.clone(), mesh, [Shard(0)])):
            weight = torch.nn.Parameter(place(values))
            optimizer = optimizer_class([weight], lr=0.5)
            scaler = headroom.torch.GradScaler("cuda", init_scale=8.0)
            for factor in (8.0, float("inf"), 4.0):
                weight.grad = place(values * factor)
                full_step(scaler, optimizer)
            ends.append((scaler.get_scale(), getattr(weight.data, "_local_tensor", weight.data)))
        assert ends[0][0] == ends[1][0] == 4.0
        assert torch.equal(ends[0][1], ends[1][1]) and not torch.equal(ends[0][1], values)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_graph_replays_equal_eager_steps(dtype):
    eager, graphed = make_training(dtype, max_norm=1.0), make_training(dtype, max_norm=1.0)
    for params, optimizer, scaler in (eager, graphed):
        fill_gradients(params, 0)
        full_step(scaler, optimizer)
    params, optimizer, scaler = graphed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records without executing
        full_step(scaler, optimizer)
    for step in range(1, 40):
        fill_gradients(params, step)
        graph.replay()
        fill_gradients(eager[0], step)
        full_step(eager[2], eager[1])
        assert scaler.get_scale() == eager[2].get_scale()
        for ours, expected in zip(params, eager[0]):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert scaler.report().skipped == 10


@pytest.mark.parametrize("optimizer_name", ["torch fused", "torch fused sgd"])
def test_clipping_with_fused_optimizers_equals_torch(optimizer_name):
    """torch's scaler with clip_grad_norm_ gives the same weights to rounding, and the same scales."""
    runs = []
    for scaler_class in (torch.amp.GradScaler, headroom.torch.GradScaler):
        params, _, _ = make_training()
        optimizer = OPTIMIZERS[optimizer_name](params)
        scaler = scaler_class("cuda", init_scale=1024.0, growth_interval=3)
        scales = []
        for step in range(1, 12):
            fill_gradients(params, step)
            if scaler_class is headroom.torch.GradScaler:
                full_step(scaler, optimizer)
            else:
                scaler.scale(torch.ones((), device="cuda"))
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        runs.append((scales, params))
    assert runs[0][0] == runs[1][0]
    for theirs, ours in zip(runs[0][1], runs[1][1]):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_scale_captured_with_backward_needs_no_call_in_replays():
    """PyTorch's documented pattern: forward and backward in a graph, step and update outside."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    scaler = headroom.torch.GradScaler("cuda", init_scale=8.0)
    weight.grad = torch.zeros_like(weight)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer), scaler.update(), weight.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.grad.zero_()
        scaler.scale(weight.sum()).backward()
    for _ in range(2):
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.25] * 4


def test_gradients_on_several_devices_are_decided_on_the_host():
    weights = [torch.nn.Parameter(torch.ones(4, device=device)) for device in ("cuda", "cpu")]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    scaler = headroom.torch.GradScaler("cuda", init_scale=8.0)
    for bad in (False, True):
        scaler.scale(torch.ones((), device="cuda"))
        for weight in weights:
            weight.grad = torch.full_like(weight, 8.0)
        if bad:
            weights[1].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert all(weight.tolist() == [0.5] * 4 for weight in weights)
    assert scaler.get_scale() == 4.0 and scaler.report().culprit == "param_groups[0].params[1]: 1 inf, 0 nan"


def test_bf16_gradients_are_unscaled():
    params, optimizer, scaler = make_training(torch.bfloat16)
    optimizer = torch.optim.SGD(params, lr=1.0)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad.fill_(512.0)
    full_step(scaler, optimizer, max_norm=None)
    for param, old in zip(params, before):
        torch.testing.assert_close(param.detach(), old - 0.5)
    params[1].grad[3] = float("inf")
    full_step(scaler, optimizer, max_norm=None)
    assert not scaler.last_step_applied
    assert "params[1]: 1 inf, 0 nan" in str(scaler.report())


def test_cupy_arrays_train_on_device():
    cupy = pytest.importorskip("cupy")
    weight, grad = cupy.ones(1000, cupy.float16), cupy.full(1000, 512.0, cupy.float16)
    optimizer = headroom.SGD({"w": (weight, grad)}, lr=65536.0)
    scaler = headroom.GradScaler(device="cuda:0")
    loss = cupy.full((), 1.0, cupy.float32)
    scaled = scaler.scale(loss, loss)
    grad[:] = (scaled / 131072).astype(cupy.float16)  # 0.5, and 0.5 / 65536 unscaled
    scaler.step(optimizer)
    scaler.update()
    report = scaler.report()
    assert report.applied and report.scale == 65536.0
    assert (weight == 0.5).all()
    assert headroom.measure([grad]).norm == pytest.approx(0.5 * 1000**0.5)


def test_optimizer_may_be_made_before_the_model_is_moved():
    """As Accelerate, HF Trainer and Fabric do."""
    ends = []
    for late in (False, True):
        torch.manual_seed(2)
        layer = torch.nn.Linear(8, 8, device="cpu")
        if not late:
            layer.cuda()
        optimizer = headroom.torch.AdamW(layer.parameters(), lr=1e-2)
        layer.cuda()
        scaler = headroom.torch.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(layer(torch.ones(4, 8, device="cuda")).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(layer.weight.tolist())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_shows_in_memory_allocated_from_the_first_step_on(dtype):
    count = 1 << 20
    weight = torch.nn.Parameter(torch.randn(count, device="cuda").to(dtype))
    weight.grad = torch.ones_like(weight)
    before = torch.cuda.memory_allocated()
    optimizer = headroom.torch.AdamW([weight], lr=1e-2)
    assert torch.cuda.memory_allocated() == before
    optimizer.step()
    state = 4 * count * (2 if dtype is torch.float32 else 3)
    assert state <= torch.cuda.memory_allocated() - before <= state + (1 << 16)
    for value in optimizer.state[weight].values():
        assert value.dim() == 0 or value.is_cuda
    del optimizer, value
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_state_is_allocated_in_the_memory_pool_in_use():
    weight = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))
    weight.grad = torch.ones_like(weight)
    pool = torch.cuda.MemPool()
    optimizer = headroom.torch.AdamW([weight])
    with torch.cuda.use_mem_pool(pool):
        optimizer.step()
    address = optimizer.state[weight]["exp_avg"].data_ptr()
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool.id]
    assert any(0 <= address - segment["address"] < segment["total_size"] for segment in segments)


def test_out_of_memory_is_torchs_error_and_changes_nothing():
    weight = torch.nn.Parameter(torch.randn(1 << 24, device="cuda", dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    optimizer = headroom.torch.AdamW([weight])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(weight, before) and not optimizer.state
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_first_step_inside_a_graph_is_refused():
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = headroom.torch.AdamW([weight])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(headroom.Error, match="before the capture"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.parametrize("graphed", [False, True])
def test_writes_through_data_are_kept_without_synchronization(graphed):
    """Runs of 4,096 elements: docs/python.md, "Weights and masters"."""
    weight = torch.nn.Parameter(torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    optimizer = headroom.torch.SGD([weight], lr=0.5)
    optimizer.step()
    step = optimizer.step
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        step = graph.replay
    torch.cuda.synchronize()
    places = (0, 1, 4097, (1 << 20) - 4096)
    kept = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value, first in enumerate(places):
            weight.data[first:first + 4096].fill_(float(value + 8))
            step()
            kept.append(weight.detach()[first:first + 4096].clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for value, written in enumerate(kept):
        assert (written == value + 8).all(), places[value]


@pytest.mark.parametrize("ours", [False, True])
def test_what_waits_waits_for_the_current_stream(ours):
    """Torch's streams are not ordered with the default one."""
    weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = (headroom.torch.AdamW if ours else torch.optim.AdamW)([weight], **({} if ours else {"fused": True}))
    scaler = headroom.torch.GradScaler(init_scale=8.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for bad, expected in ((True, 8.0), (False, 16.0), (True, 8.0)):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            torch.cuda._sleep(100_000_000)  # cycles: what follows runs much later than the host enqueues it
            weight.grad.fill_(float("inf") if bad else 1.0)
            scaler.step(optimizer)
            assert scaler.last_step_applied != bad
            torch.cuda._sleep(100_000_000)
            scaler.update()
            assert scaler.get_scale() == expected
            torch.cuda._sleep(100_000_000)
            assert scaler.state_dict()["scale"] == expected
        assert optimizer.state_dict()["state"][0]["step"] == 2
