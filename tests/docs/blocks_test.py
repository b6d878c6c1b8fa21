#!/usr/bin/env python3
"""blocks_test.py PROGRAM COMPILER INCLUDES: every code block of README and docs/ is run by a test, compiled or checked here, or
says why not.

- Python programs with their output: run by tests/python/torch_examples_test.py.
- Programs in C++, C and other languages, with their CMake files: built and run by tests/package/package_test.sh.
- C++ fragments with a comment `compiled after`: compiled here.
- Shell commands with their output: run here. Others: programs and files exist, and the options of `headroom` commands are in
  its help.
- All others have a comment `not run` with the reason."""
import os
import re
import shlex
import subprocess
import sys
import tempfile

from blocks import ROOT, Block, blocks, pages

PROGRAM, COMPILER, INCLUDES = os.path.abspath(sys.argv[1]), *sys.argv[2:4]
WITH_TRAINER = os.path.exists(os.path.join(os.path.dirname(PROGRAM), "headroom-train"))
# Blocks of these pages are programs that the package tests build; docs/cuda.md has an example that is built with the tests.
PROGRAMS = {"README.md", "docs/cpp.md", "docs/libtorch.md", "docs/scaling.md", "docs/c.md", "docs/cuda.md",
            "docs/llm.c.md"}
COMPILED = ("cpp", "c", "cmake", "rust", "java", "csharp")
# Commands that are not part of the repository.
OTHERS = {"pip", "apt-get", "cmake", "g++", "cc", "ldconfig", "mpirun", "torchrun", "tensorboard", "cp", "./example",
          "./build/fit", "git", "docker", "conan", "vcpkg", "dpkg", "cd"}


def help_of(command: str, cache: dict[str, str] = {}) -> str:  # noqa: B006
    if command not in cache:
        shown = subprocess.run([PROGRAM, command, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0, (command, shown)
        cache[command] = shown.stdout
    return cache[command]


def check_headroom(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        return
    command, *rest = words
    if command == "help" or command in ("train", "compare") and not WITH_TRAINER:
        return
    if command in ("state", "doctor"):  # are in the Python package
        return
    known = help_of(command)
    for word in rest:
        if word.startswith("--"):
            option = word.split("=")[0]
            assert re.search(rf"{option}\b", known), f"{command} has no option {option}"


def check_shell(line: str) -> None:
    for part in re.split(r"&&|\|", line):
        words = shlex.split(part, comments=True)
        while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0].startswith("-")):
            words.pop(0)
        if not words:
            continue
        if words[0] in ("mpirun", "torchrun") and "headroom" in words:
            words = words[words.index("headroom"):]
        if words[0] in ("python3", "python"):
            if words[1] == "-m":
                check_headroom(words[3:])
                continue
            words.pop(0)
        if words[0] in ("./run", "headroom"):
            check_headroom(words[1:])
        elif words[0] in OTHERS or words[0] == "printf":
            continue
        else:
            assert (ROOT / words[0]).exists(), f"there is no {words[0]}"


def check(block: Block) -> str:
    """How the block is checked."""
    if block.not_run:
        return "not run"
    if block.language == "python":
        assert block.output is not None, "a program without its output"
        return "run"
    if block.declarations:
        return "fragments"
    if block.language in COMPILED:
        assert block.page in PROGRAMS, "no test builds it"
        return "run"
    assert block.language == "sh", "neither a program nor a command"
    if block.output is not None:
        if block.page in PROGRAMS:
            return "run"
        shown = subprocess.run(["bash", "-c", block.code.replace("./run ", f"{PROGRAM} ")], cwd=ROOT, capture_output=True,
                               text=True, timeout=60)
        assert shown.stdout == block.output, f"prints {shown.stdout}{shown.stderr}"
        return "run"
    for line in block.code.replace("\\\n", " ").replace("|\n", "| ").splitlines():
        check_shell(line)
    return "commands"


def compile_fragments(fragments: list[Block]) -> None:
    source = "#include <headroom/headroom.h>\n#include <headroom/ranges.h>\n#include <headroom/tools.h>\nnamespace hr = headroom;\n"
    for number, block in enumerate(fragments):
        source += f"void fragment{number}() {{ {block.declarations}\n#line {block.line + 1} \"{block.page}\"\n{block.code}}}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".cc") as file:
        file.write(source)
        file.flush()
        compiled = subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", f"-I{INCLUDES}", file.name],
                                  capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


def check_links() -> None:
    """mkdocs checks the links between pages of docs/; those of README and CONTRIBUTING are checked here."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links {target}"


def check_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900, f"README has {len(text.split())} words"
    first = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    assert first.line <= 25, "the first code comes after line 25"


def main() -> None:
    counts: dict[str, int] = {}
    fragments, failures = [], []
    for page in pages():
        for block in blocks(page):
            try:
                kind = check(block)
            except AssertionError as error:
                failures.append(f"{block.page}:{block.line}: {error}")
                continue
            counts[kind] = counts.get(kind, 0) + 1
            if kind == "fragments":
                fragments.append(block)
    assert not failures, "\n".join(failures)
    compile_fragments(fragments)
    check_links()
    check_readme()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
