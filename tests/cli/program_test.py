#!/usr/bin/env python3
"""program_test.py PROGRAM: help, errors, output and exit codes, and the start of headroom-train."""
import os
import shutil
import subprocess
import sys
import tempfile

PROGRAM = os.path.abspath(sys.argv[1])


def run(*arguments, program=PROGRAM):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)


def main():
    shown = run("--version")
    assert shown.returncode == 0 and shown.stdout.startswith("headroom "), shown
    shown = run("--help")
    for command in ("train", "compare", "report", "inspect", "replay", "state", "bench"):
        assert f"\n  {command} " in shown.stdout, shown
    for wrong in ([], ["nothing"], ["replay", "--nothing"]):
        shown = run(*wrong)
        assert shown.returncode == 2 and "--help" in shown.stderr + shown.stdout, shown
    shown = run("inspekt", "x")
    assert shown.returncode == 2 and shown.stderr.startswith("headroom: 'inspekt' is not a command"), shown

    shown = run("state", "scaler.pt", "--to", "torch")  # in the Python package
    assert shown.returncode == 2 and "python -m headroom state FILE" in shown.stderr, shown

    # Control characters in quoted arguments are replaced.
    for wrong in (["\x1b[2J"], ["replay", "x", "--\x1b[2J"],
                  ["replay", "\x1b]0;x\x07\u009b\u202e\x7f\n\nheadroom: fake"]):
        shown = run(*wrong)
        assert shown.returncode == 2 and not set("\x1b\x07\x7f\u009b\u202e") & set(shown.stderr), shown
        assert "?[2J" in shown.stderr or "'?]0;x???? " in shown.stderr and "\nheadroom: fake" not in shown.stderr, shown

    # Output that cannot be written is an error; a closed pipe is not.
    trace = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "traces", "field_fp16.jsonl")
    for command in ("--version", "--help", "replay --help", f"replay {trace}", f"replay --json {trace}",
                    "bench --json --filter measure/f16 --megabytes 64 --repetitions 1"):
        for lost in (">/dev/full", ">&-"):
            shown = subprocess.run(f"{PROGRAM} {command} {lost}", shell=True, capture_output=True, text=True)
            assert shown.returncode == 2 and shown.stderr.startswith("headroom: "), (command, lost, shown)
        # The program must exit with 141 itself: if SIGPIPE killed it, the code would be -13.
        reader, writer = os.pipe()
        os.close(reader)
        piped = subprocess.run([PROGRAM, *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert piped.returncode == 141 and "output" not in piped.stderr, (command, piped)

    with_trainer = os.path.exists(os.path.join(os.path.dirname(PROGRAM), "headroom-train"))
    if with_trainer:
        for command in ("train mlp --steps 2 --threads 1", "train --help", "compare --help"):
            shown = subprocess.run(f"{PROGRAM} {command} >/dev/full", shell=True, capture_output=True, text=True)
            assert shown.returncode == 2 and "headroom: " in shown.stderr, (command, shown)
        shown = run("train", "--help")
        assert shown.returncode == 0 and "--precision" in shown.stdout, shown
        # Arguments are passed on unchanged.
        shown = run("train", "--steps", "3", "--threads", "1", "--", "no model, ''")
        assert shown.returncode == 2 and "There is no model 'no model, '''" in shown.stderr, shown
    with tempfile.TemporaryDirectory() as folder:
        alone = shutil.copy(PROGRAM, os.path.join(folder, "headroom"))
        for command in (["train", "mlp"], ["compare"], ["bench", "--libtorch"]):
            shown = run(*command, program=alone)
            reason = "headroom-train' could not be started" if with_trainer else "need LibTorch, which this build lacks"
            assert shown.returncode == 2 and reason in shown.stderr and not shown.stdout, shown
        assert run("--version", program=alone).returncode == 0


if __name__ == "__main__":
    main()
