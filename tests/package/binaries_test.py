#!/usr/bin/env python3
"""binaries_test.py BUILD PREFIX [--hardened]: programs and libraries have safe RUNPATHs and are hardened.

No program or library in the build tree or the installed prefix has a RUNPATH with an empty or relative
element: the dynamic linker would search the current folder and load a library planted there. With
--hardened (optimised builds), installed files also have full RELRO, stack protectors and fortified
calls of the C library."""
import os
import re
import subprocess
import sys

build, prefix = sys.argv[1], sys.argv[2]
hardened = "--hardened" in sys.argv
# These have no stack array and no call that could be fortified.
PLAIN = ("libheadroom-mpi", "libheadroom-nccl")


def elf_files(folder):
    for parent, folders, files in os.walk(folder):
        # In "package" other tests build programs of users, at the same time as this test runs.
        folders[:] = [name for name in folders if name not in ("CMakeFiles", "prefix", "Testing", "package")]
        for name in files:
            path = os.path.join(parent, name)
            if os.path.islink(path):
                continue
            with open(path, "rb") as file:
                head = file.read(18)
            if head[:4] == b"\x7fELF" and head[16] in (2, 3):  # a program or a shared library
                yield path


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def unsafe_elements(dynamic):
    for runpath in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic):
        yield from (element for element in runpath.split(":") if not element.startswith(("/", "$ORIGIN")))


# The check detects an empty and a relative element.
assert list(unsafe_elements("0x1d (RUNPATH) Library runpath: [/a:]")) == [""]
assert list(unsafe_elements("0x0f (RPATH) Library rpath: [lib:$ORIGIN]")) == ["lib"]
assert not list(unsafe_elements("0x1d (RUNPATH) Library runpath: [$ORIGIN:/a]"))

problems, count = [], 0
for path in [*elf_files(build), *elf_files(prefix)]:
    count += 1
    problems += [f"{path}: RUNPATH has the element '{element}'" for element in unsafe_elements(readelf("-d", path))]

installed = [path for path in elf_files(prefix)] if hardened else []
for path in installed:
    dynamic, symbols = readelf("-d", path), readelf("--dyn-syms", path)
    if "GNU_RELRO" not in readelf("-l", path) or not re.search(r"BIND_NOW|Flags: .*NOW", dynamic):
        problems.append(f"{path}: no full RELRO")
    if os.path.basename(path).startswith(PLAIN):
        continue
    if "__stack_chk_fail" not in symbols:
        problems.append(f"{path}: no stack protector")
    if not re.search(r"__(?!stack_chk)\w+_chk@", symbols):
        problems.append(f"{path}: no fortified call")
print("\n".join(problems) or f"{count} programs and libraries, {len(installed)} of them hardened")
sys.exit(bool(problems) or count < 10 or (hardened and len(installed) < 3))
