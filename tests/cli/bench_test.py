#!/usr/bin/env python3
"""`headroom bench` prints every figure with its floor. The speeds themselves are not tested."""
import json
import os
import struct
import subprocess
import sys
import tempfile

result = subprocess.run([sys.argv[1], "bench", "--json", "--megabytes", "64", "--repetitions", "1"],
                        capture_output=True, text=True)
assert result.returncode == 0, result.stderr
figures = {}
for line in result.stdout.splitlines():
    figure = json.loads(line)
    assert list(figure) == ["name", "gbps", "floor_gbps", "of_floor"], figure
    assert figure["gbps"] > 0 and figure["floor_gbps"] > 0, figure
    assert abs(figure["of_floor"] - figure["gbps"] / figure["floor_gbps"]) < 1e-9, figure
    figures[figure["name"]] = figure
for name in ("measure/f32", "measure/f16", "measure/bf16", "measure/f64", "adamw/f32", "adamw/f16",
             "adamw/bf16", "measure/f16/threads=2", "adamw/f16/threads=2",
             "measure/f16/tensors=10000", "adamw/f16/tensors=10000"):
    assert name in figures, name

result = subprocess.run([sys.argv[1], "bench", "--json", "--filter", "nothing"], capture_output=True, text=True)
assert result.returncode == 2 and "No figure has 'nothing'" in result.stderr, result

# Conflicting options are refused, not ignored.
for option in (["--filter", "measure"], ["--megabytes", "64"]):
    result = subprocess.run([sys.argv[1], "bench", "--libtorch", *option], capture_output=True, text=True)
    assert result.returncode == 2 and f"--libtorch and {option[0]} cannot be used together" in result.stderr, result

# An unknown SIMD target gives an error and exit code 2.
result = subprocess.run([sys.argv[1], "bench"], capture_output=True, text=True,
                        env={**os.environ, "HEADROOM_SIMD": "nonsense"})
assert result.returncode == 2 and "'nonsense'" in result.stderr and not result.stdout, result

# Also where several threads would need it: an exception in a thread would end the process.
with tempfile.NamedTemporaryFile(suffix=".npy") as grads:
    header = b"{'descr': '<f2', 'fortran_order': False, 'shape': (16777216,), }"
    grads.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    grads.truncate(grads.tell() + 2 * 16777216)
    grads.flush()
    result = subprocess.run([sys.argv[1], "inspect", grads.name], capture_output=True, text=True,
                            env={**os.environ, "HEADROOM_SIMD": "nonsense"})
    assert result.returncode == 2 and "'nonsense'" in result.stderr, result
print("1 passed, 0 failed")
