"""headroom.torch.AdamW and SGD: weights written by the user, and optimizer state that is saved, loaded or read."""

import copy
import gc
import weakref

import pytest
import torch

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type

INF = float("inf")


def make_bf16_weight(values=(1.0, 2.0)):
    return torch.tensor(values, dtype=torch.bfloat16).requires_grad_()


def make_stepped_optimizer(weight, **options):
    optimizer = headroom.torch.AdamW([weight], lr=1e-4, weight_decay=0.0, **options)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


def clone_master(optimizer, index=0):
    return optimizer.state_dict()["state"][index]["master"].clone()


@pytest.mark.usefixtures("move_detection")
@pytest.mark.parametrize("write", ["copy", "data", "same place"])
def test_saved_state_reflects_weights_written_by_the_user(write):
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    new = torch.tensor([7.0, 8.0], dtype=torch.bfloat16)
    with torch.no_grad():
        if write == "copy":
            weight.copy_(new)
        elif write == "data":
            weight.data = new.clone()
        else:  # the new tensor would reuse the address of the first one if that had been freed
            weight.data = weight.data.float()
            weight.data = new.clone()
    assert clone_master(optimizer).tolist() == [7.0, 8.0]
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["params"][0].tolist() == [7.0, 8.0]
    other = make_bf16_weight([7.0, 8.0])
    loaded = headroom.torch.AdamW([other])
    loaded.load_state_dict(optimizer.state_dict())
    assert other.tolist() == [7.0, 8.0]


@pytest.mark.usefixtures("move_detection")
def test_weights_swapped_out_and_back_keep_their_masters():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    exact = clone_master(optimizer)
    assert exact.tolist() != weight.tolist()
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(5.0)
        weight.copy_(kept)
    assert torch.equal(clone_master(optimizer), exact)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = make_bf16_weight([0.0, 0.0])
    resumed = headroom.torch.AdamW([fresh])
    resumed.load_state_dict(saved)  # the optimizer is loaded before the model
    with torch.no_grad():
        fresh.copy_(kept)
    assert torch.equal(clone_master(resumed), exact)


def test_refresh_masters_picks_up_writes_through_data():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    weight.data.clamp_(-0.5, 0.5)
    optimizer.refresh_masters()
    assert clone_master(optimizer).tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("move_detection")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_follow_a_change_of_memory_format(dtype):
    models = [torch.nn.Conv2d(2, 3, 3).to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [headroom.torch.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(6):
        if step == 3:
            models[1].to(memory_format=torch.channels_last)
            assert models[1].weight.stride() != models[0].weight.stride()
        for model, optimizer in zip(models, optimizers):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            optimizer.step()
    for mine, theirs in zip(*(model.parameters() for model in models)):
        assert torch.equal(mine, theirs)
    states = [optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in optimizers]
    assert torch.equal(*states)
    models[1].weight.data = models[1].weight.data.reshape(3, 3, 3, 2)
    with pytest.raises(headroom.Error, match="had shape"):
        models[1].weight.grad = None
        optimizers[1].step()


def test_stochastic_rounding_resumes_without_state_tensors():
    weights = [make_bf16_weight([1.0] * 100) for _ in range(2)]
    options = {"lr": 1e-3, "master_weights": False, "stochastic_rounding": True}
    whole, first = (headroom.torch.SGD([weight], **options) for weight in weights)

    def step(weight, optimizer):
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    for _ in range(4):
        step(weights[0], whole)
    for _ in range(2):
        step(weights[1], first)
    second = headroom.torch.SGD([weights[1]], **options)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        step(weights[1], second)
    assert torch.equal(*weights)


def test_load_hooks_may_replace_the_state_dict():
    weight = make_bf16_weight()
    saved = make_stepped_optimizer(weight).state_dict()
    optimizer = headroom.torch.AdamW([weight])
    seen = []

    def double(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"].fill_(9.0)
        return state_dict

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[weight]["exp_avg"][0]))
    optimizer.load_state_dict(saved)
    assert seen == [9.0]


def test_two_scalers_of_one_optimizer_keep_separate_verdicts():
    weight = torch.ones(2, requires_grad=True)
    optimizer = headroom.torch.SGD([weight], lr=0.1)
    scalers = [headroom.torch.GradScaler(DEVICE, init_scale=4.0) for _ in range(2)]
    for scaler, value in zip(scalers, (INF, 1.0)):
        scaler.scale(weight.sum())
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
    for scaler in scalers:
        scaler.update()
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 4.0]
    assert [scaler.last_step_applied for scaler in scalers] == [False, True]
    assert [scaler.report().applied for scaler in scalers] == [False, True]


