"""``python -m headroom state``: finds scalers in files of all frameworks, converts them, and runs nothing in a file."""

import io
import json
import os
import pickle
import random
import struct
import sys
import types
import zipfile

import pytest
import torch

import headroom
import headroom.megatron
import headroom.torch
from headroom import _layouts, _state_command

TORCHS = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


def run(capsys, *arguments):
    """Exit status, output, and the message."""
    status = _state_command.main([str(each) for each in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def refused(capsys, path):
    """The one sentence about a file."""
    status, out, message = run(capsys, path)
    assert (status, out, message.count("\n")) == (2, "", 1), message
    assert message.startswith(f"headroom: {path}: ")
    return message


def torch_file(path, content):
    torch.save(content, path)
    return path


@pytest.fixture
def foreign_scaler():
    """An object of a class that exists while it is saved only: DeepSpeed's."""
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": module.__name__})
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", module.__name__]
    saved = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names[:3], types.ModuleType("deepspeed")) | {module.__name__: module})
    scaler = module.DynamicLossScaler()
    vars(scaler).update(cur_scale=4096.0, cur_iter=30, last_overflow_iter=10, scale_factor=2.0, scale_window=1000,
                        min_scale=1, delayed_shift=2, cur_hysteresis=1, consecutive_hysteresis=False,
                        raise_error_at_min_scale=True, dynamic=True, dtype=torch.half)
    yield scaler
    for name, old in saved.items():
        sys.modules.pop(name, None) if old is None else sys.modules.update({name: old})


def test_states_are_found_in_the_files_of_every_framework(tmp_path, capsys, foreign_scaler):
    weights = {"layer.weight": torch.randn(64, 64)}
    megatron = {"scale": torch.tensor([4096.0]), "growth_tracker": 7, "hysteresis_tracker": 0}
    ours = headroom.torch.GradScaler("cpu", policy="headroom").state_dict()
    files = {
        "scaler.pt": (TORCHS, "the whole file: torch"),  # Accelerate's
        "lightning.ckpt": ({"state_dict": weights, "MixedPrecision": TORCHS}, "MixedPrecision: torch"),
        "fairseq2.pt": ({"_fp16_loss_scaler": {"grad_scaler": TORCHS}}, "_fp16_loss_scaler.grad_scaler: torch"),
        "megatron.pt": ({"model": weights, "optimizer": [{"grad_scaler": megatron}]},
                        "optimizer.0.grad_scaler: megatron"),
        "deepspeed.pt": ({"optimizer_state_dict": {"loss_scaler": foreign_scaler, "base": weights}},
                         "optimizer_state_dict.loss_scaler: deepspeed"),
        "ours.pt": ({"scaler": ours}, "scaler: headroom"),
    }
    for name, (content, _) in files.items():
        torch_file(tmp_path / name, content)
    for module in [name for name in sys.modules if name.startswith("deepspeed")]:
        del sys.modules[module]
    for name, (_, place) in files.items():
        status, out, _ = run(capsys, tmp_path / name)
        assert status == 0 and out.startswith(place + "\n"), (name, out)
        assert f"  scale {65536 if name == 'ours.pt' else 4096}\n" in out
    assert "deepspeed" not in sys.modules
    _, out, _ = run(capsys, tmp_path / "deepspeed.pt", "--to", "megatron")
    assert json.loads(out) == {"scale": 4096.0, "growth_tracker": 18, "hysteresis_tracker": 1}


def test_pickles_and_json_are_read(tmp_path, capsys):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"scaler": TORCHS}))
    (tmp_path / "b.json").write_text(json.dumps({"scaler": TORCHS}))
    (tmp_path / "c.json").write_text(headroom.ScaleState("icefall").save())
    assert run(capsys, tmp_path / "a.pkl")[1] == run(capsys, tmp_path / "b.json")[1]
    assert "  scale 1\n" in run(capsys, tmp_path / "c.json")[1]


@pytest.mark.parametrize("layout", _layouts.WRITERS)
def test_every_layout_is_read_back(layout, tmp_path, capsys):
    source = torch_file(tmp_path / "scaler.pt", TORCHS)
    for name in ("out.json", "out.pt"):
        status, out, _ = run(capsys, source, "--to", layout, "--out", tmp_path / name)
        assert (status, out) == (0, "")
        status, out, message = run(capsys, tmp_path / name, "--to", "torch")
        assert status == 0 and json.loads(out)["scale"] == 4096.0
        assert json.loads(out)["_growth_tracker"] == 7
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.pt", "scaler.pt"]


@pytest.mark.parametrize("preset", headroom.presets())
def test_our_own_layouts_are_exact(preset):
    state = headroom.ScaleState(preset)
    for step in range(50):
        state.advance(step % 7 == 0, 0.5)
    for layout in ("headroom", "json"):
        assert _layouts.read(_layouts.write(state, layout)) == state
    assert _layouts.unpack(state.policy, _layouts.pack(state)) == state


