"""headroom.torch on a CUDA device: no host synchronisation, and CUDA graph capture."""

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


def test_step_does_not_synchronize():
    params, optimizer, scaler = make_training(max_norm=1.0)
    for step in range(3):
        fill_gradients(params, step)
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    for _ in range(5):
        scaler.step(optimizer)
        scaler.update()
    done.record()
    assert not done.query()  # the device still sleeps, so no call waited for it
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_graph_replays_equal_eager_steps(dtype):
    eager, graphed = make_training(dtype, max_norm=1.0), make_training(dtype, max_norm=1.0)
    for params, optimizer, scaler in (eager, graphed):
        fill_gradients(params, 0)
        scaler.step(optimizer)
        scaler.update()
    params, optimizer, scaler = graphed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records without executing
        scaler.step(optimizer)
        scaler.update()
    for step in range(1, 40):
        fill_gradients(params, step)
        graph.replay()
        fill_gradients(eager[0], step)
        eager[2].step(eager[1])
        eager[2].update()
        assert scaler.get_scale() == eager[2].get_scale()
        for ours, expected in zip(params, eager[0]):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert optimizer.report().skipped == 10


def test_bf16_gradients_are_unscaled():
    params, optimizer, scaler = make_training(torch.bfloat16)
    optimizer = torch.optim.SGD(params, lr=1.0)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad.fill_(512.0)
    scaler.step(optimizer)
    scaler.update()
    for param, old in zip(params, before):
        torch.testing.assert_close(param.detach(), old - 0.5)
    params[1].grad[3] = float("inf")
    scaler.step(optimizer)
    scaler.update()
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