@pytest.mark.parametrize("scaler_class", [None, torch.amp.GradScaler, headroom.torch.GradScaler])
def test_optimizer_of_an_empty_shard_may_step(scaler_class):
    weight = torch.empty(0, requires_grad=True)
    optimizer = headroom.torch.AdamW([weight], max_norm=1.0)
    weight.grad = torch.empty(0)
    if scaler_class is None:
        optimizer.step()
        return
    scaler = scaler_class(DEVICE, init_scale=4.0)
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_state_dict_of_another_optimizer_class_is_refused():
    weight = make_bf16_weight()
    saved = headroom.torch.SGD([weight]).state_dict()
    optimizer = headroom.torch.AdamW([weight])
    with pytest.raises(headroom.Error, match="another kind of optimizer"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.usefixtures("move_detection")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_is_right_after_a_change_of_memory_format(dtype):
    layer = torch.nn.Conv2d(2, 3, 3).to(dtype)
    optimizer = headroom.torch.AdamW(layer.parameters(), lr=1e-2)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    layer.to(memory_format=torch.channels_last)
    after = optimizer.state_dict()["state"]
    for key, state in before.items():
        assert all(torch.equal(state[name], after[key][name]) for name in state)
    duplicate = copy.deepcopy(optimizer).state_dict()["state"]
    assert torch.equal(duplicate[0]["exp_avg"], before[0]["exp_avg"])


@pytest.mark.usefixtures("move_detection")
@pytest.mark.parametrize("move", [False, True])
def test_adding_a_group_does_not_hide_an_earlier_write(move):
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    with torch.no_grad():
        if move:
            weight.data = torch.full_like(weight, 6.0)
        weight.fill_(7.0)
    optimizer.add_param_group({"params": [make_bf16_weight()]})
    assert clone_master(optimizer).tolist() == [7.0, 7.0]
    with torch.no_grad():
        weight.fill_(3.0)
    assert clone_master(optimizer).tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("move_detection")
def test_saved_state_is_right_after_a_step_that_raised():
    weight, other = make_bf16_weight(), torch.ones(6, requires_grad=True)
    optimizer = headroom.torch.AdamW([weight, other])
    weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
    optimizer.step()
    weight.data = torch.full_like(weight, 7.0)
    other.data = other.data.reshape(2, 3)
    other.grad = None
    with pytest.raises(headroom.Error, match="had shape"):
        optimizer.step()
    saved = [copy.deepcopy(optimizer.state_dict()["state"]) for _ in range(2)]
    assert torch.equal(saved[0][0]["master"], saved[1][0]["master"])
    other.data = other.data.reshape(6)
    assert clone_master(optimizer).tolist() == [7.0, 7.0]
    optimizer.step()


def test_refresh_masters_refuses_freed_weights():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(headroom.Error, match="less memory"):
        optimizer.refresh_masters()
    assert optimizer.state_dict()["state"][0]["master"].tolist() != [0.0, 0.0]


def test_state_is_filled_without_calling_state_dict():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    assert set(optimizer.state[weight]) == {"step", "master", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weight]["step"] == 3
    optimizer.step()
    assert optimizer.state[weight]["step"] == 4  # torch.distributed.checkpoint reads `state` directly


def test_state_tensors_share_memory_with_the_optimizer():
    """Writing to a tensor of `state` changes the optimizer."""
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    optimizer.state[weight]["exp_avg"].zero_()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.0, 0.0]


def test_replaced_entries_of_state_are_taken_over():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    state = optimizer.state
    steps = int(state[weight]["step"])
    weight.grad = torch.zeros_like(weight)
    for turn in range(1, 3):  # `state` may be kept and written to again
        state[weight]["exp_avg_sq"] = torch.full((2,), 5.0)
        state[weight]["note"] = "a user's own"
        optimizer.step()
        assert torch.allclose(optimizer.state[weight]["exp_avg_sq"], torch.tensor(0.999 * 5.0))
        assert optimizer.state[weight]["step"] == steps + turn
        assert optimizer.state[weight]["note"] == "a user's own"
    optimizer.state[weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(headroom.Error, match="shape"):
        optimizer.step()


def test_removed_entries_of_state_begin_anew():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    optimizer.state.clear()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    fresh_weight = make_bf16_weight()
    fresh = headroom.torch.AdamW([fresh_weight], lr=0.1)
    fresh_weight.grad = torch.ones_like(fresh_weight)
    fresh.step()
    assert optimizer.state[weight]["step"] == 1
    assert torch.equal(optimizer.state[weight]["exp_avg"], fresh.state[fresh_weight]["exp_avg"])


@pytest.mark.usefixtures("move_detection")
def test_a_removed_entry_and_a_change_of_memory_format_before_one_step():
    def train(optimizer_class):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            if step == 2:
                del optimizer.state[model[1].bias]
                model.to(memory_format=torch.channels_last)
        return model[0].weight.detach(), optimizer.state[model[0].weight]["exp_avg"]

    for ours, theirs in zip(train(headroom.torch.AdamW), train(torch.optim.AdamW)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_state_that_was_read_before_a_change_of_memory_format_is_filled_again():
    weight = torch.randn(3, 4, 5, 5, requires_grad=True)
    optimizer, scaler = headroom.torch.AdamW([weight]), headroom.torch.GradScaler(DEVICE)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    expected = optimizer.state[weight]["exp_avg"].clone()
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    weight.grad = None
    scaler.scale((weight * 1.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(optimizer.state[weight]["exp_avg"], expected)


def test_a_failed_load_leaves_state_that_others_have_seen():
    weight = make_bf16_weight()
    optimizer = make_stepped_optimizer(weight)
    before = optimizer.state[weight]["exp_avg"].clone()
    bad = copy.deepcopy(optimizer.state_dict())
    bad["state"][0]["exp_avg"] = torch.zeros(5)
    with pytest.raises(headroom.Error, match="shape"):
        optimizer.load_state_dict(bad)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(optimizer.state[weight]["exp_avg"], 0.9 * before)


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="Gloo")
def test_zero_redundancy_optimizer_resumes_with_its_moments():
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).bfloat16()
        return model, ZeroRedundancyOptimizer(model.parameters(), headroom.torch.AdamW, lr=0.01)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4).bfloat16()).float().square().sum().backward()
            optimizer.step()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, optimizer = make()
        train(whole, optimizer, 20)
        model, optimizer = make()
        train(model, optimizer, 10)
        optimizer.consolidate_state_dict()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model, optimizer = make()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, 10)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters()))
    finally:
        dist.destroy_process_group()


