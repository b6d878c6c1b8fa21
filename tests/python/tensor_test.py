"""headroom.tensor: accepted and refused arrays, memory sharing and lifetime."""

import array
import gc
import multiprocessing
import sys

import numpy as np
import pytest

import headroom


@pytest.mark.parametrize(
    "dtype, name", [(np.float16, "f16"), (np.float32, "f32"), (np.float64, "f64")]
)
def test_numpy_arrays_of_every_float_type_are_accepted(dtype, name):
    view = headroom.tensor(np.ones((3, 5), dtype))
    assert (len(view), view.dtype, view.device, view.read_only) == (15, name, "cpu", False)


def test_scalars_and_empty_arrays_are_accepted():
    assert len(headroom.tensor(np.array(1.0, np.float32))) == 1
    assert len(headroom.tensor(np.zeros((0, 7), np.float16))) == 0
    assert headroom.measure([np.zeros(0, np.float32)]).count == 0
    assert headroom.measure([]).count == 0


def test_buffer_protocol_objects_are_accepted():
    assert headroom.tensor(array.array("f", [1, 2])).dtype == "f32"
    assert headroom.tensor(memoryview(array.array("d", [1]))).dtype == "f64"


def test_16_bit_integers_need_an_explicit_dtype():
    bits = np.array([0x3F80, 0x7F80], np.uint16)  # 1 and inf as bfloat16
    with pytest.raises(headroom.Error, match="bfloat16") as caught:
        headroom.tensor(bits)
    assert caught.value.code == "unsupported"
    stats = headroom.measure([headroom.tensor(bits, dtype="bfloat16")])
    assert (stats.amax, stats.inf_count) == (1.0, 1)


def test_ml_dtypes_bfloat16_is_accepted():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert headroom.tensor(np.ones(3, ml_dtypes.bfloat16)).dtype == "bf16"


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((4, 4), np.float32)[:, ::2],
        np.asfortranarray(np.zeros((4, 3), np.float32)),
        np.zeros(4, ">f4"),
        np.zeros(4, np.int32),
        np.zeros(4, np.complex64),
        b"abcd",
    ],
)
def test_unsupported_layouts_and_types_are_refused(bad):
    with pytest.raises(headroom.Error, match=r"Headroom takes|not contiguous"):
        headroom.tensor(bad)


def test_non_arrays_raise_type_error():
    for bad in (None, 1.0, "text", [1.0], object()):
        with pytest.raises(TypeError):
            headroom.tensor(bad)


def test_read_only_arrays_can_be_measured_but_not_written():
    grad = np.ones(3, np.float32)
    grad.flags.writeable = False
    assert headroom.tensor(grad).read_only
    assert headroom.measure([grad]).norm == pytest.approx(3**0.5)
    with pytest.raises(headroom.InvalidArgument, match="read-only|const"):
        headroom.unscale_([grad], 0.5)
    with pytest.raises(ValueError):
        headroom.SGD([(grad, None)])
    assert (grad == 1).all()


class DlpackOnly:
    """An exporter that supports DLPack but not the buffer protocol."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, *, stream=None):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_dlpack_shares_memory_and_keeps_it_alive():
    values = np.full(100, 4.0, np.float32)
    before = sys.getrefcount(values)
    view = headroom.tensor(DlpackOnly(values))
    headroom.unscale_([view], 0.25)
    assert (values == 1.0).all()
    assert sys.getrefcount(values) > before
    del view
    gc.collect()
    assert sys.getrefcount(values) == before


def test_capsule_can_be_consumed_only_once():
    capsule = np.zeros(3, np.float32).__dlpack__()
    headroom.Tensor.from_capsule(capsule)
    with pytest.raises(headroom.Error, match="consumed"):
        headroom.Tensor.from_capsule(capsule)


def test_strided_dlpack_tensor_is_refused():
    with pytest.raises(headroom.Error, match="contiguous"):
        headroom.tensor(DlpackOnly(np.zeros((4, 4), np.float32)[:, 1]))


def test_state_is_exported_by_buffer_and_dlpack_and_outlives_optimizer():
    weight = np.full(3, 2.0, np.float16)
    optimizer = headroom.AdamW({"w": (weight, np.ones(3, np.float16))})
    master = optimizer.state()[1]["w/master"]
    del optimizer
    gc.collect()
    assert np.asarray(master).tolist() == [2.0, 2.0, 2.0]
    assert np.from_dlpack(master).tolist() == [2.0, 2.0, 2.0]


def test_buffer_in_use_cannot_be_resized():
    values = array.array("f", [1.0])
    view = headroom.tensor(values)
    with pytest.raises(BufferError):
        values.append(2.0)
    assert len(view) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_can_be_measured_but_not_written(dtype):
    jnp = pytest.importorskip("jax.numpy")
    values = jnp.ones(4, dtype)
    assert headroom.measure([values]).norm == 2.0
    with pytest.raises(headroom.InvalidArgument):
        headroom.unscale_([values], 0.5)


def _measure_in_child(count):
    values = np.ones(count, np.float32)
    values[-1] = np.inf
    return headroom.measure([values]).inf_count


def test_measure_works_in_forked_child():
    """Data loader workers do this. OpenMP's threads do not survive fork()."""
    assert _measure_in_child(1 << 22) == 1  # starts OpenMP's threads in the parent
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_measure_in_child, (1 << 22,)).get(timeout=60) == 1
