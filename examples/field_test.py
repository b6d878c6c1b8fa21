#!/usr/bin/env python3
"""The field example: FP16 without scaling fails; FP16 with scaling and BF16 match FP32."""
import re
import subprocess
import sys


def r2(*arguments):
    result = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, check=True)
    return float(re.search(r"R2 (\S+)", result.stdout)[1])


fp32, lost = r2("fp32", "none"), r2("fp16", "none")
assert fp32 > 0.95, fp32
assert lost < fp32 - 0.1, (fp32, lost)
for arguments in (("fp16", "dynamic"), ("fp16", "static:1024"), ("bf16", "none")):
    assert abs(r2(*arguments) - fp32) < 0.01, (arguments, fp32)
print("1 passed, 0 failed")
