"""headroom.GradScaler, its optimizers and policies over NumPy arrays."""

import gc
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import headroom


def make_optimizer(grad=1.0, dtype=np.float16, **options):
    weight, grad = np.ones(4, dtype), np.full(4, grad, dtype)
    return weight, grad, headroom.AdamW({"w": (weight, grad)}, **options)


def test_overflowing_batch_is_retried_until_it_fits_or_is_skipped():
    _, grad, optimizer = make_optimizer()
    scaler = headroom.GradScaler("headroom-retry")
    assert scaler.policy.retry and not headroom.preset("headroom").retry
    passes = []
    for gradient in (0.25, 100.0, np.nan, 0.125):
        passes.append(0)
        while passes[-1] == 0 or scaler.retry():
            with np.errstate(over="ignore"):
                grad[:] = scaler.scale(1.0) * np.float32(gradient)
            scaler.step(optimizer)
            scaler.update()
            passes[-1] += 1
    assert passes[0] == passes[3] == 1 and 1 < passes[1] <= 8 and 1 < passes[2] <= 8


def test_finite_step_is_applied_and_nan_step_is_skipped():
    weight, grad, optimizer = make_optimizer(lr=0.1, weight_decay=0.0)
    scaler = headroom.GradScaler("torch")
    scaler.scale(1.0)
    report = scaler.step(optimizer)
    assert report.applied and report.grad_norm == pytest.approx(2 / 65536)
    np.testing.assert_allclose(weight, 0.9, rtol=1e-3)
    scaler.update()
    before = weight.copy()
    scaler.scale(1.0)
    grad[1] = np.nan
    report = scaler.step(optimizer)
    assert (report.applied, report.skip, report.culprit) == (False, "not finite", "w: 0 inf, 1 nan")
    scaler.update()
    assert (weight == before).all() and scaler.get_scale() == 32768
    assert optimizer.steps() == 1
    assert (grad == 0).all()  # a skipped step clears the gradients


def test_step_clips_and_clears_gradients():
    weight, grad, optimizer = make_optimizer(grad=65536 / 4, dtype=np.float32)
    scaler = headroom.GradScaler()
    scaler.scale(1.0)
    report = scaler.step(optimizer, max_norm=0.25, clear_grads="always")
    assert report.clip_factor == pytest.approx(0.5, rel=1e-4)
    assert (grad == 0).all()
    with pytest.raises(ValueError, match="on_skip"):
        scaler.step(optimizer, clear_grads="sometimes")


def test_calls_out_of_order_raise_error_with_code():
    _, _, optimizer = make_optimizer()
    scaler = headroom.GradScaler()
    with pytest.raises(headroom.Error, match="before any scale") as caught:
        scaler.step(optimizer)
    assert caught.value.code == "wrong order"
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ValueError)
    scaler.scale(1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(headroom.Error, match="already"):
        scaler.unscale_(optimizer)


def test_errors_survive_pickling():
    with pytest.raises(headroom.InvalidArgument) as caught:
        headroom.GradScaler(headroom.DynamicScale(init_scale=0.0))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.code) == (str(caught.value), "invalid argument")


def test_mismatched_sizes_are_refused_and_leave_groups_unchanged():
    _, _, optimizer = make_optimizer()
    with pytest.raises(ValueError):
        optimizer.add_group([(np.zeros(3, np.float32), np.zeros(4, np.float32))])
    assert len(optimizer.state()[0]) == 1


def test_policy_is_built_from_name_or_settings():
    assert "megatron" in headroom.presets()
    assert headroom.preset("megatron").hysteresis == 2
    scaler = headroom.GradScaler(headroom.DynamicScale(init_scale=8, growth_interval=1))
    _, _, optimizer = make_optimizer()
    scaler.scale(1.0), scaler.step(optimizer), scaler.update()
    assert scaler.get_scale() == 16
    with pytest.raises(ValueError, match="megatron"):  # the message lists all presets
        headroom.GradScaler("nobody")
    with pytest.raises(ValueError, match="growth_intervall"):
        headroom.DynamicScale(growth_intervall=3)
    for bad in ("gpu", "cuda:x", ""):
        with pytest.raises(ValueError, match="device"):
            headroom.GradScaler(device=bad)


