"""The bindings themselves: arguments, exceptions, lifetimes. Run with every Python that the module supports."""

import array
import copy
import gc
import inspect
import io
import pickle
import sys
import threading
import time
import weakref

import pytest

import headroom
from headroom import _core


def floats(count=4):
    return array.array("f", [1.0] * count)


def test_wrong_arguments_name_the_argument():
    state = headroom.ScaleState("torch")
    for call, message in (
        (lambda: state.applies(True, "x"), r"applies\(\): argument 'amax' must be float, not str"),
        (lambda: state.applies(True), r"applies\(\) misses argument 'amax'"),
        (lambda: state.applies(True, amx=1.0), r"applies\(\) has no argument 'amx'"),
        (lambda: state.applies(True, 1.0, amax=1.0), r"applies\(\) got two values for argument 'amax'"),
        (lambda: state.applies(True, 1.0, 2.0), r"applies\(\) takes 2 arguments, but 3 were given"),
        (lambda: _core.measure([1]), r"measure\(\): argument 'grads' must be Tensor, not int"),
        (lambda: _core.Adam(True, False, -1, "full"), r"argument 'seed' must be int from 0 to 2\^64 - 1, not int"),
        (lambda: _core.set_num_threads(2**40), r"argument 'threads' must be int of this size, not int"),
        (lambda: headroom.GradStats(), "cannot be created by itself"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_numbers_convert_as_in_python():
    class Index:
        def __index__(self):
            return 3

    before = headroom.num_threads()
    _core.set_num_threads(Index())
    assert headroom.num_threads() == 3
    _core.set_num_threads(before)
    with pytest.raises(TypeError):
        _core.set_num_threads(2.0)
    assert headroom.ScaleState("torch").applies(1, 2)


def test_errors_of_the_core_keep_their_class():
    with pytest.raises(headroom.InvalidArgument, match="There is no preset 'x'"):
        headroom.preset("x")
    with pytest.raises(AttributeError, match="has no setting 'hysteresis'"):
        _ = headroom.StaticScale(scale=4.0).hysteresis
    with pytest.raises(ValueError, match="clear_grads is 'no'"):
        optimizer = headroom.SGD({"w": (floats(), floats())})
        headroom.GradScaler().step(optimizer, clear_grads="no")


def test_an_exception_of_a_callback_passes_through_the_core():
    class Failing(_core.CallbackOptimizer):
        def refresh(self):
            raise KeyError("from Python")

    failing = Failing()
    scaler = _core.GradScaler(headroom.ScalePolicy("torch"), True, -1, None, 0)
    scaler.scale(1.0)
    with pytest.raises(KeyError, match="from Python"):
        scaler.step(failing)


def test_a_class_that_does_not_call_the_base_constructor_is_refused():
    class Forgetful(_core.CallbackOptimizer):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"Forgetful.__init__\(\) must call the __init__\(\) of its base class"):
        Forgetful().zero_grad()


def test_an_alarm_is_called_and_its_exception_is_raised():
    seen = []

    def alarm(report):
        seen.append((report.alarm, str(report)))
        raise RuntimeError("stop")

    scaler = _core.GradScaler(headroom.DynamicScale(init_scale=1.0), True, -1, alarm, 0)
    weight, gradient = floats(), array.array("f", [float("inf")] * 4)
    optimizer = headroom.SGD({"w": (weight, gradient)})
    scaler.scale(1.0)
    scaler.step(optimizer._core)
    with pytest.raises(RuntimeError, match="stop"):
        scaler.update(0)
    assert seen and seen[0][0] == "at floor"


def test_calls_leave_no_references():
    weights = floats()
    view = headroom.tensor(weights)
    state = headroom.ScaleState("torch")
    key = "a name that nothing else uses"
    before = [sys.getrefcount(thing) for thing in (weights, view, state, key)]
    for _ in range(100):
        _core.measure([view])
        with pytest.raises(TypeError):
            state.applies(True, **{key: 1})
        state.replace(scale=2.0)
        copy.deepcopy(state)
        assert state == state and state != key
    assert [sys.getrefcount(thing) for thing in (weights, view, state, key)] == before


def test_a_tensor_keeps_its_memory_and_lets_it_go():
    class Memory(array.array):
        pass

    memory = Memory("f", [1.0, 2.0])
    gone = weakref.ref(memory)
    view = headroom.tensor(memory)
    del memory
    gc.collect()
    assert gone() is not None and memoryview(view).tolist() == [1.0, 2.0]
    del view
    gc.collect()
    assert gone() is None


def test_a_cycle_through_an_optimizer_is_collected():
    class Mine(_core.CallbackOptimizer):
        pass

    mine = Mine()
    mine.itself = mine
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None


def test_memory_is_offered_with_its_type_and_its_permission():
    view = memoryview(headroom.tensor(floats()).frozen())
    assert (view.format, view.itemsize, view.shape, view.readonly) == ("f", 4, (4,), True)
    with pytest.raises((BufferError, TypeError)):
        io.BytesIO(b"1234").readinto(headroom.tensor(floats()).frozen())  # asks for writable memory


def test_policies_and_states_are_pickled():
    state = headroom.ScaleState("megatron").replace(scale=64.0)
    assert pickle.loads(pickle.dumps(state)) == state


def test_functions_have_signatures():
    assert str(inspect.signature(headroom.ScaleState.advance)) == "(self, /, overflow, amax=0.0)"
    assert str(inspect.signature(headroom.preset)) == "(name)"


def test_other_threads_run_during_a_call():
    gradient = headroom.tensor(array.array("f", bytes(4 << 24)))
    running, turns = threading.Event(), []

    def count():
        while not running.is_set():
            turns.append(1)
            time.sleep(0)

    def counted_during(call):
        before = len(turns)
        call()
        return len(turns) > before

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # threads take turns only where one releases the interpreter lock
    thread.start()
    try:
        assert not counted_during(lambda: sum(range(1 << 20)))
        # A loaded machine may not start the other thread within one call.
        assert any(counted_during(lambda: _core.measure([gradient])) for _ in range(200))
    finally:
        running.set()
        sys.setswitchinterval(interval)
        thread.join()
