"""Follows one forward and backward pass operation by operation, and measures every result on its device.

A TorchFunctionMode sees each call of the torch API after autograd has recorded it: its name, its inputs and its
result. A hook on the result measures the gradient that backward brings. The mode is off during backward, so that
activations which are computed again there (checkpointing) do not appear twice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch.overrides import TorchFunctionMode

from headroom import _core
from headroom.torch._memory import _CODES, View, local, stream_of, tensor_reader, view_of

# RangeSource
OPERATION, INPUT, PARAMETER, CONSTANT = range(4)

# Operations whose results hold elements of their first argument, or elements that are no larger: they cannot be
# the first to leave the range. Their results share the row of that argument.
_SHARING = frozenset(
    "view view_as reshape reshape_as transpose permute swapaxes swapdims movedim moveaxis expand expand_as unsqueeze "
    "squeeze flatten unflatten ravel contiguous detach detach_ chunk split split_with_sizes tensor_split unbind narrow "
    "select __getitem__ t alias clone index_select gather repeat repeat_interleave flip roll diagonal unfold "
    "as_strided requires_grad_ pin_memory tanh sigmoid relu relu_ relu6 gelu silu mish hardswish rot90 take_along_dim topk "
    "sort".split()
)
_CASTS = frozenset("to float half double bfloat16 type type_as cpu cuda".split())
_PRODUCTS = frozenset("mul mul_ multiply __mul__ __rmul__ __imul__".split())
_QUOTIENTS = frozenset("div div_ divide true_divide __div__ __truediv__ __itruediv__".split())
_VIEWING = frozenset("T mT H mH data real".split())  # attributes
_PLAIN_NAMES = {"__rdiv__": "div", "__rsub__": "sub", "__rpow__": "pow", "__rmod__": "remainder",
                "__rmatmul__": "matmul", "__setitem__": "setitem"}
# Backward hands the gradient on as it is: not a suspect where a gradient is the sum of several.
_ADDING = frozenset("add add_ sub sub_ cat stack sum mean".split())

_FULL, _UNREADABLE = -1, -2  # instead of a row: the table has no room, or the tensor no memory that can be read
_SHARE, _CAST, _PRODUCT, _QUOTIENT, _SHARE_END, _FILL, _SET, _IGNORE, _PLAIN = range(9)
_TENSOR = torch.Tensor


class Op:
    """An operation, parameter or input of the watched pass."""

    __slots__ = ("consumers", "grad_place", "inputs", "module", "operation", "place", "source", "tensor", "trace", "types")

    def __init__(self, trace: Trace, module: str, operation: str, tensor: str, source: int, inputs: list[Op]) -> None:
        self.trace = trace
        self.module = module
        self.operation = operation
        self.tensor = tensor
        self.source = source
        self.inputs = inputs
        self.consumers: list[Op] = []
        self.place = self.grad_place = -1  # in the order of the program
        self.types = [2, 2]  # of the result and of its gradient
        for op in inputs:
            op.consumers.append(self)


@functools.cache
def _kind_of(func: Any) -> tuple[int, str]:
    """What to do with the result of a function, and its name in reports."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return _SHARE if getattr(func.__self__, "__name__", "") in _VIEWING else _IGNORE, name
    if _core.fills_constants(name):  # may be infinite on purpose
        return _FILL, name
    kinds = ((_SHARING, _SHARE), (_CASTS, _CAST), (_PRODUCTS, _PRODUCT), (_QUOTIENTS, _QUOTIENT),
             ({"__setitem__"}, _SET))
    kind = next((kind for names, kind in kinds if name in names), _PLAIN)
    return kind, _PLAIN_NAMES.get(name) or name.strip("_") or name


