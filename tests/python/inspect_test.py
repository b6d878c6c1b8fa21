"""headroom.inspect: counts against NumPy's conversion, verdicts, files and their limits."""

import json
import struct
from array import array as plain_array

import numpy as np
import pytest

import headroom

# Every place where the outcome changes, with its neighbours, and both signs.
EDGES = [65504.0, 65519.99, 65520.0, 65520.01, 65536.0, 7e4, 1e30, 2.0**-24, 2.0**-25, 2.0**-25 * (1 + 2.0**-20),
         2.0**-26, 2.0**-14, 2.0**-14 - 2.0**-25, 2.0**-14 - 2.0**-24, 2.0**-14 - 2.0**-26, 1e-30, 1.0, 0.0]


def planted(dtype, rng, count=20_000):
    values = np.concatenate([rng.normal(size=count) * 2.0 ** rng.uniform(-30, 17, count), EDGES, -np.array(EDGES)])
    if dtype == "bfloat16":  # the upper half of FP32, rounded to nearest even
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def as_floats(array):
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def oracle(array):
    """What NumPy's conversion to float16 does to an array."""
    values = as_floats(array)
    values = values[np.isfinite(values) & (values != 0)]
    with np.errstate(over="ignore"):
        half = np.abs(values.astype(np.float16))
    return {"flushed": int((half == 0).sum()), "overflow": int(np.isinf(half).sum()),
            "subnormal": int(((half > 0) & (half < 2.0**-14)).sum()),
            "largest": float(np.abs(values).max()), "smallest": float(np.abs(values).min())}


def found(tensor):
    return {name: getattr(tensor, name) for name in ("flushed", "overflow", "subnormal", "largest", "smallest")}


CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}


def write(path, tensors):
    """Writes a safetensors file of {name: (code, array)}."""
    header, data = {}, b""
    for name, (code, array) in tensors.items():
        content = array.tobytes()
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", CODES)
def test_counts_equal_those_of_numpy(tmp_path, dtype):
    with np.errstate(over="ignore"):
        array = planted(dtype, np.random.default_rng(1))
    array = array[np.isfinite(as_floats(array))]
    truth = oracle(array)
    assert dtype == "float16" or min(truth["flushed"], truth["overflow"], truth["subnormal"]) > 10
    report = headroom.inspect(write(tmp_path / "a.safetensors", {"w": (CODES[dtype], array), "v": ("F32", np.ones(2, "f"))}))
    assert found(report.tensors[0]) == truth
    assert report.total.overflow == truth["overflow"] and report.total.count == array.size + 2
    assert report.safe == (dtype == "float16")
    in_memory = headroom.tensor(array, dtype) if dtype == "bfloat16" else array
    if dtype != "bfloat16":
        assert found(headroom.inspect({"w": in_memory}).tensors[0]) == truth


def test_the_largest_weights_that_fit_are_safe_and_the_next_are_not():
    below, above = np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)
    assert headroom.inspect({"w": np.array([below, -below])}).safe
    report = headroom.inspect({"w": np.array([1, above], np.float32)})
    assert not report.safe and report.keep_fp32 == ["w"] and "1 weight overflows" in report.verdict


def test_the_share_that_may_become_zero_is_that_of_one_tensor():
    tiny = np.full(1000, 1e-3, np.float32)
    tiny[:10] = 2.0**-25
    others = {"large": np.ones(10**6, np.float32)}
    assert headroom.inspect({"tiny": tiny, **others}).safe
    tiny[:11] = 2.0**-25
    report = headroom.inspect({"tiny": tiny, **others})
    assert not report.safe and report.keep_fp32 == ["tiny"] and "1.10 % of the nonzero weights of tiny" in report.verdict
    assert headroom.inspect({"tiny": tiny, **others}, lose=0.011).safe
    tiny[:11] = np.nextafter(np.float32(2.0**-25), np.float32(1))  # rounds up to 2^-24
    assert headroom.inspect({"tiny": tiny}).safe
    with pytest.raises(headroom.Error, match="from 0 to 1"):
        headroom.inspect({"tiny": tiny}, lose=1.5)


def test_a_checkpoint_with_inf_or_nan_is_unsafe_in_every_format():
    report = headroom.inspect({"a": np.ones(3, np.float16), "b": np.array([1, np.inf, np.nan], np.float16)})
    assert not report.safe and report.keep_fp32 == []
    assert "1 inf and 1 nan, first in b, which no format cures" in report.verdict


def test_weights_that_are_all_zero_or_absent_have_a_verdict():
    assert "all weights are zero" in headroom.inspect({"w": np.zeros(3, np.float32)}).verdict
    assert headroom.inspect({"w": np.zeros((0, 3), np.float32), "v": np.ones(1, np.float32)}).safe
    for nothing in ({}, {"step": np.zeros(3, np.int64)}):
        with pytest.raises(headroom.Error, match="There are no weights"):
            headroom.inspect(nothing)


