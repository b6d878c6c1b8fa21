#!/usr/bin/env python3
"""`headroom train --resume` continues a run bit for bit and survives damaged files, full disks and signals."""
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

import tfevents
from pictures import png
from runs import check, history, run_tests, wait_for_steps

program = sys.argv[1]
FIRST, LAST = "checkpoint-000004.safetensors", "checkpoint-000008.safetensors"


def train(*arguments, **more):
    return subprocess.run([program, "train", *map(str, arguments), "--threads", "1"],
                          capture_output=True, text=True, **more)


def checkpoints(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))


def read(folder, name):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def write(folder, name, data):
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def parse_safetensors(data):
    """The metadata and the tensors of a safetensors file."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__")
    return metadata, {name: (item["dtype"], item["shape"],
                             data[8 + length + item["data_offsets"][0]:8 + length + item["data_offsets"][1]])
                      for name, item in header.items()}


class XXH128Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def add_setting(data, name, value, more=None):
    """A checkpoint with one more setting, more entries in its state, and a valid checksum."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    state = json.loads(header["__metadata__"]["state"])
    state["settings"].append([name, value])
    state |= more or {}
    header["__metadata__"] |= {"state": json.dumps(state), "checksum": "0" * 32}
    text = json.dumps(header, separators=(",", ":")).encode()
    changed = struct.pack("<Q", len(text)) + text + data[8 + length:]
    xxhash = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
    xxhash.restype, xxhash.argtypes = XXH128Hash, [ctypes.c_char_p, ctypes.c_size_t]
    digest = xxhash(changed, len(changed))
    return changed.replace(b"0" * 32, b"%016x%016x" % (digest.high, digest.low), 1)


def course(folder):
    """The steps and layer records of a run, without their times."""
    _, steps, layers, _ = history(folder)
    return [{key: value for key, value in line.items() if key != "seconds"} for line in steps + layers]


def make_good_run(temp):
    """A run of 8 steps with the checkpoints FIRST and LAST: its folder and the bytes of LAST."""
    good = f"{temp}/good"
    train("mlp", "--precision", "fp16", "--width", 8, "--steps", 8, "--checkpoint-every", 4, "--out", good)
    return good, read(good, LAST)


