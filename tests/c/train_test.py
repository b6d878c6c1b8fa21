#!/usr/bin/env python3
"""The C example trains: its loss falls and overflowing steps are skipped. With --valgrind it also runs
without memory errors or leaks; the exit code is 77 if valgrind is not installed."""
import os
import re
import shutil
import subprocess
import sys

program = [sys.argv[-1]]
environment = dict(os.environ)
if "--valgrind" in sys.argv:
    if shutil.which("valgrind") is None:
        print("skipped: valgrind is not installed")
        sys.exit(77)
    program = ["valgrind", "--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite,possible",
               "--error-exitcode=9", *program]
    environment["HEADROOM_SIMD"] = "SSE4"  # valgrind does not support AVX-512

run = subprocess.run(program, capture_output=True, text=True, env=environment)
assert run.returncode == 0, run.stdout + run.stderr
steps = re.findall(r"step +(\d+) +loss (\S+) +(\w+)", run.stdout)
skipped = sum(result == "skipped" for _, _, result in steps)
assert float(steps[-1][1]) < 1e-4 * float(steps[0][1]), run.stdout
assert skipped > 0 and f"{skipped} of 600 steps skipped" in run.stdout, run.stdout

bad = subprocess.run([sys.argv[-1], "none"], capture_output=True, text=True)
assert bad.returncode == 2 and "usage" in bad.stderr, bad
