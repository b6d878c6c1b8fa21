#!/usr/bin/env python3
"""`headroom train`: every model, level and kind of data, invalid input, signals and the files that it writes."""
import fcntl
import json
import os
import pty
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import tfevents
from pictures import png
from runs import check, history, run_tests, wait_for_steps

program = sys.argv[1]
TEXT = b"to be or not to be, that is the question. " * 30


def train(*arguments, threads=1):
    return subprocess.run([program, "train", *map(str, arguments), "--threads", str(threads)],
                          capture_output=True, text=True)


def steps_of(folder):
    return history(folder)[1]


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
    return path


def replay(*arguments):
    return subprocess.run([program, "replay", *arguments], capture_output=True, text=True)


def limit_file_size(size):
    """Simulates a full disk in a child process."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def make_idx_folder(path, side=12, count=64):
    """A data set in the format of MNIST with random images whose brightness depends on the label."""
    os.makedirs(path)
    random.seed(1)
    for prefix in ("train", "t10k"):
        labels = bytes(random.randrange(10) for _ in range(count))
        images = b"".join(bytes(random.randrange(64) + 19 * label for _ in range(side * side))
                          for label in labels)
        write(f"{path}/{prefix}-images-idx3-ubyte", struct.pack(">IIII", 0x803, count, side, side) + images)
        write(f"{path}/{prefix}-labels-idx1-ubyte", struct.pack(">II", 0x801, count) + labels)
    return path


def test_every_model_trains_at_every_level(temp):
    short = {"field": [], "mlp": [], "cnn": ["--batch", 8], "gpt": ["--batch", 2, "--context", 16],
             "lm": ["--batch", 2000]}
    for model, small in short.items():
        for level in (["--precision", "fp32"], ["--precision", "fp16"], ["--precision", "bf16"],
                      ["--precision", "fp16", "--opt-level", "O2"],
                      ["--precision", "fp16", "--opt-level", "O3", "--optimizer", "sgd", "--lr", 0.01],
                      ["--precision", "bf16", "--opt-level", "O2", "--loss-scale", "none"],
                      ["--precision", "fp16", "--fake-quant", "int8", "--clip", 1, "--accumulate", 2]):
            out = f"{temp}/{model}"
            result = train(model, "--steps", 4, "--out", out, *small, *level)
            check(result.returncode == 0, f"{model} {level}: {result.stderr}")
            if result.returncode != 0:
                continue
            steps = steps_of(out)
            check([step["step"] for step in steps] == [1, 2, 3, 4], f"{model} {level}: {steps}")
            check(all(step["loss"] > 0 for step in steps if not step["overflow"]),
                  f"{model} {level}: {steps}")
            header, _, layers, end = history(out)
            check(end["end"] == "finished" and end["steps"] == 4, end)
            check(header["settings"]["model"] == model and len(layers) == 1, header)
            check(os.path.getsize(f"{out}/report.html") > 10000, "report.html")
            check(os.path.getsize(f"{out}/curves.png") > 1000, "curves.png")
    result = replay("--json", f"{temp}/lm/history.jsonl")
    check(result.returncode == 0 and len(result.stdout.splitlines()) == 4, "replay reads a history")
    check(os.path.exists(f"{temp}/field/field.png"), "field.png")


def test_seed_determines_the_run(temp):
    losses = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train("mlp", "--precision", "fp16", "--steps", 5, "--seed", seed, "--out", f"{temp}/{name}")
        losses[name] = [step["loss"] for step in steps_of(f"{temp}/{name}")]
    check(losses["a"] == losses["b"] and losses["a"] != losses["c"], losses)


def test_overflow_lowers_the_scale_and_records_the_culprit(temp):
    # The megatron preset starts with a scale that is too high.
    train("mlp", "--precision", "fp16", "--steps", 12, "--loss-scale", "megatron", "--out", f"{temp}/over")
    steps = steps_of(f"{temp}/over")
    check(steps[0]["overflow"] and ".weight: " in steps[0]["culprit"], steps[0])
    check(steps[-1]["scale"] < steps[0]["scale"], steps[-1])
    check(steps[0]["overflow_at"] == steps[0]["scale"] and "amax" not in steps[0], steps[0])


def test_replay_of_a_history_gives_the_same_scales(temp):
    # The gradients of `field` leave room for the headroom policy to grow by 80 times what it needs, on any machine.
    train("field", "--precision", "fp16", "--steps", 300, "--loss-scale", "headroom", "--out", f"{temp}/room")
    steps = steps_of(f"{temp}/room")
    check(steps[-1]["scale"] > steps[0]["scale"] == 65536, steps[-1])
    check(all(step["amax"] > 0 for step in steps if not step["overflow"]), steps)
    result = replay("--policy", "headroom", "--json", f"{temp}/room/history.jsonl")
    check([json.loads(line)["scale_used"] for line in result.stdout.splitlines()]
          == [step["scale"] for step in steps], "replay follows the trainer")
    train("mlp", "--steps", 20, "--layers", 5, "--out", f"{temp}/plain")
    result = replay("--policy", "headroom,static,none", "--json", f"{temp}/plain/history.jsonl")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    check(len(rows) == 3 and rows[0]["values"] > 0 and rows[0]["lost"] <= rows[2]["lost"], result)


def test_run_that_only_skips_stops_and_keeps_its_history(temp):
    result = train("mlp", "--precision", "fp16", "--steps", 200, "--loss-scale", "static:1e30",
                   "--out", f"{temp}/stuck")
    check(result.returncode == 3 and "100 steps in a row" in result.stderr, result.stderr)
    check(len(steps_of(f"{temp}/stuck")) == 100, "the skipped steps are recorded")
    check("final scale       1e+30\n" in result.stdout and "scale 1e+30 " in result.stderr, result)


def test_nan_loss_is_printed_without_a_sign(temp):
    result = train("mlp", "--steps", 5, "--lr", 1e30, "--optimizer", "sgd")
    check(" loss              nan\n" in result.stdout and "-nan" not in result.stdout + result.stderr, result)


def test_user_data_is_read(temp):
    image = write(f"{temp}/image.png", png(20, 14))
    text = write(f"{temp}/text", TEXT)
    folder = make_idx_folder(f"{temp}/idx")
    for model, data in (("field", image), ("gpt", text), ("lm", text), ("mlp", folder), ("cnn", folder)):
        result = train(model, "--data", data, "--steps", 3, "--precision", "fp16", "--batch", 32,
                       *(["--context", 16] if model == "gpt" else []))
        check(result.returncode == 0, f"{model} --data: {result.stderr}")
        if model == "field":
            check("PSNR" in result.stdout, result.stdout)


def invalid_settings():
    """Pairs of a part of the error and the arguments that cause it."""
    return (
            ("no model 'nosuch'", ["nosuch"]),
            ("--layers is -1", ["mlp", "--layers", -1]),
            ("--port", ["mlp", "--watch", "--port", 70000]),
            ("--batch is 0", ["gpt", "--batch", 0]),
            ("--steps is -3", ["field", "--steps", -3]),
            ("--width is 63", ["gpt", "--width", 63]),
            ("--depth is 0", ["mlp", "--depth", 0]),
            ("--lr is nan", ["field", "--lr", "nan"]),
            ("--lr is -1", ["field", "--lr", -1]),
            ("--clip is -1", ["field", "--clip", -1]),
            ("--clip is 0", ["field", "--clip", 0]),
            ("--clip is 1e-50", ["field", "--clip", "1e-50"]),
            ("--seed is -1; it must be 0 or more", ["field", "--seed", -1]),
            ("--inject-seed is -1; it must be", ["field", "--inject-seed", -1]),
            ("'staticfoo:3'", ["field", "--loss-scale", "staticfoo:3"]),
            ("'fp8'", ["field", "--precision", "fp8"]),
            ("contradict", ["field", "--precision", "fp32", "--opt-level", "O2"]),
            ("scale is 0;", ["lm", "--loss-scale", "static:0"]),
            ("static:x", ["lm", "--loss-scale", "static:x"]),
            ("megatron", ["lm", "--loss-scale", "foo"]),
            ("no CUDA", ["mlp", "--device", "cuda"]),
            ("'int4'", ["mlp", "--fake-quant", "int4"]),
            ("cannot be created", ["mlp", "--out", "/proc/no/such"]),
            ("no option '--nonsense'", ["mlp", "--nonsense"]))


def invalid_data(temp):
    """As invalid_settings(), for --data."""
    oversized = make_idx_folder(f"{temp}/oversized")
    write(f"{oversized}/train-images-idx3-ubyte", struct.pack(">IIII", 0x803, 1 << 30, 1 << 30, 1 << 30))
    packed = make_idx_folder(f"{temp}/packed")
    write(f"{packed}/train-images-idx3-ubyte", b"\x1f\x8b" + bytes(100))
    fewer = make_idx_folder(f"{temp}/fewer")
    write(f"{fewer}/train-labels-idx1-ubyte", struct.pack(">II", 0x801, 3) + bytes(3))
    text = write(f"{temp}/text", TEXT)
    return (
            ("cannot be opened", ["field", "--data", "/nope.png"]),
            ("not a PNG", ["field", "--data", text]),
            ("damaged", ["field", "--data", write(f"{temp}/cut.png", png(20, 14)[:60])]),
            ("not a folder", ["cnn", "--data", "/nope"]),
            ("has no train-images", ["cnn", "--data", temp]),
            ("impossible size", ["cnn", "--data", oversized]),
            ("gunzip", ["cnn", "--data", packed]),
            ("different sets", ["cnn", "--data", fewer]),
            ("is a folder", ["gpt", "--data", temp]),
            ("is empty", ["lm", "--data", "/dev/null"]),
            ("smaller --context", ["gpt", "--data", write(f"{temp}/tiny", b"tiny")]))


def test_invalid_input_is_refused_and_writes_nothing(temp):
    for part, arguments in (*invalid_settings(), *invalid_data(temp)):
        out = f"{temp}/untouched"
        result = train(*arguments, *([] if "--out" in arguments else ["--out", out]))
        message = result.stderr.strip()
        check(result.returncode == 2 and part in message and not result.stdout,
              f"{arguments}: {result.returncode} {message}")
        check(not os.path.exists(out), f"{arguments} wrote something")


def test_full_disk_is_reported(temp):
    # A disk of 64 KB where it can be mounted, else a limit on the file size.
    out = f"{temp}/full"
    os.mkdir(out)
    small_disk = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                  'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"', "sh", out]
    try:
        mounts = subprocess.run([*small_disk, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        mounts = False
    result = subprocess.run([*(small_disk if mounts else []), program, "train", "mlp", "--width", "16",
                             "--steps", "2000", "--checkpoint-every", "0", "--threads", "1", "--out", out],
                            capture_output=True, text=True,
                            preexec_fn=None if mounts else limit_file_size(50_000))
    full = " completely: the disk is full" if mounts else ": File too large"
    check(result.returncode == 2 and f"history.jsonl' could not be written{full}" in result.stderr, result)


def test_planted_links_and_pipes_are_refused(temp):
    victim = write(f"{temp}/victim", b"precious")
    for name, code in (("history.jsonl", 2), ("checkpoint.lock", 2), ("report.html", 1), ("curves.png", 1),
                       ("checkpoint-000003.safetensors", 0), ("events.out.tfevents.headroom", 2)):
        for put, kind in ((lambda path: os.symlink(victim, path), "a symbolic link"), (os.mkfifo, "a pipe")):
            out = f"{temp}/planted"
            shutil.rmtree(out, ignore_errors=True)
            os.mkdir(out)
            put(f"{out}/{name}")
            result = train("mlp", "--width", 16, "--steps", 3, "--tensorboard", "--out", out)
            # A new run removes old checkpoints, links and pipes included.
            check(result.returncode == code, f"{name} {kind}: {result}")
            check(code == 0 or f"{name}' could not be written: it is {kind}" in result.stderr,
                  f"{name} {kind}: {result}")
    with open(victim, "rb") as file:
        check(file.read() == b"precious", "the target of the link is unchanged")


def test_run_continues_if_standard_error_cannot_be_written(temp):
    for redirection in ("2>/dev/full", "2>&-", "0>&- 2>&-"):
        out = f"{temp}/run"
        result = subprocess.run(f"{program} train mlp --width 16 --steps 60 --threads 1 --out {out} {redirection}",
                                shell=True, capture_output=True, text=True)
        check(result.returncode == 0 and "60 of 60 steps" in result.stdout, f"{redirection}: {result}")
        check(len(steps_of(out)) == 60 and os.path.exists(f"{out}/report.html"), redirection)


def test_data_path_that_a_checkpoint_cannot_store_is_refused(temp):
    # Checkpoints hold UTF-8 only. Without checkpoints the path is accepted.
    odd = os.fsdecode(os.fsencode(temp) + b"/\xff.txt")
    write(odd, TEXT)
    for more, code in ((["--out", f"{temp}/untouched"], 2), ([], 0),
                       (["--out", f"{temp}/odd", "--checkpoint-every", 0], 0)):
        result = train("lm", "--data", odd, "--steps", 3, "--batch", 32, *more)
        check(result.returncode == code and ("is not UTF-8" in result.stderr) == (code == 2), result.stderr)
    check(not os.path.exists(f"{temp}/untouched"), "nothing is written")


def test_unwritable_report_or_plot_does_not_hide_the_result(temp):
    for name, other in (("report.html", "curves.png"), ("curves.png", "report.html")):
        for more, code in ((["--inject", "overflow:p=1"], 3), ([], 1)):
            out = f"{temp}/blocked-{name}-{code}"
            os.makedirs(f"{out}/{name}")
            result = train("mlp", "--precision", "fp16", "--width", 16, "--steps", 50, "--out", out, *more)
            check(result.returncode == code and f"{name}' could not be written" in result.stderr, result)
            check(("stopped at step" in result.stderr) == (code == 3) and "final scale" in result.stdout, result)
            check(os.path.isfile(f"{out}/{other}") and not [x for x in os.listdir(out) if x.endswith("tmp")], other)


def test_files_that_do_not_fit_are_reported_and_leave_no_part(temp):
    # Only the history fits.
    out = f"{temp}/small"
    result = subprocess.run([program, "train", "mlp", "--steps", "20", "--threads", "1", "--out", out],
                            capture_output=True, text=True,
                            preexec_fn=limit_file_size(10_000))
    end = result.stderr[result.stderr.find("the end of the run is not saved. "):]
    for name in ("curves.png", "report.html"):
        check(result.returncode == 1 and f"{name}' could not be written: File too large" in end, result)
    check(sorted(os.listdir(out)) == ["checkpoint.lock", "history.jsonl"], os.listdir(out))


def test_interrupted_run_keeps_its_history(temp):
    process = subprocess.Popen([program, "train", "mlp", "--steps", "10000000", "--threads", "1",
                                "--out", f"{temp}/stop"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(process, f"{temp}/stop")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    check(process.returncode == 130 and "stopped by hand" in output, (process.returncode, output, errors))
    _, steps, _, end = history(f"{temp}/stop")
    check(end["end"] == "stopped by hand" and end["steps"] == len(steps) > 10, end)
    check("steps/s" in errors and "\r" not in errors, "plain lines without a terminal")


def test_closed_pipe_does_not_end_the_run(temp):
    out = f"{temp}/piped"
    process = subprocess.Popen([program, "train", "mlp", "--width", "16", "--steps", "60", "--threads", "1",
                                "--out", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.readline()
    process.stdout.close()
    check(process.wait() == 141, process.returncode)
    _, steps, _, end = history(out)
    check(len(steps) == 60 and end["end"] == "finished", end)
    check({"checkpoint-000060.safetensors", "curves.png", "report.html"} <= set(os.listdir(out)), os.listdir(out))


def test_watched_run_serves_its_report_until_its_end(temp):
    process = subprocess.Popen([program, "train", "mlp", "--steps", "3000", "--threads", "1", "--watch"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=temp)
    url = process.stderr.readline().split()[-1]
    check(url.startswith("http://127.0.0.1:"), url)
    counts, end = [], ""
    while not end and process.poll() is None:
        with urllib.request.urlopen(url + "data", timeout=60) as answer:
            run = json.load(answer)["runs"][0]
        counts, end = counts + [run["count"]], run["end"]
        time.sleep(0.3)
    output, errors = process.communicate(timeout=60)
    check(process.returncode == 0 and "Watch at" not in errors, errors)
    check(end == "finished" and len(set(counts)) > 1 and counts[-1] == 3000, (end, counts))
    check(os.path.exists(f"{temp}/headroom-train/report.html"), "the default folder")


def test_watch_on_a_used_port_is_refused_and_writes_nothing(temp):
    port = socket.create_server(("127.0.0.1", 0))
    result = train("mlp", "--watch", "--port", port.getsockname()[1], "--out", f"{temp}/untouched")
    check(result.returncode == 2 and "cannot be used" in result.stderr, result.stderr)
    check(not os.path.exists(f"{temp}/untouched"), "nothing is written if the port is in use")


def test_layers_are_recorded_at_the_requested_interval(temp):
    result = train("mlp", "--precision", "fp16", "--steps", 9, "--layers", 4, "--out", f"{temp}/layers")
    records = history(f"{temp}/layers")[2]
    check([record["step"] for record in records] == [1, 5, 9], records)
    names = [layer["name"] for layer in records[0]["layers"]]
    check("hidden0.weight" in names and records[0]["first_to_overflow"] in names, names)
    check(f"overflows first   {records[-1]['first_to_overflow']}" in result.stdout, result.stdout)
    check(not os.path.exists(f"{temp}/layers/events.out.tfevents.headroom"), "events are written on request only")
    result = train("mlp", "--steps", 3, "--layers", 0, "--tensorboard", "--out", f"{temp}/layers")
    check(history(f"{temp}/layers")[2] == [] and "overflows first" not in result.stdout, result.stdout)
    events = tfevents.read(f"{temp}/layers/events.out.tfevents.headroom")
    check([step for step, tag, _ in events if tag == "train/loss"] == [1, 2, 3], events)
    settings = events[0][2]
    check(settings["steps"] == 3 and settings["precision"] == "fp16" and settings["optimizer"] == "adamw", settings)
    results = history(f"{temp}/layers")[3]["results"]
    check({tag for _, tag, _ in events if tag.startswith("results/")} == {f"results/{name}" for name in results}, events)


def test_terminal_shows_a_progress_bar(temp):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen([program, "train", "mlp", "--steps", "300", "--threads", "1"], stdout=subprocess.DEVNULL,
                               stderr=child)
    os.close(child)
    shown = b""
    try:
        while data := os.read(parent, 4096):
            shown += data
    except OSError:
        pass
    check(process.wait() == 0 and b"[#" in shown and b"left" in shown and b"\r" in shown, shown[:200])


run_tests(globals())
