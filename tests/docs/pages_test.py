#!/usr/bin/env python3
"""docs/reliability.md lists every public class with its thread safety and its state after an error; docs/cuda.md and
docs/llm.c.md contain whole examples."""
import glob
import os
import re

root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
classes = set()
for path in glob.glob(f"{root}/include/headroom/**/*.h", recursive=True):
    with open(path) as header:
        classes.update(re.findall(r"^class HEADROOM_API (\w+)", header.read(), re.MULTILINE))
with open(f"{root}/docs/reliability.md") as document:
    section = document.read().split("## Threads and errors")[1]
rows = "".join(line for line in section.splitlines() if line.startswith("|"))
missing = sorted(name for name in classes if not re.search(rf"[`:]{name}`", rows))
assert len(classes) > 15 and not missing, missing
print(f"{len(classes)} classes")

# Pages that contain the whole of an example.
for page, path in (("cuda.md", "cuda/train.cu"), ("llm.c.md", "llmc/headroom_llmc.h")):
    with open(f"{root}/docs/{page}") as document, open(f"{root}/examples/{path}") as example:
        shown = document.read().split("<!-- example -->\n```cpp\n")[1].split("```\n<!-- end of example -->")[0]
        assert shown == example.read(), f"docs/{page} differs from examples/{path}"
