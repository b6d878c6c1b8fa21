#!/usr/bin/env python3
"""The C example trains: its loss falls, and the steps that overflow are skipped. With --valgrind it
does so without an error or a leak; exit code 77 says that there is no valgrind."""
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
    environment["HEADROOM_SIMD"] = "SSE4"  # valgrind does not know AVX-512

result = subprocess.run(program, capture_output=True, text=True, env=environment)
assert result.returncode == 0, result.stdout + result.stderr
steps = re.findall(r"step +(\d+) +loss (\S+) +(\w+)", result.stdout)
skipped = sum(what == "skipped" for _, _, what in steps)
assert float(steps[-1][1]) < 1e-4 * float(steps[0][1]), result.stdout
assert skipped > 0 and f"{skipped} of 600 steps skipped" in result.stdout, result.stdout

bad = subprocess.run([sys.argv[-1], "none"], capture_output=True, text=True)
assert bad.returncode == 2 and "usage" in bad.stderr, bad
