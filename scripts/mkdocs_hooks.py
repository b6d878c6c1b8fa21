"""mkdocs calls this: it adds the API reference to the site and turns links to source files into text.

C and C++ come from Doxygen (scripts/Doxyfile), Python from the docstrings of adapters/python/headroom. Docstrings of classes that
are written in C++ are included if the built package can be imported."""
import ast
import importlib
import pathlib
import posixpath
import re
import subprocess

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "adapters/python/headroom"
DOXYGEN = ROOT / "build/doxygen"
MODULES = ["", "torch", "accelerate", "lightning", "keras", "megatron", "deepspeed", "fairseq2"]


def signature(function: ast.FunctionDef) -> str:
    arguments = ast.unparse(function.args)
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return re.sub(r"\bself(, )?", "", f"({arguments})", count=1) + returns


def documented(doc: str | None) -> str:
    """A docstring as Markdown: double backquotes become single ones, examples become blocks."""
    text = (doc or "").replace("``", "`")
    return re.sub(r"((?:^>>> .*\n?|^\.\.\. .*\n?|(?<=\n)(?!>>>)(?!\n).+\n?)+)", lambda found: (
        f"\n```\n{found[1].strip()}\n```\n" if found[1].startswith(">>>") else found[1]), text, flags=re.M)


def definition(module: pathlib.Path, name: str) -> tuple[ast.AST | None, bool]:
    """Where a public name is defined, and whether that is the compiled extension's stub."""
    tree = ast.parse(module.read_text())
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node, module.suffix == ".pyi"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headroom"):
            if any((alias.asname or alias.name) == name for alias in node.names):
                path = PACKAGE.joinpath(*node.module.split(".")[1:])
                for suffix in (".py", ".pyi"):
                    if path.with_suffix(suffix).exists():
                        return definition(path.with_suffix(suffix), name)
    return None, False


def runtime_doc(module: str, name: str, member: str = "") -> str | None:
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    doc = getattr(value, member, None).__doc__ if member else value.__doc__
    return doc


def entry(module: str, name: str, node: ast.AST, compiled: bool) -> str:
    doc = runtime_doc(module, name) if compiled else ast.get_docstring(node)  # type: ignore[arg-type]
    if not doc and not compiled:
        raise PluginError(f"{module}.{name} has no docstring")
    if isinstance(node, ast.FunctionDef):
        return f"### {name}\n\n`{name}{signature(node)}`\n\n{documented(doc)}\n\n"
    assert isinstance(node, ast.ClassDef)
    text, members, fields = "", "", ""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and compiled:
            fields += f"- `{ast.unparse(item.target)}`: {ast.unparse(item.annotation)}\n"
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_") and item.name != "__init__":
            continue
        member_doc = runtime_doc(module, name, item.name) if compiled else ast.get_docstring(item)
        if item.name == "__init__":
            text = f"`{name}{signature(item).removesuffix(' -> None')}`\n\n"
            doc = doc or member_doc
        else:
            first = (member_doc or "").split("\n\n")[0].replace("\n", " ").replace("``", "`").strip()
            members += f"- `{item.name}{signature(item)}` {first}\n"
    return f"### {name}\n\n{text}{documented(doc)}\n\n{fields}{members}\n"


def python_reference() -> str:
    page = "# Python API\n\n"
    for name in MODULES:
        path = PACKAGE / name / "__init__.py" if not name or (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
        tree = ast.parse(path.read_text())
        module = f"headroom.{name}".rstrip(".")
        page += f"## {module}\n\n{documented(ast.get_docstring(tree))}\n\n"
        listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
        names = ast.literal_eval(listed[0]) if listed else [
            node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")]
        for public in names:
            node, compiled = definition(path, public)
            if node is not None:
                page += entry(module, public, node, compiled)
    return page


def on_files(files, config):
    files.append(File.generated(config, "api/python.md", content=python_reference()))
    DOXYGEN.mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", "scripts/Doxyfile"], cwd=ROOT, check=True)
    for path in sorted((DOXYGEN / "html").rglob("*")):
        if path.is_file():
            name = f"api/cpp/{path.relative_to(DOXYGEN / 'html')}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2].split("#")[0]))
        return found[1] if target.startswith("../") else found[0]

    reference = "- [C++ and C](api/cpp/index.html)\n- [Python](api/python.md)"
    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)", link, markdown.replace("<!-- reference -->", reference))
