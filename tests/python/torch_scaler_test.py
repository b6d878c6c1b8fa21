"""headroom.torch.GradScaler gives the same results as torch.amp.GradScaler when a script runs with either.

The scripts cover what PyTorch's own tests of its GradScaler cover.
"""

import copy
import pickle
import warnings

import pytest
import torch

import headroom.torch

DEVICE = torch.get_default_device().type

INF, NAN = float("inf"), float("nan")


def run_script(script, scaler_class):
    """The result of a script, or the type of its exception, and the warnings it raised."""
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = script(scaler_class)
        except Exception as error:
            result = type(error)
    messages = [(each.category, str(each.message)) for each in warned]
    # torch raises "Triggered internally" warnings once per process, so only the first scaler would get them.
    return result, [each for each in messages if "Triggered internally" not in each[1]]


def assert_same(script):
    theirs = run_script(script, torch.amp.GradScaler)
    ours = run_script(script, headroom.torch.GradScaler)
    assert_equal(ours, theirs)
    return ours[0]


def assert_equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for mine, other in zip(ours, theirs):
            assert_equal(mine, other)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_equal(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, type) and issubclass(theirs, Exception):
        assert issubclass(ours, theirs)  # so that `except` clauses still work
    else:
        assert ours == theirs


def make_parameter(*values, grad=None, dtype=torch.float32):
    made = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    if grad is not None:
        made.grad = torch.tensor(grad, dtype=dtype)
    return made


def make_started_scaler(scaler_class, **options):
    scaler = scaler_class(DEVICE, **options)
    scaler.scale(torch.ones(()))
    return scaler


# Construction, scale(), state.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": 2.0, "enabled": False},
    ],
)
def test_constructor_accepts_and_refuses_what_torch_does(options):
    assert_same(lambda scaler: scaler(DEVICE, **options).state_dict())


