"""The rules of the house: who may import whom, what stays light, what stays small. See also test_rooms, test_words."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import FILES, PACKAGE, ROOT, name_of, tree_of

STANDARD_LIBRARY_ONLY = ("errors", "settings", "policies", "base")
"""Rooms that import nothing but Python and Holdfast itself."""

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
NEVER_AT_IMPORT = {
    "torch", "typer", "rich", "numpy", "safetensors", "xxhash", "msgspec", "backports", "prometheus_client", "h11",
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_tops(tree: ast.AST) -> set[str]:
    """The top-level names of all absolute imports in a file, wherever in it they stand."""
    tops = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            tops.add(node.module.partition(".")[0])
    return tops


def modules_after(statement: str, *flags: str) -> set[str]:
    """Top-level modules that are loaded in a fresh interpreter once it has run `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-I", *flags, "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_layers_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "0 broken" in done.stdout


def test_importing_holdfast_loads_nothing_heavy() -> None:
    loaded = modules_after("import holdfast")
    assert "holdfast" in loaded
    assert not loaded & NEVER_AT_IMPORT


def test_the_errors_and_settings_need_no_framework() -> None:
    loaded = modules_after("import holdfast; holdfast.InvalidError; holdfast.Settings()")
    assert not loaded & NEVER_AT_IMPORT


def test_every_public_name_is_there() -> None:
    import holdfast

    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast.__all__) <= set(dir(holdfast))
    with pytest.raises(AttributeError, match="no attribute 'restore'"):
        _ = holdfast.restore


def test_every_package_says_what_lives_there() -> None:
    folders = {path.parent for path in FILES}
    assert PACKAGE in folders
    for folder in sorted(folders):
        init = folder / "__init__.py"
        assert init.is_file(), f"{name_of(folder)} has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{name_of(init)} has no docstring"


# Each of these is one test over all files: as a test each, running them took longer than looking.


def test_no_pickle() -> None:
    assert {name_of(path): found for path in FILES if (found := pickles_in(path))} == {}


def pickles_in(path: Path) -> set[str]:
    """Return modules and functions of a file that unpickle; torch.load and torch.save are pickles."""
    calls = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return imported_tops(tree_of(path)) & PICKLES | calls & {"torch.load", "torch.save"}


def test_the_ground_needs_only_the_standard_library() -> None:
    ground = [path for path in FILES if room_of(path) in STANDARD_LIBRARY_ONLY]
    assert {room_of(path) for path in ground} == set(STANDARD_LIBRARY_ONLY)
    own = {*sys.stdlib_module_names, "holdfast"}
    # numpy copies the parts of an upload without Python's lock; the standard library has no such call. The order of
    # samples is asked for a thousand places at once. A target takes elements with strides. msgspec tells the place of
    # a wrong key in a rule file. Both ends of the wire share the framing.
    with_numpy = ("ports/framework.py", "ports/parts.py", "sampling/mixture.py", "sampling/order.py")
    exempt = {f"src/holdfast/base/{name}": {"numpy"} for name in with_numpy}
    exempt |= {f"src/holdfast/base/layouts/{name}": {"msgspec"} for name in ("rule_file.py", "rule_text.py")}
    exempt["src/holdfast/base/wire/framing.py"] = {"h11", "msgspec"}
    found = {name_of(path): imported_tops(tree_of(path)) - own for path in ground}
    assert {name: foreign for name, foreign in found.items() if foreign} == exempt


def test_no_module_is_named_after_nothing() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [name_of(path) for path in FILES if path.stem in empty] == [], "name the idea"
