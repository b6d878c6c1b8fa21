"""python -m headroom doctor, and the choice of the compiled module."""

import json
import subprocess
import sys

import pytest

import headroom
from headroom import _core, _doctor, _driver, _variant


def run_doctor(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "headroom", "doctor", *arguments], capture_output=True, text=True, timeout=300
    )


def test_doctor_reports_this_machine_and_passes():
    run = run_doctor("--json")
    found = json.loads(run.stdout)
    assert run.returncode == 0 and run.stderr == "" and found["ok"]
    assert found["headroom"] == headroom.__version__
    assert found["cpu"]["simd"] == headroom.simd_target()
    assert found["self_test"]["cpu"]["passed"]
    assert found["cuda"]["built_for"] == _core.cuda_version
    assert len(found["self_test"]) == 1 + len(found["cuda"]["gpus"])


def test_doctor_prints_a_line_for_each_finding():
    run = run_doctor()
    names = [line[:11].strip() for line in run.stdout.splitlines()]
    assert names[:3] == ["Headroom", "CPU", "CUDA"] and names[-1].startswith("Test")
    assert "passed" in run.stdout


def test_doctor_reports_a_failed_test_by_its_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "_TARGET", 1000.0)  # out of reach
    assert _doctor.main([]) == 1
    assert "FAILED: AssertionError: training does not converge" in capsys.readouterr().out


def test_doctor_reports_a_driver_that_does_not_work(monkeypatch):
    def broken():
        raise _driver.DriverError("cuInit: system not yet initialized")

    monkeypatch.setattr(_driver, "cuda_version", lambda: 13000)
    monkeypatch.setattr(_driver, "gpus", broken)
    found = _doctor.examine()
    assert not found["ok"] and "system not yet initialized" in found["problems"][0]


def test_the_newest_module_that_the_driver_runs_is_chosen():
    assert _variant.choose([12, 13], 13, "") == 13
    assert _variant.choose([12, 13], 14, "") == 13
    assert _variant.choose([12, 13], 12, "") == 12
    assert _variant.choose([13], 12, "") is None
    assert _variant.choose([12, 13], 11, "") is None
    assert _variant.choose([12, 13], None, "") is None


def test_a_gpu_that_cuda_13_has_no_code_for_gets_the_module_for_cuda_12():
    assert _variant.choose([12, 13], 13, "", (7, 0)) == 12
    assert _variant.choose([12, 13], 13, "", (7, 5)) == 13
    assert _variant.choose([13], 13, "", (7, 0)) == 13  # there is no other
    assert _variant.choose([12, 13], 13, "13", (7, 0)) == 13


def test_capabilities_of_gpus_are_read_without_starting_cuda(monkeypatch):
    found = {0: (9, 0), 1: (7, 0)}

    class Library:
        nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)

        @staticmethod
        def nvmlDeviceGetCount_v2(count):
            count._obj.value = len(found)
            return 0

        @staticmethod
        def nvmlDeviceGetHandleByIndex_v2(index, device):
            device._obj.value = index.value + 1
            return 0

        @staticmethod
        def nvmlDeviceGetCudaComputeCapability(device, major, minor):
            major._obj.value, minor._obj.value = found[device.value - 1]
            return 0

    monkeypatch.setattr(_driver, "_management_library", lambda: Library)
    assert _driver.capabilities() == [(9, 0), (7, 0)]
    monkeypatch.setattr(_driver, "_management_library", lambda: None)
    assert _driver.capabilities() == []


def test_the_doctor_calls_avx3_by_its_usual_name():
    assert _doctor._simd_text("AVX3_DL") == "AVX-512 (AVX3_DL)"
    assert _doctor._simd_text("AVX2") == "AVX2"


def test_headroom_cuda_chooses_the_module():
    assert _variant.choose([12, 13], 13, "off") is None
    assert _variant.choose([12, 13], 13, "12") == 12
    with pytest.raises(ImportError, match="HEADROOM_CUDA is '11'; this package has: off, 12, 13."):
        _variant.choose([12, 13], 13, "11")