def test_policy_can_be_replaced_and_is_validated():
    scaler = headroom.GradScaler()
    with pytest.raises(ValueError, match="backoff_factor"):
        scaler.policy = scaler.policy.replace(backoff_factor=2.0)
    assert scaler.policy.backoff_factor == 0.5
    scaler.policy = scaler.policy.replace(growth_interval=7, on_overflow="throw")
    assert (scaler.policy.growth_interval, scaler.policy.on_overflow) == (7, "throw")
    assert scaler.policy == headroom.ScalePolicy(str(scaler.policy))
    assert headroom.ScalePolicy("static:512").scale == 512
    with pytest.raises(AttributeError, match="growth_interval"):
        print(headroom.StaticScale().growth_interval)


def test_scaler_state_round_trips_exactly():
    scaler = headroom.GradScaler("megatron")
    _, grad, optimizer = make_optimizer()
    for step in range(5):
        scaler.scale(1.0)
        grad[:] = np.inf if step == 2 else 1
        scaler.step(optimizer)
        scaler.update()
    again = headroom.GradScaler("megatron")
    again.load(scaler.save())
    assert again.save() == scaler.save()
    with pytest.raises(headroom.Error) as caught:
        again.load("{}")
    assert caught.value.code == "bad state"


def test_optimizer_state_round_trips_exactly():
    weight, grad, optimizer = make_optimizer(lr=0.1)
    optimizer.apply()
    steps, tensors = optimizer.state()
    kept = {name: np.array(values) for name, values in tensors.items()}
    assert sorted(kept) == ["w/exp_avg", "w/exp_avg_sq", "w/master"]
    other_weight, other_grad, other = make_optimizer(lr=0.1)
    other.load_state(steps, kept)
    assert (other_weight == weight).all()
    optimizer.apply(), other.apply()
    assert (other_weight == weight).all() and other.steps() == 2


def test_each_group_uses_its_own_options():
    a, b = np.ones(1, np.float32), np.ones(1, np.float32)
    grad = np.ones(1, np.float32)
    optimizer = headroom.SGD([(a, grad)], lr=0.5)
    assert optimizer.add_group([(b, grad.copy())], lr=0.25) == 1
    optimizer.apply()
    assert (a[0], b[0]) == (0.5, 0.75)
    optimizer.set_options(lr=0.0)
    optimizer.set_grad(0, None)
    optimizer.apply()
    assert (a[0], b[0]) == (0.5, 0.5)
    with pytest.raises(TypeError):
        optimizer.set_options(beta=1)
    with pytest.raises(TypeError):
        optimizer.add_group([], beta=1)


def test_alarm_is_passed_to_callback_or_raised():
    alarms = []
    policy = headroom.DynamicScale(init_scale=1.0)
    for on_alarm in (lambda alarm: alarms.append((alarm.alarm, str(alarm))), None):
        scaler = headroom.GradScaler(policy, on_alarm=on_alarm)
        _, _, optimizer = make_optimizer(grad=np.inf)
        scaler.scale(1.0)
        scaler.step(optimizer)
        if on_alarm is None:
            with pytest.raises(headroom.Error) as caught:
                scaler.update()
            assert caught.value.code == "scale collapsed"
        else:
            scaler.update()
    assert alarms[0][0] == "at floor" and alarms[0][1]


def test_exception_from_alarm_callback_propagates():
    def fail(alarm):
        raise KeyError("mine")

    scaler = headroom.GradScaler(headroom.DynamicScale(init_scale=1.0), on_alarm=fail)
    _, _, optimizer = make_optimizer(grad=np.inf)
    scaler.scale(1.0)
    scaler.step(optimizer)
    with pytest.raises(KeyError, match="mine"):
        scaler.update()


def test_measure_detail_counts_by_magnitude():
    stats, detail = headroom.measure_detail([np.array([0, 1, 1.5, 2, 6e-8], np.float16)])
    assert (stats.count, stats.amax) == (5, 2)
    assert (detail.zeros, detail.subnormals) == (1, 1)
    assert detail.histogram == {-24: 1, 0: 2, 1: 1}


def test_scale_writes_array_to_out():
    scaler = headroom.GradScaler()
    losses = np.array([1, 2], np.float16)
    out = scaler.scale(losses, out=np.zeros(2, np.float32))
    assert out.tolist() == [65536, 131072]


