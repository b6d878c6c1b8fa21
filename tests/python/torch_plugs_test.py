"""Headroom in the places of Megatron's, DeepSpeed's and fairseq2's loss scalers: the same scales, one verdict, gradients
divided by the scale of their backward, and states that resume. The frameworks' calls are made by small models of
them; where a framework is installed, its own classes are used as well."""

import pickle
import random
import subprocess
import sys
import types

import pytest
import torch

import headroom
import headroom.deepspeed
import headroom.fairseq2
import headroom.megatron


def overflows(steps=4000, seed=1):
    """Runs of overflows between clean runs that are long enough for a scale to grow."""
    chance = random.Random(seed)
    pattern = []
    while len(pattern) < steps:
        pattern += [True] * chance.randint(1, 4) + [False] * chance.randint(0, 60)
    return pattern


class MegatronScaler:
    """The rule of Megatron's DynamicGradScaler, with the attributes that plug() reads."""

    def __init__(self, scale=1024.0, hysteresis=2, growth_interval=20):
        self.scale, self.min_scale = torch.tensor([scale]), torch.tensor([1.0])
        self.growth_factor, self.backoff_factor = torch.tensor([2.0]), torch.tensor([0.5])
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.growth, self.delay = 0, hysteresis

    inv_scale = property(lambda self: 1.0 / self.scale)

    def update(self, found_inf):
        self.growth = 0 if found_inf else self.growth + 1
        if found_inf:
            self.delay -= 1
            if self.delay <= 0:
                self.scale = torch.maximum(self.scale * 0.5, self.min_scale)
        elif self.growth == self.growth_interval:
            self.growth, self.delay, self.scale = 0, self.hysteresis, self.scale * 2.0

    def state_dict(self):
        return {"scale": self.scale, "growth_tracker": self.growth, "hysteresis_tracker": self.delay}


class MegatronOptimizer:
    """What Megatron's mixed-precision optimizer does with its grad_scaler."""

    def __init__(self, scaler):
        self.grad_scaler = scaler
        self.used = []

    def prepare_grads(self, scaled, found_inf):
        self.used.append((scaled * self.grad_scaler.inv_scale).item())
        self.grad_scaler.update(found_inf)
        return found_inf


class ChainedOptimizer:
    def __init__(self, *optimizers):
        self.chained_optimizers = list(optimizers)

    def step(self, found):
        scaled = self.chained_optimizers[0].grad_scaler.scale * 1.0  # the gradient of a loss with gradient 1
        return [each.prepare_grads(scaled, inf) for each, inf in zip(self.chained_optimizers, found)]


def quiet(alarm):
    """on_alarm of frameworks that go on at the floor."""


def test_megatron_scales_are_those_of_its_own_scaler():
    theirs = MegatronScaler()
    optimizer = MegatronOptimizer(MegatronScaler())
    ours = headroom.megatron.plug(optimizer, on_alarm=quiet)
    assert optimizer.grad_scaler is ours and ours.scale.shape == (1,)
    for overflow in overflows():
        theirs.update(overflow)
        ours.update(overflow)
        assert torch.equal(ours.scale, theirs.scale) and torch.equal(ours.inv_scale, theirs.inv_scale)
    assert ours.state.skipped == sum(overflows())


def test_megatron_chained_optimizers_have_one_scale():
    """With a scaler each, an overflow in one of them leaves scales that differ, and gradients divided by the wrong one."""
    pattern = [(random.Random(i).random() < 0.1, random.Random(i + 1000).random() < 0.1) for i in range(500)]

    def run(plugged):
        chain = ChainedOptimizer(MegatronOptimizer(MegatronScaler()), MegatronOptimizer(MegatronScaler()))
        if plugged:
            headroom.megatron.plug(chain, on_alarm=quiet)
        for found in pattern:
            chain.step(found)
        return [each.used for each in chain.chained_optimizers]

    assert run(True) == [[1.0] * 500] * 2
    assert run(False)[1] != [1.0] * 500