def test_converted_states_load_in_the_frameworks(tmp_path, capsys):
    saved = {"scale": torch.tensor([1024.0]), "growth_tracker": 5, "hysteresis_tracker": 2}
    source = torch_file(tmp_path / "megatron.pt", {"grad_scaler": saved})
    run(capsys, source, "--to", "torch", "--out", tmp_path / "torch.pt")
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(tmp_path / "torch.pt", weights_only=True))
    assert scaler.get_scale() == 1024.0 and scaler._get_growth_tracker() == 5
    run(capsys, tmp_path / "torch.pt", "--to", "megatron", "--out", tmp_path / "back.pt")
    megatron = headroom.megatron.GradScaler("megatron", "cpu")
    megatron.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    assert megatron.scale.item() == 1024.0 and megatron.state.numbers["growth_tracker"] == 5


def test_what_a_layout_cannot_hold_is_named(tmp_path, capsys):
    source = tmp_path / "ours.json"
    source.write_text(headroom.ScaleState("megatron").save())
    _, _, message = run(capsys, source, "--to", "torch")
    assert "does not contain" in message and "hysteresis" in message and " scale" not in message


class Runs:
    """Unpickled by an ordinary unpickler, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_file_is_not_run(write, tmp_path, capsys):
    harm = tmp_path / "harm"
    write(Runs(harm), tmp_path / "hostile.pt")
    refused(capsys, tmp_path / "hostile.pt")
    write({"hook": Runs(harm), "scaler": TORCHS}, tmp_path / "mixed.pt")
    status, out, _ = run(capsys, tmp_path / "mixed.pt")
    assert status == 0 and out.startswith("scaler: torch")
    assert not harm.exists()
    pickle.loads(pickle.dumps(Runs(harm)))
    assert harm.exists()  # the file does harm elsewhere


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-40, "many", None, 10**400, [1]])
def test_impossible_scales_are_refused(value, tmp_path, capsys):
    refused(capsys, torch_file(tmp_path / "scaler.pt", TORCHS | {"scale": value}))


@pytest.mark.parametrize("key, value", [("growth_interval", 0), ("growth_factor", 0.5), ("_growth_tracker", -5),
                                        ("growth_interval", 2**40), ("_growth_tracker", float("nan"))])
def test_impossible_settings_are_refused(key, value, tmp_path, capsys):
    refused(capsys, torch_file(tmp_path / "scaler.pt", TORCHS | {key: value}))


def test_other_files_are_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "list.json").write_text("{\"a\": [1, 2]}")
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("data", "x")
    torch.save(TORCHS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("empty", "text", "list.json", "deep.json", "archive.zip", "old.pt", "missing"):
        refused(capsys, tmp_path / name)
    refused(capsys, tmp_path)
    assert "before 1.6" in refused(capsys, tmp_path / "old.pt")
    refused(capsys, torch_file(tmp_path / "weights.pt", {"w": torch.zeros(3)}))


def test_pickles_that_ask_for_memory_or_contain_themselves_are_harmless(tmp_path, capsys):
    endless = {}
    endless["self"] = [endless]
    (tmp_path / "endless").write_bytes(pickle.dumps(endless))
    memo = b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b"."  # item 4 billion of the memo
    (tmp_path / "memo").write_bytes(memo)
    (tmp_path / "bytes").write_bytes(b"\x80\x05\x8e" + struct.pack("<Q", 2**50) + b"x.")
    (tmp_path / "array").write_bytes(b"\x80\x05\x96" + struct.pack("<Q", 2**50) + b"x.")
    for name in ("endless", "memo", "bytes", "array"):
        refused(capsys, tmp_path / name)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**28 + 1))
    assert "larger than" in refused(capsys, tmp_path / "bomb.pt")


def test_broken_files_never_raise(tmp_path, capsys):
    file = io.BytesIO()
    torch.save({"grad_scaler": {"scale": torch.tensor([4.0]), "growth_tracker": 0, "hysteresis_tracker": 2}}, file)
    whole, chance = file.getvalue(), random.Random(1)
    originals = [whole, pickle.dumps({"scaler": TORCHS}), json.dumps({"scaler": TORCHS}).encode()]
    path = tmp_path / "broken"
    for turn in range(600):
        data = bytearray(originals[turn % 3])
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randint(0, len(data))] if turn % 2 else data)
        status, out, message = run(capsys, path)
        assert (status == 0 and out) or (status == 2 and not out and message.count("\n") == 1), (turn, message)


def test_scalers_in_different_states_are_not_converted(tmp_path, capsys):
    path = torch_file(tmp_path / "two.pt", {"a": TORCHS, "b": TORCHS | {"scale": 8.0}})
    assert run(capsys, path)[0] == 0
    status, _, message = run(capsys, path, "--to", "torch")
    assert status == 2 and "(a, b)" in message
    same = torch_file(tmp_path / "same.pt", {"a": TORCHS, "b": dict(TORCHS)})
    assert run(capsys, same, "--to", "torch")[0] == 0


def test_a_failed_conversion_leaves_the_old_file(tmp_path, capsys):
    old = tmp_path / "out.json"
    old.write_text("old")
    refused(capsys, torch_file(tmp_path / "bad.pt", TORCHS | {"scale": 0.0}))
    status, _, _ = run(capsys, tmp_path / "bad.pt", "--to", "torch", "--out", old)
    assert status == 2 and old.read_text() == "old"
    good = torch_file(tmp_path / "good.pt", TORCHS)
    assert run(capsys, good, "--to", "torch", "--out", tmp_path / "none" / "out.json")[0] == 2