@pytest.mark.parametrize("scale", [0.0, -2.0, INF, NAN, 1e-45, 2.0**127])
def test_impossible_scales_can_be_neither_set_nor_loaded(scale):
    with pytest.raises(ValueError):
        headroom.torch.GradScaler(DEVICE, init_scale=scale)
    scaler = make_started_scaler(headroom.torch.GradScaler)
    for change in (lambda: scaler.update(scale), lambda: scaler.update(torch.tensor(scale)),
                   lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": scale})):
        with pytest.raises(ValueError):
            change()
        assert scaler.state_dict() == make_started_scaler(torch.amp.GradScaler).state_dict()


def test_cuda_scaler_without_cuda_warns_and_is_disabled():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    def script(scaler_class):
        scaler = scaler_class()
        return scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()

    assert assert_same(script) == (False, 1.0, {})


def test_scaler_is_a_torch_scaler():
    assert isinstance(headroom.torch.GradScaler(DEVICE), torch.amp.GradScaler)


def test_scale_handles_nested_containers():
    def script(scaler_class):
        scaler = scaler_class(DEVICE, init_scale=2.0)
        t = torch.full((1,), 4.0)
        nested = scaler.scale((t, [t, (t.double(), t)]))
        return nested, list(scaler.scale(iter([t, t]))), scaler.scale(torch.tensor(1.0).half())

    assert_same(script)
    assert_same(lambda scaler: scaler(DEVICE).scale(3))
    assert_same(lambda scaler: scaler(DEVICE).scale([torch.ones(1), 3]))


def test_16_bit_losses_are_scaled_in_fp32():
    for loss in (torch.ones(2, dtype=torch.half), torch.ones((), dtype=torch.bfloat16)):
        scaled = headroom.torch.GradScaler(DEVICE).scale(loss)
        assert scaled.dtype is torch.float32 and (scaled == 65536.0).all()


def test_state_dicts_are_interchangeable_with_torch():
    def script(scaler_class):
        first = make_started_scaler(scaler_class, init_scale=3.0, growth_factor=4.0, growth_interval=2)
        first.load_state_dict({**first.state_dict(), "_growth_tracker": 1})
        second = make_started_scaler(scaler_class, init_scale=6.0)
        second.load_state_dict(first.state_dict())
        lazy = scaler_class(DEVICE)
        lazy.load_state_dict(second.state_dict())
        return second.state_dict(), second._init_growth_tracker, lazy.scale(torch.ones(1)), lazy.state_dict()

    assert_same(script)
    theirs, ours = make_started_scaler(torch.amp.GradScaler, init_scale=5.0), make_started_scaler(headroom.torch.GradScaler)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    ours._scale.fill_(7.0)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 7.0
    assert_same(lambda scaler: scaler(DEVICE).load_state_dict({}))
    assert_same(lambda scaler: scaler(DEVICE).load_state_dict({"scale": 1.0}))
    assert_same(lambda scaler: scaler(DEVICE, enabled=False).load_state_dict({}))


def test_getters_and_setters_behave_as_in_torch():
    def script(scaler_class):
        scaler = make_started_scaler(scaler_class)
        scaler.set_growth_factor(3.0), scaler.set_backoff_factor(0.1), scaler.set_growth_interval(9)
        return (scaler.get_growth_factor(), scaler.get_backoff_factor(),
                scaler.get_growth_interval(), scaler._get_growth_tracker(), scaler.state_dict())

    assert_same(script)
    assert_same(lambda scaler: scaler(DEVICE, enabled=False).get_growth_factor())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("enabled", [True, False])
def test_pickled_scaler_continues_identically(duplicate, enabled):
    def script(scaler_class):
        scaler = scaler_class(DEVICE, init_scale=3.0, growth_interval=2, enabled=enabled)
        weight = make_parameter(1.0)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        train_step(scaler, optimizer, weight, 1.0)
        again = duplicate(scaler)
        counted = again._init_growth_tracker if enabled else 0
        train_step(again, optimizer, weight, 1.0)
        return counted, again.state_dict(), again.scale(torch.ones(1)), weight

    assert_same(script)


def test_pickling_between_unscale_and_update_is_refused():
    def script(scaler_class):
        scaler = make_started_scaler(scaler_class)
        scaler.unscale_(torch.optim.SGD([make_parameter(1.0, grad=[1.0])], lr=1.0))
        return pickle.dumps(scaler)

    assert assert_same(script) is AssertionError


# Call order.


def train_step(scaler, optimizer, weight, value, unscale=False):
    optimizer.zero_grad()
    scaler.scale((weight * value).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    scaler.update()
    return result


CALLS = {
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: (scaler.update(), scaler.scale(torch.ones(())))[:1],
    "closure": lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: None),
}


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("first", CALLS)
@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("third", ["update", "step"])
@pytest.mark.parametrize("grad", [[1.0], [INF]])
def test_every_order_of_three_calls_behaves_as_in_torch(start, first, second, third, grad):
    if (first, second, third) == ("unscale", "update", "step"):
        pytest.skip("torch divides the gradients twice; ours follow the scale")

    def script(scaler_class):
        scaler = make_started_scaler(scaler_class) if start else scaler_class(DEVICE)
        weight = make_parameter(1.0, grad=grad)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        seen = []
        for call in (first, second, third):
            try:
                seen.append(CALLS[call](scaler, optimizer))
            except Exception as error:
                seen.append(type(error))
        return seen, weight, scaler.get_scale(), scaler._get_growth_tracker()

    assert_same(script)


def test_calls_without_gradients_behave_as_in_torch():
    for calls in (["step"], ["unscale", "step"], ["unscale", "update"], ["update"], ["unscale", "unscale"]):
        def script(scaler_class):
            scaler, optimizer = make_started_scaler(scaler_class), torch.optim.SGD([make_parameter(1.0)])
            for call in calls:
                CALLS[call](scaler, optimizer)

        assert_same(script)


def test_update_with_a_new_scale_behaves_as_in_torch():
    for new in (3.0, torch.tensor(3.0), torch.ones(2), torch.tensor(3.0, requires_grad=True)):
        def script(scaler_class):
            scaler = make_started_scaler(scaler_class)
            scaler.update(new)
            return scaler.state_dict()

        assert_same(script)


def test_disabled_scaler_changes_nothing():
    def script(scaler_class):
        scaler = scaler_class(DEVICE, enabled=False)
        weight = make_parameter(1.0, grad=[2.0])
        optimizer = torch.optim.SGD([weight], lr=1.0)
        loss = torch.ones(1)
        assert scaler.scale(loss) is loss
        scaler.unscale_(optimizer)
        result = scaler.step(optimizer, closure=lambda: 5.0)
        scaler.update()
        return result, weight, scaler.state_dict(), scaler._get_growth_tracker()

    assert_same(script)
    assert headroom.torch.GradScaler(DEVICE, enabled=False).last_step_applied


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, headroom.torch.SGD])
def test_gradients_are_checked_again_after_unscale(optimizer_class):
    scaler = make_started_scaler(headroom.torch.GradScaler)
    weight = make_parameter(1.0, grad=[1.0])
    optimizer = optimizer_class([weight], lr=1.0)
    scaler.unscale_(optimizer)
    weight.grad.fill_(INF)
    scaler.step(optimizer)
    assert weight.item() == 1.0 and not scaler.last_step_applied