@pytest.mark.parametrize("policy", ["megatron", "headroom", "verl-megatron"])
def test_megatron_resumes_from_its_own_and_from_our_state(policy):
    ours = headroom.megatron.GradScaler(policy, "cpu", on_alarm=quiet)
    for overflow in overflows(300):
        ours.update(overflow)
    state = ours.state_dict()
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker", "headroom"}
    again = headroom.megatron.GradScaler("megatron", "cpu")
    again.load_state_dict(state)
    assert again.state == ours.state and torch.equal(again.scale, ours.scale)


def test_megatron_takes_over_a_state_of_its_own_scaler():
    theirs = MegatronScaler()
    pattern = overflows(700)
    for overflow in pattern[:400]:
        theirs.update(overflow)
    ours = headroom.megatron.plug(MegatronOptimizer(MegatronScaler()), on_alarm=quiet)
    ours.load_state_dict(theirs.state_dict())
    for overflow in pattern[400:]:
        theirs.update(overflow)
        ours.update(overflow)
        assert torch.equal(ours.scale, theirs.scale)


class DeepSpeedScaler:
    """The rule of DeepSpeed's DynamicLossScaler, with the names of its fields."""

    def __init__(self, scale=1024.0, window=20, shift=2, consecutive=False):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = scale, 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, window, 1.0
        self.delayed_shift = self.cur_hysteresis = shift
        self.consecutive_hysteresis, self.dynamic = consecutive, True

    def update_scale(self, overflow):
        if overflow:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2.0, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            grows = stable > 0 and stable % self.scale_window == 0
            if self.consecutive_hysteresis or grows:
                self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= 2.0 if grows else 1.0
        self.cur_iter += 1

    def scale_loss(self, loss):
        return loss * self.cur_scale


class ZeroOptimizer:
    """The order of DeepSpeed's ZeRO step: the scale is updated, then gradients are divided by it."""

    def __init__(self, scaler):
        self.loss_scaler = scaler
        self.used = []

    def step(self, overflow):
        scaled = self.loss_scaler.scale_loss(torch.ones(()))
        self.loss_scaler.update_scale(overflow)
        if not overflow:
            self.used.append((scaled / self.loss_scaler.cur_scale).item())


@pytest.mark.parametrize("shift, consecutive", [(1, False), (2, False), (3, True)])
def test_deepspeed_scales_are_those_of_its_own_scaler(shift, consecutive):
    theirs = DeepSpeedScaler(shift=shift, consecutive=consecutive)
    optimizer = ZeroOptimizer(DeepSpeedScaler(shift=shift, consecutive=consecutive))
    ours = headroom.deepspeed.plug(optimizer, on_alarm=quiet)
    assert optimizer.loss_scaler is ours and ours.dynamic
    for overflow in overflows():
        theirs.update_scale(overflow)
        ours.update_scale(overflow)
        ours.scale_loss(torch.ones(()))
        assert ours.cur_scale == ours.loss_scale == theirs.cur_scale


def test_deepspeed_divides_gradients_by_the_scale_of_their_backward():
    optimizer = ZeroOptimizer(DeepSpeedScaler())
    headroom.deepspeed.plug(optimizer, on_alarm=quiet)
    theirs = ZeroOptimizer(DeepSpeedScaler())
    for overflow in overflows():
        optimizer.step(overflow)
        theirs.step(overflow)
    assert set(optimizer.used) == {1.0}
    assert set(theirs.used) == {1.0, 0.5}  # half the gradient whenever the scale grows


def test_deepspeed_raises_at_the_smallest_scale():
    scaler = headroom.deepspeed.LossScaler("deepspeed:init_scale=1,hysteresis=1")
    with pytest.raises(headroom.Error, match="allows none smaller") as raised:
        scaler.update_scale(True)
    assert raised.value.code == "scale collapsed"


