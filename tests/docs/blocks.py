#!/usr/bin/env python3
"""The code blocks of README and docs/.

blocks.py PAGE LANGUAGE [HEADING] prints the first block of a language in a page, or after a heading; with LANGUAGE
`output` the block that shows what the first program prints."""
import dataclasses
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
COMPILED = re.compile(r"<!-- compiled after: (.+) -->")


@dataclasses.dataclass
class Block:
    page: str  # relative to the root
    line: int  # of the opening fence
    language: str
    code: str
    not_run: str  # the reason, from a comment before the block
    declarations: str  # what a fragment is compiled after, from such a comment
    output: str | None = None  # the block without a language that follows


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: pathlib.Path) -> list[Block]:
    found: list[Block] = []
    not_run, declarations = "", ""
    adjacent = False  # only blank lines since the end of the last block
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        if line.startswith("```"):
            code = ""
            for _, inner in lines:
                if inner == "```":
                    break
                code += inner + "\n"
            language = line[3:]
            if not language and adjacent and found[-1].language:
                found[-1].output = code
            else:
                name = str(page.relative_to(ROOT))
                found.append(Block(name, number, language, code, not_run, declarations))
            not_run, declarations, adjacent = "", "", True
        elif line:
            reason, before = NOT_RUN.match(line), COMPILED.match(line)
            not_run = reason[1] if reason else ""
            declarations = before[1] if before else ""
            adjacent = False
    return found


def main() -> None:
    page, language, *heading = sys.argv[1:]
    text = (ROOT / page).read_text().splitlines()
    start = text.index(heading[0]) + 1 if heading else 0
    for block in blocks(ROOT / page):
        if block.line <= start:
            continue
        if language == "output" and block.output is not None:
            print(block.output, end="")
            return
        if block.language == language:
            print(block.code, end="")
            return
    sys.exit(f"{page} has no such block")


if __name__ == "__main__":
    main()