def test_loading_state_leaves_weights_unchanged():
    saved = make_stepped_optimizer(make_bf16_weight()).state_dict()
    weight = make_bf16_weight([0.5, 0.25])  # for example an average of weights
    optimizer = headroom.torch.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert weight.tolist() == [0.5, 0.25]
    assert clone_master(optimizer).tolist() == [0.5, 0.25]


@pytest.mark.usefixtures("move_detection")
def test_groups_may_be_added_in_memory_of_freed_gradients():
    for _ in range(20):
        first = torch.nn.Linear(64, 64)
        optimizer = headroom.torch.SGD(first.parameters())
        first(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": torch.nn.Linear(64, 64).parameters()})


def test_scaler_keeps_no_optimizer_alive_and_ignores_stale_verdicts():
    class Gated(headroom.torch.SGD):
        open = True

        def step(self, closure=None):
            return super().step(closure) if self.open else None

    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = Gated([weight]), headroom.torch.GradScaler(DEVICE, init_scale=8.0)
    for value, expected in ((INF, 4.0), (1.0, 4.0), (1.0, 4.0)):
        scaler.scale(weight.sum())
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
        Gated.open = False
    Gated.open = True
    scaler.scale(weight.sum())
    scaler.step(optimizer)
    alive = weakref.ref(optimizer)
    scaler.update()
    del optimizer
    gc.collect()
    assert alive() is None


def test_torch_arguments_are_accepted_or_refused():
    weight = make_bf16_weight()
    headroom.torch.AdamW([weight], fused=True, foreach=None, capturable=False, amsgrad=False)
    with pytest.raises(headroom.Error, match="amsgrad"):
        headroom.torch.AdamW([weight], amsgrad=True)
    with pytest.raises(TypeError, match="'learning'"):
        headroom.torch.AdamW([weight], learning=1)
    for norm in (None, INF, -1, "1"):
        with pytest.raises(headroom.Error, match="max_norm"):
            headroom.torch.AdamW([weight], max_norm=norm)


def test_options_changed_in_place_take_effect():
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    betas = [0.9, 0.999]
    decay = torch.tensor(0.0)
    optimizers = [kind([weight], lr=0.1, betas=betas, weight_decay=decay)
                  for kind, weight in zip((torch.optim.AdamW, headroom.torch.AdamW), weights)]
    for optimizer in optimizers:
        optimizer.param_groups[0]["betas"] = betas
    for step in range(3):
        if step == 1:
            betas[0] = 0.0
            decay.fill_(0.5)
        for weight, optimizer in zip(weights, optimizers):
            weight.grad = torch.tensor([1.0, -1.0 - step])
            optimizer.step()
    torch.testing.assert_close(*weights)


def test_parameter_subclasses_are_stepped():
    class Named(torch.nn.Parameter):
        pass

    weight = Named(torch.ones(3))
    optimizer = headroom.torch.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [0.0] * 3


def test_step_counts_are_exact_for_any_default_dtype():
    weight = make_bf16_weight()
    optimizer = headroom.torch.SGD([weight], lr=0.0, momentum=0.9)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(257):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 257
        assert optimizer.state[weight]["step"].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_with_the_model(dtype):
    """As when an optimizer is made before ``model.to(device)``, or the model is moved later."""
    weights = []
    for moves in (False, True):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(64).to(dtype))
        optimizer = headroom.torch.AdamW([weight], lr=0.1)
        scaler = headroom.torch.GradScaler(DEVICE, init_scale=8.0)
        for step in range(4):
            if moves and step in (0, 2):
                if DEVICE == "cuda":
                    weight.data = weight.data.cpu().cuda()
                else:
                    weight.data = weight.data.clone()
                optimizer._device = torch.device("meta")  # another one than now
            weight.grad = None
            scaler.scale((weight * torch.arange(64.0).to(dtype)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step_applied
        weights.append(weight.tolist())
    assert weights[0] == weights[1]