def test_deepspeed_scaler_survives_pickling_and_takes_over_a_resumed_run():
    theirs = DeepSpeedScaler()
    for overflow in overflows(330):
        theirs.update_scale(overflow)
    optimizer = ZeroOptimizer(theirs)
    scaler = headroom.deepspeed.plug(optimizer, policy="headroom")
    assert scaler.cur_scale == theirs.cur_scale and scaler.state.policy.rule == "headroom"
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state == scaler.state and again.cur_scale == scaler.cur_scale
    kept = headroom.deepspeed.plug(ZeroOptimizer(theirs), on_alarm=quiet)
    for overflow in overflows(330, seed=2):
        kept.update_scale(overflow)
        theirs.update_scale(overflow)
        kept.scale_loss(torch.ones(()))
        assert kept.cur_scale == theirs.cur_scale


def test_deepspeed_scaled_loss_of_a_16_bit_loss_is_fp32():
    scaler = headroom.deepspeed.LossScaler("deepspeed")
    loss = torch.full((), 2.0, dtype=torch.float16, requires_grad=True)
    scaler.backward(loss)
    assert scaler.scale_loss(loss).item() == 2.0**17  # inf in FP16
    assert scaler.scale_loss(loss).dtype == torch.float32


def fairseq2_step(scaler, weight, optimizer, value):
    """What fairseq2's trainer does in a step."""
    optimizer.zero_grad()
    scaler.backward((weight * value).sum())
    scaler.unscale_grads_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=False)
    return scaler.run_optimizer_step(optimizer)


def fairseq2_model(policy=None):
    weight = torch.nn.Parameter(torch.zeros(2, device="cpu"))
    return weight, torch.optim.SGD([weight], lr=1.0), headroom.fairseq2.LossScaler(policy, device="cpu")


def test_fairseq2_alarms_reach_the_user():
    alarms = []
    weight = torch.nn.Parameter(torch.zeros(2, device="cpu"))
    scaler = headroom.fairseq2.LossScaler("dynamic:max_skips_in_row=2", device="cpu", on_alarm=alarms.append)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    results = [fairseq2_step(scaler, weight, optimizer, float("inf")) for _ in range(2)]
    assert len(alarms) == 1 and [result.exploded for result in results] == [False, True]


def test_fairseq2_results_are_those_of_its_own_scaler():
    """Its scaler: torch's rule, then 1e-4 for a smaller scale, which is reported as exploded."""
    weight, optimizer, scaler = fairseq2_model("fairseq2:growth_interval=5")
    torchs = torch.amp.GradScaler("cpu", growth_interval=5)
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device="cpu"))], lr=1.0)
    pattern = [False] * 11 + [True] * 40 + [False] * 11 + [True, False]
    for overflow in pattern:
        value = float("inf") if overflow else 1.0
        before = torchs.get_scale()
        torchs.scale((theirs.param_groups[0]["params"][0] * value).sum()).backward()
        torchs.step(theirs)
        torchs.update()
        theirs.zero_grad()
        exploded = overflow and torchs.get_scale() < 1e-4
        if exploded:
            torchs.update(1e-4)
        result = fairseq2_step(scaler, weight, optimizer, value)
        expected = headroom.fairseq2.LossScaleResult(
            before or 2.0**16, torchs.get_scale(), torchs.get_scale() > before, overflow, exploded)
        assert result == expected
    assert scaler.scale_window == 5


def test_fairseq2_skipped_steps_change_nothing_and_are_reported_without_a_smaller_scale():
    weight, optimizer, scaler = fairseq2_model("megatron")  # the first overflow leaves the scale as it is
    result = fairseq2_step(scaler, weight, optimizer, float("inf"))
    assert result.overflowed and result.new_scale == result.old_scale
    assert weight.tolist() == [0.0, 0.0]
    assert not fairseq2_step(scaler, weight, optimizer, 1.0).overflowed
    assert weight.tolist() != [0.0, 0.0]


def test_fairseq2_states_go_in_both_directions():
    weight, optimizer, scaler = fairseq2_model()
    for value in (1.0, float("inf"), 1.0, 1.0):
        fairseq2_step(scaler, weight, optimizer, value)
    state = scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state["grad_scaler"])  # as fairseq2's scaler does
    assert theirs.get_scale() == 32768.0 and theirs._get_growth_tracker() == 2
    for policy in (None, "headroom"):
        other = fairseq2_model(policy)[2]
        other.load_state_dict({"grad_scaler": theirs.state_dict()})
        assert other.grad_scaler.get_scale() == 32768.0
        again = fairseq2_model(policy)[2]
        again.load_state_dict(other.state_dict())
        assert again.state_dict() == other.state_dict()