def test_measure_may_run_in_several_threads():
    grads = [np.ones(1 << 20, np.float32) for _ in range(4)]
    norms = []
    threads = [
        threading.Thread(target=lambda g=g: norms.append(headroom.measure([g]).norm)) for g in grads
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert norms == [1024.0] * 4


def test_cuda_scaler_without_cuda_raises_unsupported():
    if headroom.cuda_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(headroom.Error) as caught:
        headroom.GradScaler(device="cuda:0")
    assert caught.value.code == "unsupported"


def test_module_runs_as_program():
    run = [sys.executable, "-m", "headroom"]
    shown = subprocess.run([*run, "--version"], capture_output=True, text=True)
    assert shown.stdout.strip() == f"headroom {headroom.__version__}" and shown.returncode == 0
    assert subprocess.run([*run, "replay", "/nowhere"], capture_output=True).returncode == 2


def test_scaler_and_state_views_keep_arrays_alive():
    _, _, optimizer = make_optimizer()
    other_weight, other_grad, other = make_optimizer()
    scaler = headroom.GradScaler(headroom.DynamicScale(init_scale=4.0, growth_interval=1))
    scaler.scale(1.0)
    scaler.step(optimizer)
    scaler.step(other)
    moments = optimizer.state()[1]
    kept = weakref.ref(optimizer._core.kept[0][1])
    del optimizer
    gc.collect()
    assert kept() is not None  # the scaler still rescales this gradient
    scaler.scale(1.0)
    scaler.update()
    del moments
    gc.collect()
    assert kept() is None


def test_group_index_follows_list_indexing():
    weight, grad = np.ones(1, np.float32), np.ones(1, np.float32)
    optimizer = headroom.SGD({"w": (weight, grad)}, lr=1.0)
    optimizer.set_options(-1, lr=0.25)
    optimizer.apply()
    assert weight[0] == 0.75
    with pytest.raises(IndexError):
        optimizer.set_options(1, lr=1.0)


def test_state_tensors_are_matched_by_name():
    weight, grad, optimizer = make_optimizer()
    optimizer.apply()
    steps, tensors = optimizer.state()
    saved = {name: np.array(tensors[name]) for name in sorted(tensors, reverse=True)}
    optimizer.apply()
    optimizer.load_state(steps, saved)
    assert (np.array(optimizer.state()[1]["w/exp_avg"]) == saved["w/exp_avg"]).all()
    with pytest.raises(ValueError, match="same name"):
        optimizer.add_group({"w": (np.ones(1, np.float32), None)})
    optimizer.add_group({"3": (np.ones(1, np.float32), None)})
    optimizer.add_group([(np.ones(1, np.float32), None) for _ in range(2)])  # gets unused names
    assert len(optimizer.state()[1]) == 3 + 3 * 2


def test_dlpack_copy_is_refused():
    _, _, optimizer = make_optimizer()
    optimizer.apply()
    with pytest.raises(BufferError, match="copy the result"):
        optimizer.state()[1]["w/exp_avg"].__dlpack__(copy=True)


def test_scale_state_runs_a_policy_without_a_scaler():
    state = headroom.ScaleState("torch:growth_interval=2,init_scale=8")
    scales = []
    for overflow in (False, False, True, True, False, False):
        assert state.advance(overflow) is None
        scales.append(state.scale)
    assert scales == [8, 16, 8, 4, 4, 8]
    assert (state.steps, state.skipped, state.skips_in_row) == (6, 2, 0)
    assert state.applies(True, 1e4) and not state.applies(False, 1e4)
    assert not headroom.ScaleState("static:1e-30").applies(True, 1e20)  # inf when unscaled
    for copy in (pickle.loads(pickle.dumps(state)), headroom.ScaleState.load(state.save()), state.replace()):
        assert copy == state
    assert headroom.ScaleState("dynamic:init_scale=1").advance(True).alarm == "at floor"


def test_scale_state_refuses_numbers_that_it_cannot_reach():
    state = headroom.ScaleState("torch")
    assert state.replace(scale=4.0, growth_tracker=3).numbers["pending"] == 4.0
    for numbers in ({"scale": 0.0}, {"scale": float("nan")}, {"growth_tracker": 2000}, {"growth_tracker": 2**40},
                    {"scale": "x"}, {"skipped": 1}, {"growth": 1}):
        with pytest.raises(headroom.Error):
            state.replace(**numbers)
    assert state == headroom.ScaleState("torch")


def test_scale_state_learns_the_largest_gradient():
    state = headroom.ScaleState("headroom")
    state.advance(False, 60000.0)
    assert state.scale == 2.0**15
