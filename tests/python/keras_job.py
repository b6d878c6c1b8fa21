"""Trains with headroom.keras on one backend: keras_job.py BACKEND FOLDER. Prints one line for each promise that holds.

Keras takes its backend from the environment when it is imported, so that each backend needs a process of its own."""

import os
import pathlib
import sys
import warnings

os.environ["KERAS_BACKEND"] = sys.argv[1]

import keras  # noqa: E402
import numpy as np  # noqa: E402

import headroom  # noqa: E402
import headroom.keras  # noqa: E402

FOLDER = pathlib.Path(sys.argv[2])
STEPS, BATCH = 40, 16
BAD = {0, 1, 7, 20, 21, 22}  # steps with an inf in their data
INPUTS = np.random.default_rng(1).random((STEPS, BATCH, 2), np.float32)
TARGETS = INPUTS.prod(2, keepdims=True)
for step in BAD:
    INPUTS[step, 0, 0] = np.inf


def model_with(optimizer):
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(8, "relu"),
                              keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer, loss="mse")
    return model


def adam():
    return keras.optimizers.Adam(1e-2)


def train(model, steps=range(STEPS)):
    """Yields after every step."""
    for step in steps:
        model.train_on_batch(INPUTS[step], TARGETS[step])
        yield step


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def check_scales_follow_the_core():
    for preset in ("keras", "megatron", "mxnet"):
        policy = f"{preset}:growth_interval=3,init_scale=16"  # low enough for the good steps
        optimizer = headroom.keras.LossScaleOptimizer(adam(), policy)
        expected = headroom.ScaleState(policy)
        for step in train(model_with(optimizer)):
            expected.advance(step in BAD)
            assert optimizer.state == expected, (policy, step, optimizer.state.numbers, expected.numbers)
            assert float(optimizer.dynamic_scale) == expected.scale
        assert optimizer.state.skipped == len(BAD) and int(optimizer.iterations) == STEPS - len(BAD)


def check_headrooms_rule_follows_the_largest_gradient():
    optimizer = headroom.keras.LossScaleOptimizer(adam(), "headroom:init_scale=1")
    for _ in train(model_with(optimizer), [3, 4, 5]):
        pass
    assert optimizer.state.scale == 8.0  # doubles in every step while there is room
    optimizer = headroom.keras.LossScaleOptimizer(adam(), "headroom:grad_limit=0.01")
    for _ in train(model_with(optimizer), [3]):
        pass
    assert optimizer.state.scale == 65536.0  # gradients above the limit are of a wider format
    optimizer = headroom.keras.LossScaleOptimizer(adam(), "headroom:init_scale=4096,grad_limit=8192")
    for _ in train(model_with(optimizer), [3, 4]):
        pass
    assert optimizer.state.scale < 65536.0 and optimizer.state.skipped == 0


def check_weights_are_those_of_keras_own_optimizer():
    ours, theirs = model_with(headroom.keras.LossScaleOptimizer(adam())), model_with(
        keras.optimizers.LossScaleOptimizer(adam()))
    for _ in zip(train(ours), train(theirs)):
        assert equal(values(ours.weights), values(theirs.weights))
    assert float(ours.optimizer.dynamic_scale) == float(theirs.optimizer.dynamic_scale)


def check_a_skipped_step_changes_nothing():
    model = model_with(headroom.keras.LossScaleOptimizer(adam(), "headroom"))
    for _ in train(model, [2, 3]):
        pass
    inner = model.optimizer.inner_optimizer
    before = values(model.trainable_variables + inner.variables)
    for _ in train(model, [7]):
        pass
    assert equal(values(model.trainable_variables + inner.variables), before)
    for _ in train(model, [8]):
        pass
    assert not equal(values(model.trainable_variables + inner.variables), before)


def check_fit_runs():
    optimizer = headroom.keras.LossScaleOptimizer(adam(), "headroom")
    model = model_with(optimizer)
    model.fit(INPUTS.reshape(-1, 2), TARGETS.reshape(-1, 1), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert (optimizer.state.steps, optimizer.state.skipped) == (2 * STEPS, 2 * len(BAD))
    assert all(np.isfinite(each).all() for each in values(model.weights))


def check_saved_models_resume():
    whole = model_with(headroom.keras.LossScaleOptimizer(adam(), "headroom"))
    for _ in train(whole, range(25)):
        pass
    whole.save(FOLDER / "model.keras")
    again = keras.saving.load_model(FOLDER / "model.keras")
    assert type(again.optimizer) is headroom.keras.LossScaleOptimizer
    assert again.optimizer.state == whole.optimizer.state and again.optimizer.state.skipped == len(BAD)
    for _ in zip(train(whole, range(25, STEPS)), train(again, range(25, STEPS))):
        assert equal(values(whole.weights), values(again.weights))
        assert again.optimizer.state == whole.optimizer.state
    whole.save_weights(FOLDER / "ours.weights.h5")
    theirs = model_with(keras.optimizers.LossScaleOptimizer(adam()))
    for _ in train(theirs):
        pass
    theirs.save(FOLDER / "theirs.keras")


def check_impossible_saved_states_are_refused():
    optimizer = headroom.keras.LossScaleOptimizer(adam())
    for _ in train(model_with(optimizer), [3]):
        pass
    store = {}
    optimizer.save_own_variables(store)
    place = next(key for key, value in store.items() if np.shape(value) == (18,))
    words = np.array(store[place])
    words[:2] = np.array([0.0]).view(np.int32)  # a scale of 0
    store[place] = words
    try:
        optimizer.load_own_variables(store)
    except headroom.Error as error:
        assert "scale is 0" in str(error)
    else:
        raise AssertionError("a scale of 0 was loaded")
    assert optimizer.state.scale == float(optimizer.dynamic_scale) == 2.0**15


def check_gradients_that_overflow_when_unscaled_are_skipped():
    weight = keras.Variable(np.ones(2, np.float32))
    optimizer = headroom.keras.LossScaleOptimizer(keras.optimizers.SGD(1.0), "static:1e-30")
    optimizer.apply([keras.ops.convert_to_tensor(np.full(2, 1e20, np.float32))], [weight])
    assert equal(values([weight]), [np.ones(2)]) and optimizer.state.skipped == 1
    optimizer.apply([keras.ops.convert_to_tensor(np.full(2, 1e-30, np.float32))], [weight])
    assert equal(values([weight]), [np.zeros(2)]) and optimizer.state.skipped == 1


def check_alarms_are_warnings():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in train(model_with(headroom.keras.LossScaleOptimizer(adam(), "dynamic:init_scale=1")), [0, 1]):
            pass
    assert any("allows none smaller" in str(each.message) for each in seen)


def check_policies_that_fit_cannot_follow_are_refused():
    for policy in ("headroom-retry", "torch:on_overflow=throw"):
        try:
            headroom.keras.LossScaleOptimizer(adam(), policy)
        except headroom.Error as error:
            assert error.code == "unsupported"
        else:
            raise AssertionError(policy)


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name)
