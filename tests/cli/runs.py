"""What the tests of the program share."""
import json
import os
import subprocess
import sys

results = []


def check(ok, what):
    results.append(bool(ok))
    if not ok:
        print("FAILED:", what)


def finish():
    """Says how many checks passed, and ends the program."""
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    sys.exit(not all(results))


def history(folder):
    """The lines of a run's history: header, steps, looks at the layers, end (None if it has none)."""
    with open(os.path.join(folder, "history.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if "overflow" in line]
    looks = [line for line in lines if "layers" in line]
    end = lines[-1] if "end" in lines[-1] else None
    return lines[0], steps, looks, end


def train(program, folder, model, *arguments):
    """Trains, and gives the summary and the loss of every step."""
    result = subprocess.run([program, "train", model, "--out", folder, *map(str, arguments)],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    _, steps, _, end = history(folder)
    loss, score = list(end["results"].values())[:2]
    first_skip = next((i for i, step in enumerate(steps) if step["overflow"]), len(steps))
    summary = {"steps": end["steps"], "skipped": end["skipped"], "first_skip": first_skip, "loss": loss, "score": score}
    return summary, [step["loss"] for step in steps]
