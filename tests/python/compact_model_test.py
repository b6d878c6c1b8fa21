"""What headroom.AdamW stores with state="half" and "byte", compared with the NumPy model of the formats."""

import compact_model
import numpy as np
import pytest

import headroom

STATES = ("half", "byte")
COPIES = 1500  # of each group, to see the mean of rounding
NO_BETAS = (0.0, 0.0)  # the moments become the gradient and its square


def optimizer_of(count, state, betas=NO_BETAS, seed=1):
    weights, grads = np.zeros(count, np.float32), np.zeros(count, np.float32)
    options = dict(lr=1e-3, betas=betas, weight_decay=0.0, seed=seed, state=state)
    return headroom.AdamW({"w": (weights, grads)}, **options), grads


def moments_of(optimizer):
    tensors = optimizer.state()[1]
    return np.array(tensors["w/exp_avg"]), np.array(tensors["w/exp_avg_sq"])


def loaded(first, second, state, betas=NO_BETAS):
    optimizer, grads = optimizer_of(len(first), state, betas)
    optimizer.load_state([1], {"w/exp_avg": np.float32(first), "w/exp_avg_sq": np.float32(second)})
    return optimizer, grads


def whole_groups(values, top):
    """The values in groups of 31 with `top`, so that all groups have its exponent."""
    values = np.resize(values, -(-len(values) // 31) * 31).reshape(-1, 31)
    return np.hstack([values, np.full((len(values), 1), top)]).ravel()


def check_rounding(found, exact, state, moment, slack=1e-5):
    """Every element is one of its two neighbours, and the copies (rows) have the right mean."""
    below, above = compact_model.neighbours(exact, state, moment)
    size = np.abs(np.float64(found))
    assert np.all((size == below) | (size == above))
    signs = np.sign(exact) if moment == 1 else 1.0
    assert np.all((size == 0) | (np.sign(found) == signs))
    inside = (below < above) & (compact_model.limited(exact, state) == np.abs(exact))
    gap = np.where(inside, above - below, 1.0)
    share = np.where(inside, (np.abs(exact) - below) / gap, 0.0)[0]
    went_up = np.where(inside, (size - below) / gap, 0.0).mean(axis=0)
    sigma = np.sqrt(share * (1 - share) / len(found))
    assert np.all(np.abs(went_up - share) <= 6 * sigma + 6 / len(found) + slack)
    return inside


def first_moments(exact, state):
    """What a step stores for first moments of these values, in COPIES rows."""
    rows = np.tile(np.float32(exact), (COPIES, 1))
    optimizer, grads = optimizer_of(rows.size, state)
    grads[:] = rows.ravel()
    optimizer.apply()
    return moments_of(optimizer)[0].reshape(rows.shape), np.float64(rows)


def second_moments(second, state, beta2):
    """The same for second moments x beta2, from a loaded state."""
    rows = np.tile(np.float32(second), (COPIES, 1))
    optimizer, grads = loaded(np.zeros(rows.size), rows.ravel(), state, (0.0, beta2))
    start = moments_of(optimizer)[1]
    optimizer.apply()
    return moments_of(optimizer)[1].reshape(rows.shape), np.float64(np.float32(beta2) * start).reshape(rows.shape)


@pytest.mark.parametrize("moment, count", [(1, 128), (2, 256)])
def test_a_byte_has_as_many_numbers_as_codes(moment, count):
    all_numbers = compact_model.numbers("byte", moment, 3)
    assert len(np.unique(all_numbers)) == count
    assert np.all(compact_model.storable(whole_groups(all_numbers, all_numbers.max()), "byte", moment))


@pytest.mark.parametrize("exponent", [-109, -60, -1, 0, 30, 125])
def test_every_number_of_a_byte_is_stored_exactly(exponent):
    first = compact_model.numbers("byte", 1, exponent)
    first = whole_groups(np.concatenate([first, -first]), first.max())
    second = compact_model.numbers("byte", 2, max(exponent, -95))
    second = np.resize(whole_groups(second, second.max()), len(first))
    optimizer, grads = loaded(first, second, "byte")
    assert np.array_equal(moments_of(optimizer), np.float32([first, second]))
    if exponent > -60:  # the same after a step that halves them: all numbers are of the next exponent
        optimizer, grads = loaded(first, second, "byte", (0.5, 0.5))
        optimizer.apply()
        halved = moments_of(optimizer)
        assert np.array_equal(halved, np.float32([first / 2, second / 2]))


def test_every_finite_bf16_is_stored_exactly_in_half():
    first = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    first = first[np.isfinite(first)]
    optimizer, _ = loaded(first, np.abs(first), "half")
    assert np.array_equal(moments_of(optimizer), [first, np.abs(first)])


@pytest.mark.parametrize("state", STATES)
def test_loading_rounds_to_nearest(state):
    random = np.random.default_rng(1)
    values = np.float32(random.normal(size=64000) * np.exp2(random.integers(-40, 20, 64000)))
    for moment, found in enumerate(moments_of(loaded(values, np.abs(values), state)[0]), 1):
        below, above = compact_model.neighbours(values, state, moment)
        exact, size = np.abs(np.float64(values)), np.abs(np.float64(found))
        nearest = np.where(exact - below < above - exact, below, above)
        assert np.array_equal(size, nearest)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("exponent", [-109, -20, 0, 100])
def test_first_moments_round_to_a_neighbour_with_the_right_mean(state, exponent):
    numbers = compact_model.numbers("byte", 1, exponent)
    gaps = np.diff(numbers)
    between = [numbers[:-1] + part * gaps for part in (0.01, 0.3, 0.5, 0.97)]
    exact = whole_groups(np.concatenate([*between, -between[1]]), 1.875 * 2.0**exponent)
    found, exact = first_moments(exact, state)
    inside = check_rounding(found, exact, state, 1)
    assert inside.mean() > (0.9 if state == "byte" else 0.5)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("exponent", [-95, -20, 0, 100])
def test_second_moments_round_to_a_neighbour_with_the_right_mean(state, exponent):
    numbers = compact_model.numbers("byte", 2, exponent)
    for beta2 in (0.999, 0.9, 0.5):
        found, exact = second_moments(whole_groups(numbers, numbers.max()), state, beta2)
        check_rounding(found, exact, state, 2)


@pytest.mark.parametrize("state", STATES)
def test_subnormal_values_and_empty_groups(state):
    tiny = np.exp2(np.arange(-149.0, -118.0)) * 1.25
    exact = np.concatenate([np.zeros(32), whole_groups(tiny, 2.0**-118), whole_groups(-tiny, 0.0),
                            whole_groups(np.zeros(31), 1.0)])
    found, rows = first_moments(exact, state)
    check_rounding(found, np.float64(np.float32(rows)), state, 1)
    assert not found[:, :32].any() and not found[:, 96:-1].any()
    found, rows = second_moments(np.abs(exact), state, 0.5)
    check_rounding(found, rows, state, 2)
    assert not found[:, :32].any()
    zeros_beside_one = found[:, 96:-1]
    assert np.all(zeros_beside_one == (0.0 if state == "half" else 2.0**-32))


@pytest.mark.parametrize("state", STATES)
def test_huge_values_inf_and_nan_are_stored_as_large_numbers(state):
    bad = np.array([np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38, 2.0**126, 2.0**127, 1.0, 0.0, 1e-30] * 3)[:32]
    with np.errstate(invalid="ignore"):
        found, exact = first_moments(bad, state)
        optimizer, grads = optimizer_of(len(bad), state)
        grads[:] = bad
    for _ in range(5):  # in the next steps too
        optimizer.apply()
        for moment, values in enumerate(moments_of(optimizer), 1):
            assert np.all(np.isfinite(values))
            assert np.all(compact_model.storable(values, state, moment))
    assert np.all(np.isfinite(found))
    below, above = compact_model.neighbours(exact, state, 1)
    size = np.abs(np.float64(found))
    assert np.all((size == below) | (size == above))
    largest = ~np.isfinite(exact) | (np.abs(exact) >= 2.0**127 * 1.999)
    assert np.all(size[largest] == compact_model.LARGEST[state])


@pytest.mark.parametrize("state", STATES)
def test_random_training_stores_numbers_of_the_format(state):
    random = np.random.default_rng(7)
    optimizer, grads = optimizer_of(64 * 32, state, (0.9, 0.999))
    for _ in range(50):
        grads[:] = random.normal(size=len(grads)) * np.exp2(random.integers(-30, 10, len(grads)))
        before = moments_of(optimizer)
        optimizer.apply()
        after = moments_of(optimizer)
        rest1, rest2 = np.float32(1 - 0.9), np.float32(1 - 0.999)
        exact = (before[0] + rest1 * (grads - before[0]), np.float32(0.999) * before[1] + rest2 * (grads * grads))
        for moment, (stored, value) in enumerate(zip(after, exact), 1):
            below, above = compact_model.neighbours(value, state, moment)
            size = np.abs(np.float64(stored))
            assert np.all((size == below) | (size == above))
            assert np.all(compact_model.storable(stored, state, moment))
