"""The state of the core's optimizers as ``torch.optim`` has it: ``state``, state dicts, copies and pickles."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from headroom._errors import Error, make
from headroom.torch._memory import increment_versions, like, local, placed_like, view_of

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class TorchState(torch.optim.Optimizer):
    """A base of FusedOptimizer. ``state`` has steps, and views of the core's memory; entries that others put into it,
    or remove, are taken over by the next step."""

    _core: Any
    _params: list[torch.Tensor]
    _layouts: list[tuple[Any, Any]]
    _buffers: tuple[str, ...]
    _precision: tuple[bool, bool, int, str]
    _changes: int
    _shown: dict[int, dict[str, Any]]  # what `state` was filled with, by parameter
    max_norm: float

    @property
    def _is_compact(self) -> bool:
        """Whether ``state`` has FP32 copies instead of the core's memory, which is in other formats."""
        return self._precision[3] != "full"

    def _forget_copies(self) -> None:
        """Frees the copies that ``state`` was filled with. State dicts that have them keep them."""
        state = self.__dict__["state"]
        for i, shown in self._shown.items():
            entries = state.pop(self._params[i], {})
            others = {name: value for name, value in entries.items() if shown.get(name) is not value}
            if others:
                state[self._params[i]] = others
        self._shown, self._published = {}, -1

    def _start_state(self) -> None:
        self._published = -1  # value of _changes when `state` was last filled
        self._shown = {}
        self._exposed = False  # others have seen `state`, and may have changed it
        self._loading: Any = None  # a state dict, while it is loaded

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state in torch's format: steps, and views of the core's memory."""
        if "_core" in self.__dict__:
            if self._changes != self._published:
                self._adopt()
                self._fill_state()
            self._exposed = True
        return self.__dict__["state"]

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._expose()
        self.__dict__["state"] = value

    def _expose(self) -> None:
        """Prepares for a new dictionary of others, so that the next step sees what is missing in it, too."""
        if self.__dict__.get("_params"):  # torch's constructor sets an empty one
            self._adopt()
            self._fill_state()
            self._exposed = True

    def _publish(self) -> None:
        """Fills ``state``, after updating masters from the present weights."""
        self._adopt()
        try:
            self._follow()
        except Error:
            pass  # weights cannot be read now: use the state of the last step
        self._fill_state()

    def _fill_state(self) -> None:
        self._published = self._changes
        steps, tensors = self._core.state()
        state, self._shown = self.__dict__["state"], {}
        for i, count in enumerate(steps):
            if count > 0:
                self._shown[i] = {"step": torch.tensor(float(count), dtype=torch.float32, device="cpu")}
        for label, memory, i in tensors:
            if steps[i] > 0:
                view = torch.from_dlpack(memory).as_strided(*self._layouts[i]).to(local(self._params[i]).device)
                self._shown[i][_torch_name(label)] = like(self._params[i], view)
        for i, param in enumerate(self._params):
            others = {name: value for name, value in state.pop(param, {}).items() if not self._is_ours(name)}
            if others or i in self._shown:
                state[param] = self._shown.get(i, {}) | others

    def _saved(self) -> list[dict[str, Any]]:
        """The entries of ``state``, with the steps of the core where nobody has replaced them."""
        steps, _ = self._core.state()
        saved = [dict(self.__dict__["state"].get(param) or {}) for param in self._params]
        for i, entries in enumerate(saved):
            if i in self._shown and entries.get("step") is self._shown[i]["step"]:
                entries["step"] = steps[i]
        return saved

    def _was_changed(self, i: int, param: torch.Tensor) -> bool:
        entries, shown = self.__dict__["state"].get(param, {}), self._shown.get(i, {})
        if any(entries.get(name) is not value for name, value in shown.items()):
            return True
        return not shown and any(map(self._is_ours, entries))

    def _is_ours(self, name: str) -> bool:
        return name in ("step", "master") or name in self._buffers

    @torch.no_grad()
    def _adopt(self) -> None:
        """Takes over entries of ``state`` that others have replaced or removed."""
        if not self._exposed or not any(self._was_changed(i, param) for i, param in enumerate(self._params)):
            return
        self._exposed = False
        try:
            self._take(self._saved())
        finally:
            self._fill_state()
            self._exposed = True

    def state_dict(self) -> dict[str, Any]:
        """Torch's format plus ``master``, the FP32 values of 16-bit weights."""
        self._publish()
        exposed = self._exposed
        try:
            return super().state_dict()
        finally:
            self._exposed = exposed
            if self._is_compact and not exposed:
                self._forget_copies()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads our state dict or that of torch's optimizer of the same name. Weights are unchanged; masters
        that are missing or do not round to the weights are set from them."""

        def keep_state(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            self._loading = given
            return {**given, "state": {}}  # torch would convert moments to 16 bits

        for mine, saved in zip(self.param_groups, state_dict["param_groups"]):
            names, theirs = mine.get("param_names"), saved.get("param_names")
            if names is not None and theirs is not None and list(map(_bare, names)) != list(map(_bare, theirs)):
                raise make("bad state", f"The saved state is of parameters {theirs}; this group has {names}. Moments are "
                           "taken over by place: list the parameters in the same order.")
        before = [dict(group) for group in self.param_groups]
        exposed, self._exposed = self._exposed, False
        last = self.register_load_state_dict_pre_hook(keep_state)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            if self._loading is not None:  # the state was not loaded
                for group, old in zip(self.param_groups, before):
                    group.clear()
                    group.update(old)
            raise
        finally:
            last.remove()
            self._loading = None
            self._fill_state()
            self._exposed = exposed

    def _take(self, saved: list[dict[str, Any]]) -> None:
        self._follow_groups()
        if any(local(param).stride() != stride for param, (_, stride) in zip(self._params, self._layouts)):
            saved = copy.deepcopy(saved)  # _show() permutes the core's memory, of which these may be views
        self._show()
        if not any(saved) and self._core.allocated() == 0:
            return  # there is no state yet, as Accelerate saves and loads it
        self._core.allocate(self._stream(self._params))
        _, tensors = self._core.state()
        steps: list[int] = []
        kept, loaded = [], []
        for state in saved:
            missing = [name for name in self._buffers if state.get(name) is None]
            is_adam = len(self._buffers) > 1
            if is_adam and missing and (len(missing) == 1 or state.get("step", 0) > 0):
                raise make("bad state", f"The saved state has no {missing[0]} for {self._labels[len(steps)]}; it is damaged "
                           "or that of another kind of optimizer.")
            steps.append(_steps_in(state, 0 if missing else 1, self._labels[len(steps)]))
        for label, _, i in tensors:
            param, name = self._params[i], _torch_name(label)
            value = saved[i].get(name)
            if value is None and name == "master":
                value = param
            memory = torch.zeros_like(local(param), dtype=torch.float32)
            if value is not None:
                if value.shape != param.shape:
                    raise make("bad state", f"The saved {label} has shape {tuple(value.shape)}; this "
                               f"parameter has {tuple(param.shape)}.")
                memory.copy_(local(placed_like(param, value)))
            kept.append(memory)
            loaded.append((label, view_of(memory), i))
        # The core writes masters to the weights. Restore the weights, which torch does not load here either;
        # masters that do not round to them are updated by the next step.
        weights = [(param, param.detach().clone()) for param in self._with_masters(self._params)]
        self._core.load_state(steps, loaded, self._stream(self._params))
        increment_versions(self._params)
        for param, values in weights:
            param.copy_(values)
        self._changes += 1

    def __getstate__(self) -> dict[str, Any]:
        self._publish()
        exposed = self._exposed
        state = super().__getstate__()
        self._exposed = exposed
        return {**state, "max_norm": self.max_norm, "_precision": self._precision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state and self.__dict__.get("_loading") is None:
            self._expose()
        super().__setstate__(state)
        given = self.__dict__.get("_loading")
        if given is not None:
            keys = [key for group in given["param_groups"] for key in group["params"]]
            self._take([given["state"].get(key, {}) for key in keys])
            self._loading = None
        if "_core" not in self.__dict__:  # unpickled or copied
            saved = self.__dict__["state"]
            self._start()
            for group in self.param_groups:
                self._add_to_core(group)
            with torch.no_grad():
                self._take([dict(saved.get(param, {})) for param in self._params])


def _steps_in(saved: dict[str, Any], otherwise: int, label: str) -> int:
    try:
        steps = int(saved.get("step", otherwise))
        if 0 <= steps < 2**63:
            return steps
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise make("bad state", f"The saved number of steps of {label} is {saved['step']!r}; it has to be an integer from 0 up.")


def _bare(name: str) -> str:
    """The name of a parameter without those of the wrappers around its modules: DDP, torch.compile, FSDP."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _torch_name(label: str) -> str:
    """The name in torch's state dict of a state tensor of the core, such as "w/momentum"."""
    name = label.rpartition("/")[2]
    return "momentum_buffer" if name == "momentum" else name
