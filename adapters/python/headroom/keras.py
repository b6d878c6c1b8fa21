"""Headroom in Keras 3, on the torch and the JAX backend.

    optimizer = headroom.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), policy="headroom")
    model.compile(optimizer, loss="mse")   # with keras.mixed_precision.set_global_policy("mixed_float16")
    model.fit(x, y)
    print(optimizer.state)
"""

from __future__ import annotations

import warnings
from typing import Any, Union

import keras
import numpy as np
from keras import ops

from headroom._core import ScalePolicy, ScaleState
from headroom._errors import Error, make
from headroom._layouts import clean_steps, pack, unpack
from headroom._plug import policy_for
from headroom._scaler import measure

__all__ = ["LossScaleOptimizer"]


@keras.saving.register_keras_serializable("headroom")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras' ``LossScaleOptimizer`` with any policy that does not retry.

    Whether a step is applied and how the scale moves is decided by Headroom's core on the host. On the torch
    backend it measures the gradients, too. On JAX a compiled train step measures them on the device and calls
    the core with two numbers. A skipped step leaves weights and the inner optimizer unchanged. When scaling cannot
    help, a RuntimeWarning says so. The state is an optimizer variable: models and checkpoints contain it."""

    def __init__(self, inner_optimizer: Any, policy: Union[ScalePolicy, str] = "keras", name: Any = None) -> None:
        if keras.backend.backend() not in ("torch", "jax"):
            raise make("unsupported", f"headroom.keras works on the torch and jax backends, and not on "
                       f"{keras.backend.backend()}.")
        start = ScaleState(policy_for("Keras", policy))
        super().__init__(inner_optimizer, initial_scale=start.scale, name=name)
        self._start = start

    @property
    def policy(self) -> ScalePolicy:
        return self._start.policy

    @property
    def state(self) -> ScaleState:
        """Policy, scale and counts: ``optimizer.state.scale``, ``.steps``, ``.skipped``. On JAX, ``fit()`` writes
        variables at the end of an epoch; before, call ``model.jax_state_sync()``."""
        return unpack(self.policy, ops.convert_to_numpy(self.scale_state).tolist()) if self.built else self._start

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        start = pack(self._start)
        self.scale_state = self.add_variable(
            shape=(len(start),), dtype="int32", aggregation="none", name="scale_state",
            initializer=lambda shape, dtype: ops.convert_to_tensor(start, dtype))

    def _decide(self, finite: Any, amax: Any, packed: Any) -> tuple[Any, ...]:
        """Whether to apply the step, and the next scale, count of clean steps and state. A pure function."""
        state = unpack(self.policy, np.asarray(packed).tolist())
        applies = state.applies(bool(finite), float(amax))
        alarm = state.advance(not applies, float(amax))
        if alarm is not None:
            warnings.warn(str(alarm), RuntimeWarning, stacklevel=2)
        return np.bool_(applies), np.float32(state.scale), np.int32(clean_steps(state)), np.array(pack(state), np.int32)

    def _advance(self, grads: Any) -> tuple[Any, ...]:
        """What _decide() says about these gradients. On JAX they may be those of a compiled step."""
        grads = [grad for grad in grads if grad is not None]
        if keras.backend.backend() == "torch":
            stats = measure([grad.contiguous() for grad in grads])
            return self._decide(stats.finite, stats.amax, ops.convert_to_numpy(self.scale_state))
        import jax

        largest = [ops.max(ops.where(ops.isfinite(grad), ops.abs(grad), 0), initial=0) for grad in grads]
        amax = ops.max(ops.stack([ops.cast(each, "float32") for each in [0.0, *largest]]))
        results = tuple(jax.ShapeDtypeStruct(np.shape(each), each.dtype)
                        for each in self._decide(True, 0.0, pack(self._start)))
        return jax.pure_callback(self._decide, results, self.check_finite(grads), amax, self.scale_state.value)

    def _unscaled(self, grads: Any, variables: Any) -> list[Any]:
        return [grad if grad is None or self._overwrite_variable_with_gradient(variable)
                else ops.divide(grad, self.dynamic_scale) for grad, variable in zip(grads, variables)]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        variables = trainable_variables or self._trainable_variables
        applies, scale, clean, packed = self._advance(grads)
        if applies:
            self.inner_optimizer.apply(self._unscaled(grads, variables), trainable_variables)
        self._assign(scale, clean, packed)

    def _assign(self, scale: Any, clean: Any, packed: Any) -> None:
        self.dynamic_scale.assign(scale)
        self.step_counter.assign(clean)
        self.scale_state.assign(packed)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        if not self.built:
            raise ValueError("The optimizer has no variables yet; call optimizer.build(trainable_variables) first.")
        inner = list(optimizer_variables[len(self._variables):])
        with keras.StatelessScope(state_mapping=list(zip(self.variables, optimizer_variables))) as scope:
            applies, *following = self._advance(grads)
            unscaled = self._unscaled(grads, self._trainable_variables)
            self._assign(*following)
        own = [scope.get_current_value(variable) for variable in self._variables]
        weights, inner = ops.cond(
            applies,
            lambda: self.inner_optimizer.stateless_apply(inner, unscaled, trainable_variables),
            lambda: (list(trainable_variables), inner))
        return weights, own + list(inner)

    def load_own_variables(self, store: Any) -> None:
        """Raises headroom.Error, with the scale at its start, if the saved state is impossible."""
        super().load_own_variables(store)
        try:
            state = self.state
        except Error:
            self._assign(self._start.scale, 0, pack(self._start))
            raise
        self._assign(state.scale, clean_steps(state), pack(state))

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "policy": str(self.policy)}