@pytest.mark.parametrize("make", [
    lambda policy: headroom.megatron.GradScaler(policy, "cpu"),
    headroom.deepspeed.LossScaler,
    lambda policy: headroom.fairseq2.LossScaler(policy, device="cpu"),
])
def test_policies_that_the_loop_cannot_follow_are_refused(make):
    for policy in ("headroom-retry", "torch:on_overflow=throw"):
        with pytest.raises(headroom.Error, match="cannot retry|skips overflows itself"):
            make(policy)


def test_plugs_say_when_there_is_no_dynamic_scaler():
    with pytest.raises(ValueError, match="no dynamic grad_scaler"):
        headroom.megatron.plug(MegatronOptimizer(None))
    with pytest.raises(ValueError, match="no dynamic grad_scaler"):
        headroom.megatron.plug(ChainedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0)))  # as Megatron's for FP32
    plugged = MegatronOptimizer(MegatronScaler())
    first = headroom.megatron.plug(plugged)
    assert headroom.megatron.plug(plugged).state == first.state
    with pytest.raises(ValueError, match="no dynamic loss scaler"):
        headroom.deepspeed.plug(ZeroOptimizer(None))


def test_plugs_do_not_import_their_frameworks():
    code = ("import sys, headroom.deepspeed, headroom.fairseq2, headroom.megatron\n"
            "print({'deepspeed', 'fairseq2', 'megatron'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# With the frameworks themselves.


class OnCpu(torch.overrides.TorchFunctionMode):
    """Megatron's classes make their tensors on CUDA; here they are on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def test_megatrons_own_scaler_has_the_same_scales():
    module = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    with OnCpu():
        theirs, replaced = (module.DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 20, 2) for _ in range(2))
        optimizer = MegatronOptimizer(replaced)
        ours = headroom.megatron.plug(optimizer, on_alarm=quiet)
        for overflow in overflows():
            theirs.update(overflow)
            ours.update(overflow)
            assert torch.equal(ours.scale, theirs.scale) and torch.equal(ours.inv_scale, theirs.inv_scale)


def test_deepspeeds_own_scaler_has_the_same_scales(monkeypatch):
    module = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.logger, "info", lambda *args: None)
    for consecutive in (False, True):
        theirs, replaced = (module.DynamicLossScaler(1024.0, 20, 1.0, 2, consecutive, False) for _ in range(2))
        ours = headroom.deepspeed.plug(ZeroOptimizer(replaced), on_alarm=quiet)
        for overflow in overflows():
            theirs.update_scale(overflow)
            ours.update_scale(overflow)
            ours.scale_loss(torch.ones(()))
            assert ours.cur_scale == theirs.cur_scale


def test_fairseq2s_own_scaler_gives_the_same_results():
    try:
        from fairseq2.optim.fp16_loss_scaler import StandardFloat16LossScaler
    except (ImportError, OSError, RuntimeError) as error:  # its native part wants a certain build of PyTorch
        pytest.skip(str(error))
    alone = types.SimpleNamespace(size=1)
    theirs = StandardFloat16LossScaler(types.SimpleNamespace(root=alone, rdp=alone), scale_window=5)
    theirs._grad_scaler = torch.amp.GradScaler("cpu", growth_interval=5)  # that of CUDA is disabled here
    ours = fairseq2_model("fairseq2:growth_interval=5")[2]
    weights = []
    for scaler in (theirs, ours):
        weight, optimizer, _ = fairseq2_model()
        results = [vars(fairseq2_step(scaler, weight, optimizer, float("inf") if overflow else 1.0))
                   for overflow in [False] * 11 + [True] * 40 + [False] * 11 + [True, False]]
        weights.append((results, weight.tolist()))
    assert weights[0][1] == weights[1][1]
    for a, b in zip(weights[0][0], weights[1][0], strict=True):
        assert a == pytest.approx(b)
