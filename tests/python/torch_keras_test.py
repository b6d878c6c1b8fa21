"""headroom.keras on the torch and the JAX backend; keras_job.py has the checks."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

# Not imported here: without a backend in the environment Keras wants TensorFlow.
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)
JOB = pathlib.Path(__file__).with_name("keras_job.py")
CHECKS = re.findall(r"^def (check_\w+)", JOB.read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=["torch", "jax"])
def job(request, tmp_path_factory):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    ran = subprocess.run([sys.executable, JOB, request.param, folder], capture_output=True, text=True)
    return folder, ran


@pytest.mark.parametrize("check", CHECKS)
def test_keras(job, check):
    _, ran = job
    assert check in ran.stdout.split(), ran.stderr


@pytest.mark.parametrize("name, layout", [("model.keras", "headroom"), ("theirs.keras", "keras"),
                                          ("ours.weights.h5", "keras")])
def test_headroom_state_reads_files_of_keras(job, name, layout):
    folder, _ = job
    command = [sys.executable, "-m", "headroom", "state", folder / name]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.stdout.startswith(f"the whole file: {layout}\n"), shown.stderr
    converted = json.loads(subprocess.run([*command, "--to", "torch"], capture_output=True, text=True).stdout)
    assert f"  scale {converted['scale']:.9g}\n" in shown.stdout