class Trace(TorchFunctionMode):
    """The operations of one watched step."""

    def __init__(self, table: _core.RangeTable, modules: dict[str, torch.nn.Module], shards: bool) -> None:
        """``shards``: processes share the parameters or their gradients, whose memory changes during the step."""
        super().__init__()
        self._table = table
        # The module that a parameter or buffer belongs to, and its name there, by id.
        self._owners = {id(value): (module, key) for module, owner in modules.items()
                        for key, value in (*owner._parameters.items(), *owner._buffers.items())}
        self._inputs: dict[int, str] = {}  # names of the model's arguments, by id
        self._known: dict[int, Op] = {}  # parameters, buffers and inputs that were used, by id
        self._kept: list[torch.Tensor] = []
        self._marked: list[weakref.ref[torch.Tensor]] = []
        self._places: list[tuple[Op, bool]] = []  # what was computed, and whether in backward, in program order
        self._rows: list[int] = []  # of the table, for each place; below 0: not measured
        self._parameters: list[tuple[Op, torch.Tensor]] = []  # that are measured together
        self._awaited: list[tuple[Op, torch.Tensor]] = []  # whose gradients are, after backward
        self._reader = tensor_reader()
        self._may_wait = not shards
        self._hooks: list[Any] = []
        self.modules: list[tuple[str, Any]] = []  # that are running, outermost first
        self.active = True
        self.paused = False  # while FSDP gathers parameters

    def name_inputs(self, names: Iterable[tuple[str, Any]]) -> None:
        self._inputs.update((id(value), name) for name, value in names)

    # Forward.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, name = _kind_of(func)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not self.paused and kind != _IGNORE and (kind == _SET or isinstance(result, (_TENSOR, tuple, list))):
            self._follow(kind, name, args, kwargs, result)
        return result

    def _follow(self, kind: int, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if kind == _SET:
            result = args[0]
        if isinstance(result, _TENSOR):
            if result.dtype not in _CODES:
                return
            results = (result,)
        else:
            results = tuple(t for t in result if isinstance(t, _TENSOR) and t.dtype in _CODES)
        if kind < _SHARE_END and results and _shares(kind, args, result):
            op = self._op_of(args[0])
            if op is not None:
                for tensor in results:
                    self._mark(tensor, op)
                return
        inputs = [op for op in map(self._op_of, _tensors(args, kwargs)) if op is not None]
        module = self.modules[-1][0] if self.modules else ""
        source = CONSTANT if kind == _FILL else OPERATION
        for tensor in results:
            op = Op(self, module, name, "", source, inputs)
            self._mark(tensor, op)
            if source == OPERATION or inputs:
                self._measure(tensor, op)

    def _mark(self, tensor: torch.Tensor, op: Op) -> None:
        if type(tensor) is not torch.nn.Parameter:  # which outlives the trace
            tensor._headroom_op = op  # type: ignore[attr-defined]
            self._marked.append(weakref.ref(tensor))

    def _measure(self, tensor: torch.Tensor, op: Op) -> None:
        """Measures a result now and its gradient when backward brings it. Parameters stay as they are until
        backward is done, and are measured then, by one call."""
        if op.source == PARAMETER and self._may_wait:
            op.place = self._add(op, False, tensor, _UNREADABLE)
            self._parameters.append((op, tensor))
            return
        op.place = self._measured(tensor, op, False)
        node = tensor.grad_fn
        if node is not None:  # a hook of the node takes a tenth of the time that one of the tensor takes
            node.register_prehook(functools.partial(self._gradients, op, tensor.output_nr))
        elif tensor.requires_grad:
            self._hook_leaf(op, tensor)

    def _hook_leaf(self, op: Op, leaf: torch.Tensor) -> None:
        """The hooks of a leaf outlive the graph: stop() removes this one."""
        self._hooks.append(leaf.register_hook(functools.partial(self._gradient, op)))

    def _op_of(self, tensor: Any) -> Optional[Op]:
        """The operation that computed a tensor. Others are measured when they are first used: parameters,
        inputs, and results of autograd functions, which the mode does not see."""
        op = getattr(tensor, "_headroom_op", None) or self._known.get(id(tensor))
        if op is None or op.trace is not self:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _CODES:
                return None
            op = self._source(tensor)
        if op.place < 0 and op.source != OPERATION:
            self._measure(tensor, op)
        return op

    def _source(self, tensor: torch.Tensor) -> Op:
        module = self.modules[-1][0] if self.modules else ""
        if tensor.grad_fn is not None:
            op = Op(self, module, tensor.grad_fn.name().removesuffix("Backward"), "", OPERATION, [])
            self._mark(tensor, op)
            self._measure(tensor, op)
            return op
        owner, name = self._owner_of(tensor)
        if name and isinstance(tensor, torch.nn.Parameter):
            op = Op(self, owner, "", name, PARAMETER, [])
        elif name:
            op = Op(self, owner, f"buffer {name}", name, CONSTANT, [])
        else:
            op = Op(self, module, "", self._inputs.get(id(tensor), "from outside"), INPUT, [])
        self._known[id(tensor)] = op
        self._kept.append(tensor)  # the id must not be given to another tensor
        return op

    def _owner_of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """The module that a parameter or buffer belongs to, and its name there; empty for other tensors. Looks into
        the running module as well: FSDP's parameters are others outside of forward."""
        if id(tensor) in self._inputs:
            return "", ""
        found = self._owners.get(id(tensor))
        if found is None and self.modules:
            name, module = self.modules[-1]
            for key, value in (*module._parameters.items(), *module._buffers.items()):
                if value is tensor:
                    return name, key
        return found or ("", "")

    # Backward.

    def _gradients(self, op: Op, index: int, grads: tuple[Optional[torch.Tensor], ...]) -> None:
        grad = grads[index]
        if grad is not None:
            self._gradient(op, grad)

    def _gradient(self, op: Op, grad: torch.Tensor) -> None:
        if self.active:
            op.grad_place = self._measured(grad, op, True)

    # Measuring.

    def _add(self, op: Op, backward: bool, tensor: torch.Tensor, row: int) -> int:
        """The next place in the order of the program."""
        op.types[backward] = _CODES[tensor.dtype]
        self._places.append((op, backward))
        self._rows.append(row)
        return len(self._rows) - 1

    def _measured(self, tensor: torch.Tensor, op: Op, backward: bool) -> int:
        row = _UNREADABLE if self._reader is None else self._table.measure_one(self._reader, tensor)
        return self._add(op, backward, tensor, self._measure_slowly(tensor) if row == _UNREADABLE else row)

    def _measure_all(self, tensors: list[tuple[int, torch.Tensor]]) -> None:
        """Of tensors that have their places already."""
        rows = ([_UNREADABLE] * len(tensors) if self._reader is None
                else self._table.measure_all(self._reader, [tensor for _, tensor in tensors]))
        for (place, tensor), row in zip(tensors, rows):
            self._rows[place] = self._measure_slowly(tensor) if row == _UNREADABLE else row

    def _measure_slowly(self, tensor: torch.Tensor) -> int:
        """For tensors that the reader does not know: wrappers of others, elements that are not in order."""
        try:
            view = _view(tensor)
        except RuntimeError:  # no memory of its own, as inside of vmap
            view = None
        if view is None:
            return _UNREADABLE
        return self._table.measure(view, stream_of(tensor.device) if view[3] >= 0 else 0)

    def end_forward(self) -> None:
        """Parameters, and gradients that become ``parameter.grad``, are measured after backward, when the host has
        time. Others are measured now, and their gradients when backward brings them: those that are added to
        ``parameter.grad``, or leave it at once."""
        now = []
        for op, parameter in self._parameters:
            if parameter.grad is None and not getattr(parameter, "_post_accumulate_grad_hooks", None):
                self._awaited.append((op, parameter))
                continue
            now.append((op.place, parameter))
            if parameter.requires_grad:
                self._hook_leaf(op, parameter)
        self._measure_all(now)
        self._parameters.clear()

    def _measure_awaited(self) -> None:
        measured = [(op.place, parameter) for op, parameter in self._awaited]
        for op, parameter in self._awaited:
            if parameter.grad is not None:
                op.grad_place = self._add(op, True, parameter.grad, _UNREADABLE)
                measured.append((op.grad_place, parameter.grad))
        self._measure_all(measured)

    def stop(self) -> None:
        """Measures no more, after the gradients of parameters. The rows remain."""
        self.end_forward()
        self._measure_awaited()
        self.active = False
        for handle in self._hooks:
            handle.remove()
        for marked in self._marked:  # a program may pickle its tensors
            tensor = marked()
            if tensor is not None:
                tensor.__dict__.pop("_headroom_op", None)
        for collection in (self._hooks, self._known, self._kept, self._marked, self._awaited):
            collection.clear()  # type: ignore[attr-defined]

    # The report.

    def report(self, stats: list[_core.RangeStats]) -> _core.RangeReport:
        """The report of the statistics that the table has collected, in program order."""
        measured = [place for place, row in enumerate(self._rows) if row >= 0]
        measured.sort(key=self._time_of)
        index = {place: i for i, place in enumerate(measured)}  # in the report
        rows = [self._described(*self._places[place], place, index) for place in measured]
        return _core.RangeReport(rows, [stats[self._rows[place]] for place in measured])

    def _time_of(self, place: int) -> tuple[int, int]:
        """When it was computed. The gradient of a parameter: with those of what it was used for."""
        op, backward = self._places[place]
        if not backward or op.source != PARAMETER:
            return place, 0
        return max((user.grad_place for user in op.consumers), default=place), 1

    @property
    def unmeasured(self) -> int:
        """Tensors for which the table had no room."""
        return self._rows.count(_FULL)

    def _described(self, op: Op, backward: bool, place: int, index: dict[int, int]) -> tuple[Any, ...]:
        def before(places: Iterable[int]) -> list[int]:
            return sorted({index[each] for each in places if index.get(each, index[place]) < index[place]})

        if not backward:
            inputs = before(each.place for each in op.inputs)
            return (op.module, op.operation, op.tensor, False, op.source, op.types[0], inputs)
        users = [user for user in op.consumers if before([user.grad_place])]
        inputs = before(user.grad_place for user in users)
        suspects = [user for user in users if user.operation not in _ADDING] or users
        target = op.tensor or op.operation
        module = suspects[0].module if suspects else op.module
        names = dict.fromkeys(
            user.operation if user.module == module else f"{user.module}: {user.operation}" for user in suspects)
        return (module, " or ".join(names), target, True, OPERATION, op.types[1], inputs)


def _shares(kind: int, args: Any, result: Any) -> bool:
    """Whether no element of the result can be larger than the largest of the first argument (or than 1)."""
    if kind == _SHARE:
        return True
    if kind == _CAST:  # to a type with at least the same range
        before, after = args[0].dtype, result.dtype
        return before == after or (result.element_size() > 2 and args[0].element_size() <= result.element_size())
    if kind in (_PRODUCT, _QUOTIENT) and len(args) == 2 and isinstance(args[1], (int, float)):
        return abs(args[1]) <= 1 if kind == _PRODUCT else abs(args[1]) >= 1
    return False


def _tensors(args: Any, kwargs: Any) -> list[Any]:
    """The tensors among the arguments of a call, also in lists and tuples."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _TENSOR):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, _TENSOR)]
    return found


def _view(tensor: torch.Tensor) -> Optional[View]:
    """The memory of any tensor; of a copy if its elements are not in one block."""
    plain = type(tensor) is _TENSOR and tensor.layout is torch.strided and tensor.is_contiguous()
    if plain and (tensor.is_cuda or tensor.is_cpu):
        view: Optional[View] = (tensor.data_ptr(), _CODES[tensor.dtype], tensor.numel(), tensor.get_device())
    else:
        tensor = local(tensor).detach()
        view = view_of(tensor) or view_of(_compact(tensor))
    if view is None or tensor.data_ptr() or not view[2]:
        return view
    return None  # the storage was freed


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor with the same elements; those of expanded dimensions once."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.contiguous()
