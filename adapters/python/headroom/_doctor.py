"""``python -m headroom doctor``: what Headroom finds on this machine, and a test that it computes correctly there."""

from __future__ import annotations

import argparse
import array
import ctypes.util
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import struct
import time
from collections.abc import Callable
from typing import Any

import headroom
from headroom import _core, _driver, _variant

_COUNT = 64  # weights of the self-test
_STEPS = 150
_BAD_STEP = 100  # its gradients contain inf
_TARGET = 0.25


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headroom doctor",
        description="Show what Headroom finds on this machine, and test it: a short training run in FP16 on the CPU, "
        "and on every GPU.",
        epilog="The exit code is 0 if every test has passed, and 1 otherwise.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = examine()
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything that the command prints."""
    cuda = _cuda()
    tests = {"cpu": _test(_train_on_cpu)}
    if _core.cuda_available():
        for index in range(len(cuda["gpus"])):
            tests[f"gpu {index}"] = _test(functools.partial(_train_on_gpu, index))
    problems = [text for text in (cuda.pop("problem"),) if text]
    return {
        "headroom": headroom.__version__,
        "package": str(pathlib.Path(__file__).parent),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(", "),
        "cpu": {"simd": headroom.simd_target(), "threads": headroom.num_threads(), "cores": os.cpu_count()},
        "cuda": cuda,
        "torch": _torch(),
        "mpi": shutil.which("mpirun") or "",
        "problems": problems,
        "self_test": tests,
        "ok": not problems and all(result["passed"] for result in tests.values()),
    }


def _cuda() -> dict[str, Any]:
    driver = _driver.cuda_version()
    problem, gpus = "", []
    try:
        gpus = _driver.gpus() if driver else []
    except _driver.DriverError as error:
        # A driver without a GPU, as in some containers, is no problem.
        problem = "" if "no CUDA-capable device" in str(error) else f"The CUDA driver does not work: {error}."
    if gpus and _core.cuda_version and not _core.cuda_available():
        problem = "There is a GPU, but the CUDA runtime cannot use it; is the driver too old?"
    return {
        "driver": f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        "built_for": _core.cuda_version,
        "modules": sorted(_variant.variants()),
        "gpus": [{"name": gpu.name, "capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                  "memory_gib": round(gpu.memory / 2**30, 1)} for gpu in gpus],
        "problem": problem,
    }


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {}
    try:
        import torch
        import torch.distributed as dist

        nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else ()
        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda or "",
            "nccl": ".".join(map(str, nccl)) or ("built in" if dist.is_available() and dist.is_nccl_available() else ""),
            "mpi": dist.is_available() and dist.is_mpi_available(),
        }
    except Exception as error:  # whatever a broken installation raises
        return {"version": _version_of("torch"), "problem": f"{type(error).__name__}: {error}"}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _test(run: Callable[[], object]) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        run()
        problem = ""
    except Exception as error:  # reported as the result of the test
        problem = f"{type(error).__name__}: {error}"
    return {"passed": not problem, "problem": problem, "seconds": round(time.perf_counter() - begin, 3)}


def _halves(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def _floats(halves: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(halves) // 2}e", halves))


def _train(scaler: Any, optimizer: Any, scale_loss: Callable[[], float], read: Callable[[], bytes],
           write: Callable[[bytes], None]) -> bytes:
    """Trains FP16 weights to _TARGET. Returns them; raises AssertionError if something is wrong. ``scale_loss`` scales a
    loss of 1."""
    for step in range(1, _STEPS + 1):
        scale = scale_loss()
        gradients = [scale * (weight - _TARGET) / 64 for weight in _floats(read())]
        if step == _BAD_STEP:
            gradients[3] = float("inf")
        write(_halves(gradients))
        before = read()
        scaler.step(optimizer, max_norm=10.0)
        scaler.update()
        report = scaler.report()
        if step == _BAD_STEP:
            _require(not report.applied and read() == before, "a step with inf was applied")
            _require(report.stats.inf_count == 1, "inf was not counted")
            _require(scaler.get_scale() == scale / 2, "the scale was not lowered after inf")
        else:
            _require(report.applied, f"step {step} was skipped: {report}")
    weights = read()
    worst = max(abs(weight - _TARGET) for weight in _floats(weights))
    _require(worst < 0.02, f"training does not converge: a weight is {worst:.3g} from its target")
    return weights


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _start() -> list[float]:
    return [i / 64 - 0.5 for i in range(_COUNT)]


def _train_on_cpu() -> bytes:
    weights, gradients = array.array("H"), array.array("H")
    weights.frombytes(_halves(_start()))
    gradients.frombytes(bytes(2 * _COUNT))
    optimizer = headroom.AdamW(
        {"w": (headroom.tensor(weights, "float16"), headroom.tensor(gradients, "float16"))}, lr=0.02,
        weight_decay=0.0)

    def write(halves: bytes) -> None:
        memoryview(gradients).cast("B")[:] = halves

    scaler = headroom.GradScaler("dynamic:init_scale=1024")
    return _train(scaler, optimizer, lambda: scaler.scale(1.0), weights.tobytes, write)


def _train_on_gpu(index: int) -> None:
    """As on the CPU, and with the same bits."""
    with _driver.memory(index, [2 * _COUNT, 2 * _COUNT, 4]) as (weights, gradients, number):
        weights.write(_halves(_start()))
        loss = _core.Tensor.from_pointer(number.address, "float32", 1, index, False, number)
        views = [_core.Tensor.from_pointer(block.address, "float16", _COUNT, index, False, block)
                 for block in (weights, gradients)]
        optimizer = headroom.AdamW({"w": (views[0], views[1])}, lr=0.02, weight_decay=0.0)
        scaler = headroom.GradScaler("dynamic:init_scale=1024", device=f"cuda:{index}")

        def scale_loss() -> float:
            number.write(struct.pack("<f", 1.0))
            scaler.scale(loss, out=loss)
            return float(struct.unpack("<f", number.read())[0])

        on_gpu = _train(scaler, optimizer, scale_loss, weights.read, gradients.write)
    _require(on_gpu == _train_on_cpu(), "the GPU computes other weights than the CPU")


def as_text(found: dict[str, Any]) -> str:
    cuda, torch = found["cuda"], found["torch"]
    modules = " and ".join(str(major) for major in cuda["modules"])
    lines = [
        ("Headroom", f"{found['headroom']}, Python {found['python']}, {found['system']}"),
        ("CPU", f"{_simd_text(found['cpu']['simd'])}, {found['cpu']['threads']} of {found['cpu']['cores']} threads"),
        ("CUDA", (f"driver for CUDA {cuda['driver']}; " if cuda["driver"] else "no driver; ")
         + (f"this package has modules for CUDA {modules}, and uses the one " if modules else "this package was built ")
         + (f"for CUDA {cuda['built_for']}" if cuda["built_for"] else "without CUDA")),
    ]
    for index, gpu in enumerate(cuda["gpus"]):
        lines.append((f"GPU {index}", f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB"))
    lines.append(("PyTorch", _torch_text(torch)))
    lines.append(("MPI", found["mpi"] or "no mpirun in PATH"))
    lines.append(("NCCL", f"{torch['nccl']}, in PyTorch" if torch.get("nccl") else _nccl_library()))
    lines += [("Problem", problem) for problem in found["problems"]]
    for place, result in found["self_test"].items():
        name = place.upper()
        state = "passed" if result["passed"] else f"FAILED: {result['problem']}"
        lines.append((f"Test {name}", f"{state} ({_STEPS} steps in FP16, {result['seconds']:.2f} s)"))
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def _simd_text(target: str) -> str:
    """A target's name, which is the one that HEADROOM_SIMD takes, and what it is usually called."""
    return f"AVX-512 ({target})" if target.startswith("AVX3") else target


def _torch_text(torch: dict[str, Any]) -> str:
    if not torch:
        return "not installed"
    if "problem" in torch:
        return f"{torch['version']}, which cannot be imported: {torch['problem']}"
    return f"{torch['version']}, " + (f"for CUDA {torch['cuda']}" if torch["cuda"] else "for the CPU")


def _nccl_library() -> str:
    return ctypes.util.find_library("nccl") or "not found"