def test_integers_are_left_out_and_views_are_copied():
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    report = headroom.inspect({"t": table.T, "every_second": table[0, ::2], "step": np.zeros(1, np.int64)})
    assert [tensor.count for tensor in report.tensors] == [12, 2] and report.tensors[0].shape == [4, 3]
    assert report.left_out == [("", "step", "int64")]


def test_a_dict_may_hold_views_arrays_of_the_standard_library_and_settings():
    weights = {"view": headroom.tensor(np.ones(2, np.float32)), "array": plain_array("f", [1, 2, 3])}
    report = headroom.inspect({**weights, "step": 3, "lr": 0.1, "name": "a", "extra_state": None})
    assert report.safe and [tensor.count for tensor in report.tensors] == [2, 3]
    nested = headroom.inspect({**weights, "model": {"w": np.array([1e9])}})
    assert not nested.safe and nested.left_out == [("", "model", "dict")], "its weights were not read"


def test_the_report_prints_as_the_command_does(tmp_path):
    report = headroom.inspect(write(tmp_path / "a.safetensors", {"evil\x1b[2J\n": ("F32", np.array([7e4], "f"))}))
    assert "evil?[2J?" in str(report) and "\x1b" not in str(report)
    text = " ".join(str(report).split())
    assert "a.safetensors: 1 weight (f32) in 1 tensor" in text
    assert report.verdict.startswith("Unsafe in FP16: ") and report.verdict in text


def test_shards_are_found_by_their_index_or_folder(tmp_path):
    write(tmp_path / "a-1.safetensors", {"x": ("F32", np.array([1, 2], "f"))})
    write(tmp_path / "a-2.safetensors", {"y": ("F32", np.array([7e4], "f")), "n": ("I64", np.zeros(1, np.int64))})
    index = tmp_path / "model.safetensors.index.json"
    shards = [tmp_path / "a-1.safetensors", tmp_path / "a-2.safetensors"]
    index.write_text(json.dumps({"metadata": {"total_size": 20, "more": [{}]},
                                 "weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors", "n": "a-2.safetensors"}}))
    write(tmp_path / "unrelated.safetensors", {"z": ("F32", np.array([1], "f"))})
    for paths in (index, tmp_path, shards):
        report = headroom.inspect(paths)
        assert [tensor.name for tensor in report.tensors] == ["x", "y"] and report.keep_fp32 == ["y"]
        assert "2 files: 3 weights (f32) in 2 tensors" in str(report)
    index.unlink()
    assert [tensor.name for tensor in headroom.inspect(tmp_path).tensors] == ["x", "y", "z"]


def test_a_hostile_index_is_refused_with_a_sentence(tmp_path):
    write(tmp_path / "a.safetensors", {"x": ("F32", np.array([1], "f"))})
    index = tmp_path / "model.safetensors.index.json"
    for text, sentence in [
        ("", "is not JSON"), ("{", "is not JSON"), ("[]", "no JSON object"), ("{}", "has no weight_map"),
        ("[" * 100_000, "no JSON object"), ('{"a":' + "[" * 100_000, "is not JSON"),
        ('{"weight_map": {}}', "an empty weight_map"), ('{"weight_map": 5}', "no object"), ('{"weight_map": []}', "no object"),
        ('{"weight_map": "a"}', "no object"), ('{"weight_map": {"x": 5}}', "no string"), ('{"weight_map": {"x": {}}}', "no string"),
        ('{"weight_map": {"x": "a.safetensors"}, "weight_map": {}}', "two weight_maps"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "no file name"), ('{"weight_map": {"x": "/etc/passwd"}}', "no file name"),
        ('{"weight_map": {"x": ".."}}', "no file name"), ('{"weight_map": {"x": "a\\u0000b"}}', "no file name"),
        ('{"weight_map": {"x": ""}}', "no file name"), ('{"weight_map": {"y": "a.safetensors"}}', "which its index promises"),
    ]:
        index.write_text(text)
        with pytest.raises(headroom.Error, match=sentence):
            headroom.inspect(index)
    index.write_text('{"weight_map": {"x": "missing.safetensors"}}')
    with pytest.raises(headroom.Error, match="missing.safetensors"):
        headroom.inspect(index)


def test_other_files_are_refused_with_a_sentence(tmp_path):
    pickle = tmp_path / "model.bin"
    for magic in (b"PK\x03\x04", b"\x80\x02"):
        pickle.write_bytes(magic + bytes(100))
        with pytest.raises(headroom.Error, match="an archive or a pickle"):
            headroom.inspect(pickle)
    with pytest.raises(headroom.Error, match="no safetensors file"):
        (tmp_path / "empty").mkdir()
        headroom.inspect(tmp_path / "empty")
    with pytest.raises(TypeError, match="not int"):
        headroom.inspect(5)


@pytest.mark.parametrize("dtype", [">f4", ">f8", [("a", "<f4")]])
def test_unusual_types_are_not_called_safe(dtype):
    values = np.zeros(4, dtype)
    values[...] = 1e9
    report = headroom.inspect({"ok": np.ones(4, np.float32), "bad": values})
    assert not report.safe and report.complete == (not isinstance(dtype, list))
