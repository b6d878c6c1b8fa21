#!/usr/bin/env python3
"""`headroom train --resume`: bit for bit the run that was not stopped, whatever happened to the files."""
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
import tempfile
import time

import tfevents
from pictures import png
from runs import check, finish, history

program = sys.argv[1]


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


def tensors(data):
    """What any reader of safetensors sees."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__")
    return metadata, {name: (item["dtype"], item["shape"],
                             data[8 + length + item["data_offsets"][0]:8 + length + item["data_offsets"][1]])
                      for name, item in header.items()}


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def with_setting(data, name, value, more=None):
    """A checkpoint with one more setting, and more beside them, and the checksum that belongs to it."""
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    state = json.loads(header["__metadata__"]["state"])
    state["settings"].append([name, value])
    state |= more or {}
    header["__metadata__"] |= {"state": json.dumps(state), "checksum": "0" * 32}
    text = json.dumps(header, separators=(",", ":")).encode()
    changed = struct.pack("<Q", len(text)) + text + data[8 + length:]
    xxhash = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
    xxhash.restype, xxhash.argtypes = Hash, [ctypes.c_char_p, ctypes.c_size_t]
    digest = xxhash(changed, len(changed))
    return changed.replace(b"0" * 32, b"%016x%016x" % (digest.high, digest.low), 1)


def course(folder):
    """Steps and looks without the time they took."""
    _, steps, looks, _ = history(folder)
    return [{key: value for key, value in line.items() if key != "seconds"} for line in steps + looks]


with tempfile.TemporaryDirectory() as temp:
    # Every model, with and without masters: the second half of a run again, from the checkpoint before it.
    image = f"{temp}/image.png"
    write(temp, "image.png", png(20, 14))
    small = {"field": [], "mlp": ["--width", 32], "cnn": ["--batch", 8],
             "gpt": ["--batch", 2, "--context", 16, "--width", 16], "lm": ["--batch", 2000]}
    levels = (["--precision", "fp16"], ["--precision", "fp16", "--opt-level", "O2", "--loss-scale", "static:1024"],
              ["--precision", "fp16", "--opt-level", "O3", "--optimizer", "sgd", "--lr", 0.01],
              ["--precision", "bf16", "--opt-level", "O2", "--accumulate", 2],
              ["--precision", "fp16", "--loss-scale", "headroom", "--clip", 1])
    cases = [(model, [*options, *level]) for model, options in small.items() for level in levels]
    cases += [("field", ["--data", image, "--precision", "fp16", "--batch", 32]),
              ("mlp", ["--tensorboard", "--layers", 2])]
    for number, (model, options) in enumerate(cases):
        out = f"{temp}/{number}"
        result = train(model, *options, "--steps", 8, "--checkpoint-every", 4, "--out", out)
        check(result.returncode == 0, f"{model} {options}: {result.stderr}")
        names = ["checkpoint-000004.safetensors", "checkpoint-000008.safetensors"]
        check(checkpoints(out) == names, f"{model} {options}: {checkpoints(out)}")
        whole, steps, end = read(out, names[1]), course(out), history(out)[3]
        os.remove(f"{out}/{names[1]}")
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and "resuming after step 4" in result.stderr, result.stderr)
        check(read(out, names[1]) == whole, f"{model} {options}: the checkpoints differ")
        check(course(out) == steps, f"{model} {options}: the histories differ")
        check(history(out)[3]["results"] == end["results"] and history(out)[3]["steps"] == 8, history(out)[3])
        check("8 of 8 steps" in result.stdout, result.stdout)
    events = [step for step, tag, *_ in tfevents.read(f"{out}/events.out.tfevents.headroom") if tag == "loss"]
    check(events == list(range(1, 9)), events)

    # Weights, masters and moments are in the file, under the names that one would look for.
    metadata, found = tensors(read(f"{temp}/6", "checkpoint-000008.safetensors"))
    check(metadata["format"] == "headroom-checkpoint" and metadata["step"] == "8", metadata)
    for name, dtype in (("hidden0.weight", "F16"), ("hidden0.weight/master", "F32"), ("out.bias/exp_avg_sq", "F32")):
        check(found[name][0] == dtype and found[name][2].strip(b"\0"), name)
    # More steps: the run goes on from its end.
    result = train("--resume", "--out", f"{temp}/6", "--steps", 10)
    check(result.returncode == 0 and "10 of 10 steps" in result.stdout, result.stderr)
    check([step["step"] for step in history(f"{temp}/6")[1]] == list(range(1, 11)), "the history goes on")
    page = read(f"{temp}/6", "report.html").decode()
    shown = json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.S).group(1))["runs"][0]
    check(dict(shown["settings"])["steps"] == "10", shown["settings"])

    # The data are found from another folder, and the same file may be written in another way.
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

    # Damage: the older one is used, and it is said which was left out and why.
    good = f"{temp}/good"
    train("mlp", "--precision", "fp16", "--width", 8, "--steps", 8, "--checkpoint-every", 4, "--out", good)
    last, first = "checkpoint-000008.safetensors", "checkpoint-000004.safetensors"
    data = read(good, last)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    lying = data.replace(b'"step":"8"', b'"step":"7"')
    out = f"{temp}/damaged"
    for damaged, why in ((data[:-1], "truncated"), (data[:100], "truncated"), (b"", "truncated"),
                         (bytes(flipped), "checksum"), (lying, "checksum"), (bytes(5000), "is not a checkpoint"),
                         (read(good, first), "is of step 4")):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        write(out, last, damaged)
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and f"{last}' " in result.stderr and why in result.stderr
              and "It is left out.\nheadroom: resuming after step 4" in result.stderr, f"{why}: {result.stderr}")
        check(read(out, last) == data, f"{why}: the end is not the same")
    # One whose state would take all memory, or all time, is refused before it is read.
    write(out, last, with_setting(data, "--seed", "1", more={"x": [[[]]] * 1500000}))
    result = train("--resume", "--out", out)
    check(result.returncode == 0 and "has a state that has more than 4194304 values" in result.stderr, result.stderr)
    # One that sets what no checkpoint holds is as good as damaged: nothing but the run's settings comes from a file.
    for name, value in (("--watch", "true"), ("--out", f"{temp}/elsewhere"), ("--\x1b[2J", "x")):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        write(out, last, with_setting(data, name, value))
        result = train("--resume", "--out", out)
        check(result.returncode == 0 and "Watch at" not in result.stderr and "\x1b" not in result.stderr
              and f"has a setting '{name[:2]}" in result.stderr and "resuming after step 4" in result.stderr, result.stderr)
        check(read(out, last) == data, f"{name}: the end is not the same")
    # None is good: exit 2, with the reasons, and nothing is changed.
    write(out, last, data[:-1])
    write(out, checkpoints(out)[0], b"")
    before = read(out, "history.jsonl")
    result = train("--resume", "--out", out)
    check(result.returncode == 2 and result.stderr.startswith("headroom: There is no good checkpoint in")
          and result.stderr.count("truncated") == 2, result.stderr)
    check(read(out, "history.jsonl") == before, "the history is as it was")
    # Of another model, with a right checksum: refused by its sizes.
    shutil.rmtree(out)
    shutil.copytree(good, out)
    other = f"{temp}/other"
    train("mlp", "--precision", "fp16", "--width", 16, "--steps", 8, "--checkpoint-every", 4, "--out", other)
    for name in (first, last):
        shutil.copy(f"{other}/{name}", f"{out}/{name}")
    result = train("--resume", "--out", out, "--width", 8)
    check(result.returncode == 2 and "--width is 8, but the run in" in result.stderr, result.stderr)
    result = train("gpt", "--resume", "--out", good)
    check(result.returncode == 2 and "--model is gpt, but the run in" in result.stderr, result.stderr)

    # What would change the course is refused; the same settings, and more steps, are not.
    for option, value in (("--lr", 0.5), ("--seed", 2), ("--precision", "bf16"), ("--precision", "fp32"), ("--opt-level", "O0"), ("--model", "cnn"), ("--clip", 2),
                          ("--batch", 3), ("--loss-scale", "static:8"), ("--opt-level", "O2"), ("--steps", 7)):
        result = train("--resume", "--out", good, option, value)
        check(result.returncode == 2 and result.stderr.startswith(f"headroom: {option} is "), result.stderr)
    result = train("mlp", "--precision", "fp16", "--width", 8, "--steps", 8, "--resume", "--out", good)
    check(result.returncode == 0, result.stderr)
    for arguments in (["--resume"], ["--resume", "--out", f"{temp}/nothing"], ["--resume", "--out", image]):
        result = train(*arguments)
        check(result.returncode == 2 and "--resume needs the folder of a run" in result.stderr, result.stderr)
    check(not os.path.exists(f"{temp}/nothing"), "nothing is made")
    os.mkdir(f"{temp}/empty")
    result = train("--resume", "--out", f"{temp}/empty")
    check(result.returncode == 2 and "There is no good checkpoint" in result.stderr, result.stderr)
    # A run that begins anew leaves none of another one behind.
    result = train("mlp", "--steps", 2, "--out", out, "--checkpoint-every", 0)
    check(result.returncode == 0 and checkpoints(out) == [], checkpoints(out))

    # A full disk: training goes on, what was saved stays, and the end says that it is not saved.
    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    out = f"{temp}/full"
    train("mlp", "--width", 256, "--steps", 2, "--checkpoint-every", 1, "--out", out)
    before = {name: read(out, name) for name in checkpoints(out)}
    with open("/dev/full", "w") as nowhere:  # not even the sentence fits
        result = subprocess.run([program, "train", "--resume", "--out", out, "--steps", "4", "--threads", "1"],
                                stdout=subprocess.PIPE, stderr=nowhere, preexec_fn=no_room)
    check(result.returncode == 1 and b"4 of 4 steps" in result.stdout, result)
    result = train("--resume", "--out", out, "--steps", 4, preexec_fn=no_room)
    check(result.returncode == 1 and "Training continues without this checkpoint; that of step 2 is kept" in result.stderr
          and "the end of the run is not saved. " in result.stderr, (result.returncode, result.stderr))
    check({name: read(out, name) for name in checkpoints(out)} == before, "the checkpoints are as they were")
    check(not [name for name in os.listdir(out) if name.endswith(".tmp")], os.listdir(out))
    check(len(history(out)[1]) == 4 and train("--resume", "--out", out).returncode == 0, "it goes on later")
    if os.geteuid() != 0:
        os.chmod(out, 0o500)
        result = train("--resume", "--out", out)
        check(result.returncode == 2 and "could not be written" in result.stderr, result.stderr)
        os.chmod(out, 0o700)

    # Ctrl-C, kill and a terminal that is closed, which two may say, save where the run is.
    def start(out, **more):
        process = subprocess.Popen([program, "train", "mlp", "--width", "8", "--steps", "1000000", "--schedule", "constant",
                                    "--threads", "1", "--out", out],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
        while process.poll() is None and not (os.path.exists(f"{out}/history.jsonl") and len(history(out)[1]) > 10):
            time.sleep(0.05)
        return process
    for stop in ([signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]):
        out = f"{temp}/{stop[0].name}"
        process = start(out)
        for one in stop:
            process.send_signal(one)
        process.communicate(timeout=60)
        check(process.returncode == 130 and checkpoints(out) == [f"checkpoint-{len(history(out)[1]):06}.safetensors"],
              (stop, process.returncode, checkpoints(out)))
    # nohup: the run goes on.
    process = start(f"{temp}/nohup", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    check(process.poll() is None, "a run under nohup has ended")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    # While a run goes on, nobody else gets into its folder.
    out = f"{temp}/stopped"
    process = start(out)
    for arguments in (["--resume"], ["mlp"]):
        result = train(*arguments, "--out", out)
        check(result.returncode == 2 and "is being written by another run" in result.stderr, result.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = len(history(out)[1])
    check(process.returncode == 130 and checkpoints(out) == [f"checkpoint-{done:06}.safetensors"], checkpoints(out))
    result = train("--resume", "--out", out, "--steps", done + 3)
    check(result.returncode == 0 and f"resuming after step {done}" in result.stderr, result.stderr)
    check([step["step"] for step in history(out)[1]] == list(range(1, done + 4)), "no step twice")

finish()
