"""The formats of compact state as docs/state.md describes them, in NumPy: which numbers each can store, and between which two a
value is rounded. Written without the code of src/apply/, in double arithmetic."""

import numpy as np

GROUP = 32
LARGEST = {"byte": 2.0**126, "half": (2.0 - 2.0**-7) * 2.0**127}


def exponents(values):
    """e with 2^e <= value < 2^(e + 1); -2000 for 0."""
    return np.where(values == 0, -2000, np.frexp(values)[1] - 1)


def limited(values, state):
    """Magnitudes; those beyond the largest number, inf and NaN count as that."""
    return np.fmin(np.nan_to_num(np.abs(np.float64(values)), nan=np.inf, posinf=np.inf), LARGEST[state])


def group_exponents(values):
    """For each element that of the power of two which its group of 32 counts from: the largest one's, or the next if the
    largest is beyond 4 significant bits below that."""
    largest = values.reshape(-1, GROUP).max(axis=1, keepdims=True)
    exponent = exponents(largest)
    exponent += largest > 1.875 * np.exp2(exponent)
    return np.broadcast_to(exponent, (len(exponent), GROUP)).reshape(values.shape)


def neighbours(values, state, moment):
    """The stored magnitudes below and above each value; equal if the value can be stored. ``values`` has whole groups."""
    size = limited(values, state)
    lowest = 0.0
    if state == "half":
        unit = np.exp2(np.maximum(exponents(size), -126) - 7)
    else:
        group = group_exponents(size)
        if moment == 1:  # 4 significant bits down to 2^-14 of the group, multiples of 2^-17 of it below
            unit = np.exp2(np.maximum(exponents(size), np.maximum(group, -109) - 14) - 3)
        else:  # 4 significant bits down to 2^-31 of the group, which stands for everything below
            lowest = np.where(group == -2000, 0.0, np.exp2(np.maximum(group, -95) - 31.0))
            unit = np.exp2(np.maximum(exponents(size), exponents(lowest)) - 3)
            unit[group == -2000] = 1.0  # an empty group has only zeros
    below = np.floor(size / unit) * unit
    above = np.where(below == size, below, np.minimum(below + unit, LARGEST[state]))
    return np.maximum(below, lowest), np.maximum(above, lowest)


def numbers(state, moment, exponent):
    """All magnitudes that a group with this exponent can store."""
    mantissas = 1 + np.arange(8) / 8
    if moment == 1:
        normal = np.outer(np.exp2(np.arange(exponent - 14, exponent + 1.0)), mantissas).ravel()
        return np.concatenate([np.arange(8) * 2.0 ** (exponent - 17), normal])
    return np.outer(np.exp2(np.arange(exponent - 31, exponent + 1.0)), mantissas).ravel()


def storable(values, state, moment):
    """Whether a state can have these values, in whole groups."""
    below, _ = neighbours(values, state, moment)
    return np.isfinite(values) & (below == np.abs(np.float64(values)))