def test_found_inf_that_others_set_makes_the_step_skip():
    """As a loop does that reduces the private flags over its own ranks."""
    scaler = make_started_scaler(headroom.torch.GradScaler)
    weight = make_parameter(1.0, grad=[1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1.0 and scaler.get_scale() == 32768.0


# Unscaling.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
@pytest.mark.parametrize("size", [1, 7, 1000, 100_003])
def test_unscaling_gives_the_same_bits_as_torch(dtype, bad, size):
    if dtype is torch.bfloat16 and DEVICE == "cuda":
        pytest.skip("torch's CUDA kernel refuses bfloat16; torch_cuda_test.py tests ours")

    def script(scaler_class):
        grads = [torch.randn(size), torch.randn(3, 5) * 1e-3, torch.zeros(0)]
        params = [torch.nn.Parameter(torch.zeros_like(grad, dtype=dtype)) for grad in grads]
        for each, grad in zip(params, grads):
            each.grad = grad.to(dtype)
        if bad is not None:
            params[0].grad[size // 2] = bad
        scaler = make_started_scaler(scaler_class, init_scale=3.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        return [each.grad for each in params], scaler._found_inf_per_device(optimizer)

    assert_same(script)


def test_gradients_of_any_strides_are_unscaled():
    def script(scaler_class):
        wide = torch.full((4, 4), 4.0)
        grads = [
            torch.full((3, 2), 4.0).t(),
            torch.full((2, 3, 4, 4), 4.0).contiguous(memory_format=torch.channels_last),
            wide[:, ::2],
            torch.full((8,), 4.0)[1::3],
            torch.full((), 4.0),
        ]
        seen = []
        for bad in range(-1, len(grads)):
            params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
            for each, grad in zip(params, grads):
                each.grad = torch.empty_strided(grad.size(), grad.stride()).copy_(grad)
            if bad >= 0:
                params[bad].grad[(0,) * params[bad].grad.dim()] = NAN
            scaler = scaler_class(DEVICE)
            optimizer = torch.optim.SGD(params, lr=1.0)
            found = scaler._unscale_grads_(
                optimizer, torch.full((1,), 0.25), torch.zeros(1), True
            )
            seen.append(([each.grad for each in params], found))
        return seen

    assert_same(script)


def test_sparse_gradients_are_unscaled_and_checked():
    def script(scaler_class):
        index = torch.tensor([[0, 1, 1], [2, 0, 2]])
        seen = []
        for values in ([16.0, 32.0, 64.0], [16.0, 32.0, INF], [NAN, 32.0, 64.0]):
            weight = torch.nn.Parameter(torch.zeros(2, 3))
            weight.grad = torch.sparse_coo_tensor(index, torch.tensor(values), (2, 3))
            optimizer = torch.optim.SGD([weight], lr=1.0)
            scaler = make_started_scaler(scaler_class, init_scale=4.0)
            scaler.unscale_(optimizer)
            seen.append((weight.grad.to_dense(), scaler._found_inf_per_device(optimizer)))
        return seen

    assert_same(script)


def test_duplicate_sparse_fp16_entries_are_summed_before_the_check():
    def script(scaler_class):
        index = torch.tensor([[0, 0], [1, 1]])
        weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.half))
        values = torch.tensor([64000.0, 64000.0], dtype=torch.half)
        weight.grad = torch.sparse_coo_tensor(index, values, (2, 3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        found = scaler_class(DEVICE)._unscale_grads_(
            optimizer, torch.full((1,), 0.25), torch.zeros(1), True
        )
        return found, weight.grad.to_dense()

    assert assert_same(script)[0][torch.ones(()).device] == 1.0


def test_complex_gradients_are_refused():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    weight.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(headroom.Error, match="complex64"):
        make_started_scaler(headroom.torch.GradScaler).unscale_(torch.optim.SGD([weight], lr=1.0))


# Training loops.


def make_models():
    torch.manual_seed(1)
    first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    return first, copy.deepcopy(first)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["plain", "unscale", "clip", "penalty", "accumulate"])
def test_training_gives_the_same_bits_as_torch(optimizer, way):
    def script(scaler_class):
        model, _ = make_models()
        made = OPTIMIZERS[optimizer](model.parameters())
        scaler = scaler_class(DEVICE, init_scale=128.0, growth_interval=2)
        scales = []
        for step in range(8):
            made.zero_grad()
            for _ in range(2 if way == "accumulate" else 1):
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(model(torch.randn(4, 8)), torch.ones(4, 8))
                if way == "penalty":
                    grads = torch.autograd.grad(
                        scaler.scale(loss), model.parameters(), create_graph=True
                    )
                    inverse = 1.0 / scaler.get_scale()
                    loss = loss + sum((g * inverse).pow(2).sum() for g in grads).sqrt()
                scaler.scale(loss).backward()
            if step in (2, 5):
                model[0].weight.grad[0, 0] = INF if step == 2 else NAN
            if way in ("unscale", "clip"):
                scaler.unscale_(made)
            if way == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(made)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, list(model.parameters()), made.state_dict()["state"]

    assert_same(script)


def test_several_optimizers_may_share_a_scaler():
    def script(scaler_class):
        first, second = make_models()
        one, two = torch.optim.SGD(first.parameters(), 0.1), torch.optim.AdamW(second.parameters())
        scaler = scaler_class(DEVICE, init_scale=128.0, growth_interval=2)
        for step in range(6):
            one.zero_grad(), two.zero_grad()
            a, b = first(torch.randn(4, 8)), second(torch.randn(4, 8))
            scaler.scale((a + b).square().mean()).backward(retain_graph=True)
            scaler.scale((a - b).square().mean()).backward()
            if step == 3:
                second[2].bias.grad[0] = INF
            scaler.unscale_(one)
            scaler.step(one), scaler.step(two)
            scaler.update()
        return scaler.state_dict(), list(first.parameters()), list(second.parameters())

    assert_same(script)


def test_optimizers_that_take_grad_scaler_still_work():
    class TakesGradScaler(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            scale = grad_scaler._get_scale_async()
            grad_scaler._check_inf_per_device(self)
            self.seen = (float(scale), sum(map(float, grad_scaler._found_inf_per_device(self).values())))

    def script(scaler_class):
        scaler = make_started_scaler(scaler_class)
        optimizer = TakesGradScaler([make_parameter(1.0, grad=[INF])], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        return optimizer.seen, scaler.get_scale()

    assert_same(script)


def test_schedulers_and_hooks_are_called_as_in_torch():
    def script(scaler_class):
        model, _ = make_models()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = scaler_class(DEVICE)
        for step in range(3):
            scaler.scale(model(torch.randn(2, 8)).sum()).backward()
            scaler.step(optimizer), scaler.update(), schedule.step()
        return called, schedule.get_last_lr()

    assert_same(script)
