"""headroom.torch.AdamW and SGD: weights that others write to, states that others load and look at."""

import copy
import gc
import weakref

import pytest
import torch

import headroom
import headroom.torch

DEVICE = torch.get_default_device().type

INF = float("inf")


def half_weight(values=(1.0, 2.0)):
    return torch.tensor(values, dtype=torch.bfloat16).requires_grad_()


def stepped(weight, **options):
    optimizer = headroom.torch.AdamW([weight], lr=1e-4, weight_decay=0.0, **options)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


def master_of(optimizer, index=0):
    return optimizer.state_dict()["state"][index]["master"].clone()


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("write", ["copy", "data", "same place"])
def test_what_is_saved_has_the_weights_as_they_are(write):
    weight = half_weight()
    optimizer = stepped(weight)
    new = torch.tensor([7.0, 8.0], dtype=torch.bfloat16)
    with torch.no_grad():
        if write == "copy":
            weight.copy_(new)
        elif write == "data":
            weight.data = new.clone()
        else:  # whose memory the next tensor would get, were the old one gone
            weight.data = weight.data.float()
            weight.data = new.clone()
    assert master_of(optimizer).tolist() == [7.0, 8.0]
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["params"][0].tolist() == [7.0, 8.0]
    other = half_weight([7.0, 8.0])
    loaded = headroom.torch.AdamW([other])
    loaded.load_state_dict(optimizer.state_dict())
    assert other.tolist() == [7.0, 8.0]


@pytest.mark.usefixtures("looking")
def test_weights_that_were_swapped_out_and_back_keep_their_masters():
    weight = half_weight()
    optimizer = stepped(weight)
    exact = master_of(optimizer)
    assert exact.tolist() != weight.tolist()
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(5.0)
        weight.copy_(kept)
    assert torch.equal(master_of(optimizer), exact)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = half_weight([0.0, 0.0])
    resumed = headroom.torch.AdamW([fresh])
    resumed.load_state_dict(saved)  # the optimizer first, the model then
    with torch.no_grad():
        fresh.copy_(kept)
    assert torch.equal(master_of(resumed), exact)


def test_writes_that_torch_does_not_count_are_taken_when_asked():
    weight = half_weight()
    optimizer = stepped(weight)
    weight.data.clamp_(-0.5, 0.5)
    optimizer.refresh_masters()
    assert master_of(optimizer).tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("looking")
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


def test_random_rounding_goes_on_without_any_buffer():
    weights = [half_weight([1.0] * 100) for _ in range(2)]
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


def test_hooks_see_and_change_what_is_loaded():
    weight = half_weight()
    saved = stepped(weight).state_dict()
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


def test_two_scalers_of_one_optimizer_keep_apart_what_they_found():
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
    assert scalers[1].report().applied
    with pytest.raises(RuntimeError, match="stepped by others"):
        scalers[0].report()


@pytest.mark.parametrize("scaler_class", [None, torch.amp.GradScaler, headroom.torch.GradScaler])
def test_a_rank_whose_shard_is_empty_may_step(scaler_class):
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


def test_a_state_dict_of_another_kind_of_optimizer_is_refused():
    weight = half_weight()
    saved = headroom.torch.SGD([weight]).state_dict()
    optimizer = headroom.torch.AdamW([weight])
    with pytest.raises(headroom.Error, match="another kind of optimizer"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_right_after_a_change_of_memory_format(dtype):
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


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("move", [False, True])
def test_a_group_added_after_a_write_does_not_hide_it(move):
    weight = half_weight()
    optimizer = stepped(weight)
    with torch.no_grad():
        if move:
            weight.data = torch.full_like(weight, 6.0)
        weight.fill_(7.0)
    optimizer.add_param_group({"params": [half_weight()]})
    assert master_of(optimizer).tolist() == [7.0, 7.0]
    with torch.no_grad():
        weight.fill_(3.0)
    assert master_of(optimizer).tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("looking")
def test_what_is_saved_after_a_step_that_raised():
    weight, other = half_weight(), torch.ones(6, requires_grad=True)
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
    assert master_of(optimizer).tolist() == [7.0, 7.0]
    optimizer.step()


def test_masters_are_not_refreshed_from_memory_that_is_gone():
    weight = half_weight()
    optimizer = stepped(weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(headroom.Error, match="less memory"):
        optimizer.refresh_masters()
    assert optimizer.state_dict()["state"][0]["master"].tolist() != [0.0, 0.0]


def test_state_is_there_without_a_state_dict():
    weight = half_weight()
    optimizer = stepped(weight)
    assert set(optimizer.state[weight]) == {"step", "master", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weight]["step"] == 3
    optimizer.step()
    assert optimizer.state[weight]["step"] == 4  # helpers of torch.distributed.checkpoint look there


def test_tensors_of_state_are_the_optimizers_memory_and_its_entries_are_not():
    """As docs/python.md says."""
    weight = half_weight()
    optimizer = stepped(weight)
    optimizer.state[weight]["exp_avg"].zero_()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.0, 0.0]
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    optimizer.state[weight]["exp_avg_sq"] = torch.full((2,), 5.0)
    optimizer.state.clear()
    optimizer.step()
    assert torch.allclose(optimizer.state[weight]["exp_avg_sq"], 0.999 * before)


def test_loading_leaves_the_weights_to_the_model():
    saved = stepped(half_weight()).state_dict()
    weight = half_weight([0.5, 0.25])  # an average, or the best so far
    optimizer = headroom.torch.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert weight.tolist() == [0.5, 0.25]
    assert master_of(optimizer).tolist() == [0.5, 0.25]


@pytest.mark.usefixtures("looking")
def test_groups_may_be_added_where_gradients_were():
    for _ in range(20):
        first = torch.nn.Linear(64, 64)
        optimizer = headroom.torch.SGD(first.parameters())
        first(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": torch.nn.Linear(64, 64).parameters()})


def test_a_scaler_does_not_keep_an_optimizer_alive_and_believes_no_old_flag():
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


def test_torchs_own_arguments():
    weight = half_weight()
    headroom.torch.AdamW([weight], fused=True, foreach=None, capturable=False, amsgrad=False)
    with pytest.raises(headroom.Error, match="amsgrad"):
        headroom.torch.AdamW([weight], amsgrad=True)
    with pytest.raises(TypeError, match="'learning'"):
        headroom.torch.AdamW([weight], learning=1)
    for norm in (None, INF, -1, "1"):
        with pytest.raises(headroom.Error, match="max_norm"):
            headroom.torch.AdamW([weight], max_norm=norm)


def test_options_changed_in_place_are_noticed():
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


def test_subclasses_of_parameters_that_have_their_memory():
    class Named(torch.nn.Parameter):
        pass

    weight = Named(torch.ones(3))
    optimizer = headroom.torch.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [0.0] * 3


def test_step_counts_are_exact_whatever_the_default_type():
    weight = half_weight()
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
