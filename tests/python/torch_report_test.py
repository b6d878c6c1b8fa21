"""What headroom.torch.GradScaler adds to torch.amp.GradScaler: reports."""

import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch_scaler_test import INF, NAN, make_models, make_parameter, make_started_scaler

import headroom.torch

DEVICE = torch.get_default_device().type


def test_bf16_gradients_are_accepted():
    weight = make_parameter(1.0, 1.0, grad=[4.0, 8.0], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = make_started_scaler(headroom.torch.GradScaler, init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.grad.tolist() == [1.0, 2.0] and weight.tolist() == [0.875, 0.75]


def test_report_names_the_culprit_of_a_skipped_step():
    model, _ = make_models()
    scaler = headroom.torch.GradScaler(DEVICE, init_scale=2.0)
    with pytest.raises(RuntimeError, match="before any step"):
        scaler.report()
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1),
                      torch.optim.AdamW(model.parameters(), fused=True),
                      headroom.torch.AdamW(model.parameters())):
        scaler = headroom.torch.GradScaler(DEVICE, init_scale=2.0)
        for bad in (False, True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            if bad:
                model[2].weight.grad[1, :3] = torch.tensor([INF, INF, NAN])
            scaler.step(optimizer)
            assert scaler.last_step_applied is not bad
            if not bad:
                assert scaler.report().culprit == ""
                assert str(scaler.report()).startswith("applied at scale 2")
            scaler.update()
        assert str(scaler.report()) == "skipped at scale 2: param_groups[0].params[2]: 2 inf, 1 nan"
        scaler.name_parameters(model)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        assert scaler.report().culprit.startswith("2.weight: ")
        scaler.update()


def test_names_come_from_the_optimizer_and_the_culprit_survives_clipping():
    model, _ = make_models()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = headroom.torch.GradScaler(DEVICE)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    model[2].bias.grad[0] = INF
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # makes nan of every gradient
    scaler.step(optimizer)
    assert scaler.report().culprit == "2.bias: 1 inf, 0 nan"


@pytest.mark.parametrize("optimizer_class", [headroom.torch.AdamW, torch.optim.AdamW])
def test_report_has_the_norm(optimizer_class):
    model, _ = make_models()
    optimizer = optimizer_class(model.parameters())
    scaler = headroom.torch.GradScaler(DEVICE)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) / 65536
    scaler.step(optimizer)
    assert scaler.report().grad_norm == pytest.approx(float(norm))


def test_names_are_not_pickled_and_do_not_keep_models_alive():
    model, _ = make_models()
    scaler = headroom.torch.GradScaler(DEVICE)
    scaler.name_parameters(model)
    again = pickle.loads(pickle.dumps(scaler))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert again._names.of_all(optimizer)[3] == "param_groups[0].params[3]"
    assert scaler._names.of_all(optimizer)[3] == "2.bias"
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_disabled_scaler_skips_and_reports():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = headroom.torch.GradScaler(DEVICE, enabled=False)
    assert scaler.last_step_applied
    for grad, applied in ((1.0, True), (INF, False)):
        weight.grad = torch.full((2,), grad)
        scaler.step(optimizer)
        assert scaler.last_step_applied is applied and weight.tolist() == [0.5, 0.5]


def test_signature_begins_as_torchs_and_warnings_point_at_the_caller(recwarn):
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters)
    assert list(inspect.signature(headroom.torch.GradScaler).parameters)[: len(theirs)] == theirs
    if DEVICE == "cpu":
        headroom.torch.GradScaler("cuda")
        assert recwarn.pop(UserWarning).filename == __file__


@pytest.mark.parametrize("bad", [float("nan"), 1e20])
def test_skip_by_fused_optimizer_after_unscale_lowers_the_scale(bad):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = headroom.torch.SGD([param], lr=1.0)
    scaler = headroom.torch.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    param.grad[0] = bad
    scaler.step(optimizer)
    scaler.update()
    assert not param.any() and not scaler.last_step_applied and scaler.get_scale() == 2.0


def test_update_works_after_a_step_that_raised():
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = headroom.torch.SGD([param], lr=1.0)

    def refuse(*_):
        raise RuntimeError("not now")

    hook = optimizer.register_step_pre_hook(refuse)
    scaler = headroom.torch.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match="not now"):
        scaler.step(optimizer)
    scaler.update()
    hook.remove()
    assert scaler.get_scale() == 4.0
    with pytest.raises(AssertionError, match="No inf checks"):  # a superfluous one is still refused
        scaler.update()


def test_named_parameters_can_be_swapped():
    """model.to() swaps DTensors, which torch refuses for tensors with weak references."""
    model, _ = make_models()
    scaler = headroom.torch.GradScaler(DEVICE, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.utils.swap_tensors(model[2].bias, torch.nn.Parameter(torch.zeros_like(model[2].bias)))
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    model[2].bias.grad[0] = INF
    scaler.step(optimizer)
    assert scaler.report().culprit == "2.bias: 1 inf, 0 nan"
