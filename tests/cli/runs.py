"""What the tests that train for a while share."""
import json
import os
import subprocess


def train(program, folder, model, *arguments):
    """Trains, and gives the summary and the loss of every step."""
    result = subprocess.run([program, "train", model, "--out", folder, *map(str, arguments)],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with open(os.path.join(folder, "summary.json")) as file:
        summary = json.load(file)
    with open(os.path.join(folder, "steps.jsonl")) as file:
        losses = [json.loads(line)["loss"] for line in file]
    return summary, losses
