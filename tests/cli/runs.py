"""Shared by the tests of the program: checks, a runner, and training runs with their histories."""
import json
import os
import subprocess
import sys
import tempfile
import time

results = []
current_test = ""


def check(ok, what):
    """Counts a check. A failed check is printed and does not end the test."""
    results.append(bool(ok))
    if not ok:
        print(f"FAILED: {current_test} {what}")


def finish():
    """Prints how many checks passed and exits."""
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    sys.exit(not all(results))


def run_tests(names):
    """Runs every function test_* of `names`, a module's globals(), with a temporary folder if it takes one; exits."""
    global current_test
    for name, test in list(names.items()):
        if name.startswith("test_"):
            current_test = f"{name}:"
            checks = len(results)
            with tempfile.TemporaryDirectory() as folder:
                test(folder) if test.__code__.co_argcount else test()
            if len(results) == checks:  # a test that uses assert counts as one check
                results.append(True)
    finish()


def history(folder):
    """The lines of a run's history: header, steps, layer records, end (None if it has none)."""
    with open(os.path.join(folder, "history.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if "overflow" in line]
    layers = [line for line in lines if "layers" in line]
    end = lines[-1] if "end" in lines[-1] else None
    return lines[0], steps, layers, end


def wait_for_steps(process, folder, steps=10):
    """Waits until a running process has recorded so many steps, or has ended."""
    path = os.path.join(folder, "history.jsonl")

    def lines():
        # Counted, not parsed: the file may be missing, empty, or end in half a line while the run writes it.
        try:
            with open(path, "rb") as file:
                return file.read().count(b"\n")
        except FileNotFoundError:
            return 0

    while process.poll() is None and lines() <= steps + 1:  # the first line is the header
        time.sleep(0.05)


def train(program, folder, model, *arguments):
    """Trains a model and returns the summary of the run and the loss of every step."""
    result = subprocess.run([program, "train", model, "--out", folder, *map(str, arguments)],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    _, steps, _, end = history(folder)
    loss, score = list(end["results"].values())[:2]
    first_skip = next((i for i, step in enumerate(steps) if step["overflow"]), len(steps))
    summary = {"steps": end["steps"], "skipped": end["skipped"], "first_skip": first_skip, "loss": loss, "score": score}
    return summary, [step["loss"] for step in steps]