def copy_run(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def start_long_run(out, **more):
    """Starts a run of a million steps and returns its process once it has recorded ten."""
    process = subprocess.Popen([program, "train", "mlp", "--width", "8", "--steps", "1000000", "--schedule", "constant",
                                "--threads", "1", "--out", out],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    wait_for_steps(process, out)
    return process


def limit_file_size():
    """Simulates a full disk in a child process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))


def test_resumed_run_is_bit_identical(temp):
    # For every model, with and without masters: repeats the second half of a run from the checkpoint before it.
    image = f"{temp}/image.png"
    write(temp, "image.png", png(20, 14))
    small = {"field": [], "mlp": ["--width", 32], "cnn": ["--batch", 8],
             "gpt": ["--batch", 2, "--context", 16, "--width", 16], "lm": ["--batch", 2000]}
    levels = (["--precision", "fp16"], ["--precision", "fp16", "--opt-level", "O2", "--loss-scale", "static:1024"],
              ["--precision", "fp16", "--opt-level", "O3", "--optimizer", "sgd", "--lr", 0.01],
              ["--precision", "bf16", "--opt-level", "O2", "--accumulate", 2],
              ["--precision", "fp16", "--loss-scale", "dynamic", "--clip", 1])
    states = [["--precision", precision, "--opt-level", "O2", "--state", state]
              for precision in ("fp16", "bf16") for state in ("half", "byte")]
    cases = [(model, [*options, *level]) for model, options in small.items() for level in levels]
    cases += [("gpt", ["--batch", 2, "--context", 16, "--width", 32, "--lr", 1e-4, *state]) for state in states]
    cases += [("field", ["--data", image, "--precision", "fp16", "--batch", 32]),
              ("mlp", ["--tensorboard", "--layers", 2])]
    for number, (model, options) in enumerate(cases):
        out = f"{temp}/{number}"
        result = train(model, *options, "--steps", 8, "--checkpoint-every", 4, "--out", out)
        check(result.returncode == 0, f"{model} {options}: {result.stderr}")
        check(checkpoints(out) == [FIRST, LAST], f"{model} {options}: {checkpoints(out)}")
        whole, steps, end = read(out, LAST), course(out), history(out)[3]
        os.remove(f"{out}/{LAST}")
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and "resuming after step 4" in result.stderr, result.stderr)
        check(read(out, LAST) == whole, f"{model} {options}: the checkpoints differ")
        check(course(out) == steps, f"{model} {options}: the histories differ")
        check(history(out)[3]["results"] == end["results"] and history(out)[3]["steps"] == 8, history(out)[3])
        check("8 of 8 steps" in result.stdout, result.stdout)
    events = [step for step, tag, *_ in tfevents.read(f"{out}/events.out.tfevents.headroom") if tag == "train/loss"]
    check(events == list(range(1, 9)), events)


def test_checkpoint_holds_weights_masters_and_moments_by_name(temp):
    out = f"{temp}/run"
    train("mlp", "--width", 32, "--precision", "fp16", "--opt-level", "O2", "--steps", 8, "--checkpoint-every", 4,
          "--out", out)
    metadata, found = parse_safetensors(read(out, LAST))
    check(metadata["format"] == "headroom-checkpoint" and metadata["step"] == "8", metadata)
    for name, dtype in (("hidden0.weight", "F16"), ("hidden0.weight/master", "F32"), ("out.bias/exp_avg_sq", "F32")):
        check(found[name][0] == dtype and found[name][2].strip(b"\0"), name)


def test_finished_run_continues_with_more_steps(temp):
    good, _ = make_good_run(temp)
    result = train("--resume", "--out", good, "--steps", 10)
    check(result.returncode == 0 and "10 of 10 steps" in result.stdout, result.stderr)
    check([step["step"] for step in history(good)[1]] == list(range(1, 11)), "the history continues")
    page = read(good, "report.html").decode()
    shown = json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.S).group(1))["runs"][0]
    check(dict(shown["settings"])["steps"] == "10", shown["settings"])


def test_data_path_is_independent_of_the_current_folder(temp):
    image = f"{temp}/image.png"
    write(temp, "image.png", png(20, 14))
    os.makedirs(f"{temp}/there/below")
    write(f"{temp}/there", "image.png", png(20, 14))
    out = f"{temp}/data"
    result = train("field", "--data", "image.png", "--steps", 2, "--batch", 32, "--out", out, cwd=f"{temp}/there")
    check(result.returncode == 0, result.stderr)
    for more, cwd in (([], temp), (["--data", "../image.png"], f"{temp}/there/below"),
                      (["--data", f"{temp}/there/./image.png"], temp)):
        result = train("--resume", "--out", out, *more, cwd=cwd)
        check(result.returncode == 0, f"{more}: {result.stderr}")
    result = train("--resume", "--out", out, "--data", image)
    check(result.returncode == 2 and f"--data is {image}, but the run in" in result.stderr, result.stderr)


def test_damaged_checkpoint_is_reported_and_the_previous_one_used(temp):
    good, data = make_good_run(temp)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    lying = data.replace(b'"step":"8"', b'"step":"7"')
    out = f"{temp}/damaged"
    for damaged, why in ((data[:-1], "truncated"), (data[:100], "truncated"), (b"", "truncated"),
                         (bytes(flipped), "checksum"), (lying, "checksum"), (bytes(5000), "is not a checkpoint"),
                         (read(good, FIRST), "is of step 4")):
        copy_run(good, out)
        write(out, LAST, damaged)
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and f"{LAST}' " in result.stderr and why in result.stderr
              and "It is left out.\nheadroom: resuming after step 4" in result.stderr, f"{why}: {result.stderr}")
        check(read(out, LAST) == data, f"{why}: the final checkpoint differs")


def test_hostile_checkpoint_state_is_refused(temp):
    good, data = make_good_run(temp)
    # A state that would exhaust memory or time is refused before it is parsed.
    write(good, LAST, add_setting(data, "--seed", "1", more={"x": [[[]]] * 1500000}))
    result = train("--resume", "--out", good)
    check(result.returncode == 0 and "has a state that has more than 4194304 values" in result.stderr, result.stderr)
    # Only settings of the run may come from a checkpoint; any other setting makes it invalid.
    out = f"{temp}/out"
    write(good, LAST, data)
    for name, value in (("--watch", "true"), ("--out", f"{temp}/elsewhere"), ("--\x1b[2J", "x")):
        copy_run(good, out)
        write(out, LAST, add_setting(data, name, value))
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and "Watch at" not in result.stderr and "\x1b" not in result.stderr
              and f"has a setting '{name[:2]}" in result.stderr and "resuming after step 4" in result.stderr,
              result.stderr)
        check(read(out, LAST) == data, f"{name}: the final checkpoint differs")


def test_run_without_a_good_checkpoint_is_refused_and_unchanged(temp):
    good, data = make_good_run(temp)
    write(good, LAST, data[:-1])
    write(good, FIRST, b"")
    before = read(good, "history.jsonl")
    result = train("--resume", "--out", good)
    check(result.returncode == 2 and result.stderr.startswith("headroom: There is no good checkpoint in")
          and result.stderr.count("truncated") == 2, result.stderr)
    check(read(good, "history.jsonl") == before, "the history is unchanged")


def test_checkpoint_of_another_model_is_refused(temp):
    good, _ = make_good_run(temp)
    out, other = f"{temp}/out", f"{temp}/other"
    copy_run(good, out)
    train("mlp", "--precision", "fp16", "--width", 16, "--steps", 8, "--checkpoint-every", 4, "--out", other)
    for name in (FIRST, LAST):
        shutil.copy(f"{other}/{name}", f"{out}/{name}")
    result = train("--resume", "--out", out, "--width", 8)
    check(result.returncode == 2 and "--width is 8, but the run in" in result.stderr, result.stderr)
    result = train("gpt", "--resume", "--out", good)
    check(result.returncode == 2 and "--model is gpt, but the run in" in result.stderr, result.stderr)


def test_settings_that_change_the_course_are_refused(temp):
    good, _ = make_good_run(temp)
    for option, value in (("--lr", 0.5), ("--seed", 2), ("--precision", "bf16"), ("--precision", "fp32"),
                          ("--opt-level", "O0"), ("--model", "cnn"), ("--clip", 2),
                          ("--batch", 3), ("--loss-scale", "static:8"), ("--opt-level", "O2"), ("--steps", 7)):
        result = train("--resume", "--out", good, option, value)
        check(result.returncode == 2 and result.stderr.startswith(f"headroom: {option} is "), result.stderr)
    result = train("mlp", "--precision", "fp16", "--width", 8, "--steps", 8, "--resume", "--out", good)
    check(result.returncode == 0, result.stderr)


def test_resume_needs_the_folder_of_a_run(temp):
    image = f"{temp}/image.png"
    write(temp, "image.png", png(20, 14))
    for arguments in (["--resume"], ["--resume", "--out", f"{temp}/nothing"], ["--resume", "--out", image]):
        result = train(*arguments)
        check(result.returncode == 2 and "--resume needs the folder of a run" in result.stderr, result.stderr)
    check(not os.path.exists(f"{temp}/nothing"), "no folder is created")
    os.mkdir(f"{temp}/empty")
    result = train("--resume", "--out", f"{temp}/empty")
    check(result.returncode == 2 and "There is no good checkpoint" in result.stderr, result.stderr)


def test_new_run_removes_old_checkpoints(temp):
    good, _ = make_good_run(temp)
    result = train("mlp", "--steps", 2, "--out", good, "--checkpoint-every", 0)
    check(result.returncode == 0 and checkpoints(good) == [], checkpoints(good))


def test_full_disk_keeps_the_saved_checkpoints_and_is_reported(temp):
    out = f"{temp}/full"
    train("mlp", "--width", 256, "--steps", 2, "--checkpoint-every", 1, "--out", out)
    before = {name: read(out, name) for name in checkpoints(out)}
    with open("/dev/full", "w") as full:  # the message cannot be written either
        result = subprocess.run([program, "train", "--resume", "--out", out, "--steps", "4", "--threads", "1"],
                                stdout=subprocess.PIPE, stderr=full, preexec_fn=limit_file_size)
    check(result.returncode == 1 and b"4 of 4 steps" in result.stdout, result)
    result = train("--resume", "--out", out, "--steps", 4, preexec_fn=limit_file_size)
    check(result.returncode == 1
          and "Training continues without this checkpoint; that of step 2 is kept" in result.stderr
          and "the end of the run is not saved. " in result.stderr, (result.returncode, result.stderr))
    check({name: read(out, name) for name in checkpoints(out)} == before, "the checkpoints are unchanged")
    check(not [name for name in os.listdir(out) if name.endswith(".tmp")], os.listdir(out))
    check(len(history(out)[1]) == 4 and train("--resume", "--out", out).returncode == 0, "it can be resumed later")
    if os.geteuid() != 0:
        os.chmod(out, 0o500)
        result = train("--resume", "--out", out)
        check(result.returncode == 2 and "could not be written" in result.stderr, result.stderr)
        os.chmod(out, 0o700)


def test_signals_save_a_checkpoint(temp):
    # A closing terminal may send SIGHUP twice.
    for stop in ([signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]):
        out = f"{temp}/{stop[0].name}"
        process = start_long_run(out)
        for one in stop:
            process.send_signal(one)
        process.communicate(timeout=60)
        check(process.returncode == 130 and checkpoints(out) == [f"checkpoint-{len(history(out)[1]):06}.safetensors"],
              (stop, process.returncode, checkpoints(out)))


def test_run_under_nohup_ignores_sighup(temp):
    process = start_long_run(f"{temp}/nohup", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    check(process.poll() is None, "the run ended")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_folder_of_a_running_run_is_locked_and_resumable_after_it(temp):
    out = f"{temp}/stopped"
    process = start_long_run(out)
    for arguments in (["--resume"], ["mlp"]):
        result = train(*arguments, "--out", out)
        check(result.returncode == 2 and "is being written by another run" in result.stderr, result.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = len(history(out)[1])
    check(process.returncode == 130 and checkpoints(out) == [f"checkpoint-{done:06}.safetensors"], checkpoints(out))
    result = train("--resume", "--out", out, "--steps", done + 3)
    check(result.returncode == 0 and f"resuming after step {done}" in result.stderr, result.stderr)
    check([step["step"] for step in history(out)[1]] == list(range(1, done + 4)), "no step is duplicated")


run_tests(globals())
