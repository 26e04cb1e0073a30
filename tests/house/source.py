"""The source as the house tests see it: modules, syntax trees, functions, rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES})
"""Every folder of the package, the package itself among them."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """Return the room of a file, at most two folders deep: `core/engine`, `core`, or `.` for the top."""
    folders = path.relative_to(PACKAGE).parent.parts[:2]
    return "/".join(folders) or "."


def docstrings_in(path: Path) -> Iterator[ast.Constant]:
    """Yield docstrings and the strings below fields."""
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            text = child.value if isinstance(child, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def functions_in(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with its name as `folder/file.py:name`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(PACKAGE).as_posix()}:{node.name}", node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, from `def` to its last statement."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1
