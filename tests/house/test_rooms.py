"""The rooms: how large they may be, what their `__init__` says, and that a public verb reaches each module."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.source import FILES, MODULES, PACKAGE, ROOMS, ROOT, functions_in, name_of, tree_of

ROOM_FILES_MAX = 20
FUNCTION_LINES_MAX = 60
INIT_LINES = range(3, 7)
INIT_SENTENCES_MIN = 3

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions over the limit, each with the reason. An entry that is no longer needed fails the test."""

PUBLIC_MODULES = ("holdfast", "holdfast.cli.__main__", "holdfast.observers", "holdfast.pieces", "holdfast.policies")
"""Modules that a user imports or runs by name, as each integration. All other modules must be reachable from these."""

UNREACHED = ("holdfast.testing",)
"""Rooms that no public verb needs: a store's author imports the shipped suites from their own tests."""

NEGATIONS = re.compile(r"\b(?:never|no|not|none|nothing|nobody|neither|nor|cannot)\b", re.IGNORECASE)


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_no_room_holds_more_files_than_a_reader_can_survey(room: Path) -> None:
    files = [path.name for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
    assert len(files) <= ROOM_FILES_MAX, f"{len(files)} files; cut the room, or merge files: {files}"


def test_no_class_name_is_defined_twice() -> None:
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{name_of(path)}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {name: lines for path in FILES for name, lines in functions_in(path) if lines > FUNCTION_LINES_MAX}
    assert not long.keys() - LONG_FUNCTIONS.keys(), f"more than {FUNCTION_LINES_MAX} lines: {long}"
    unneeded = LONG_FUNCTIONS.keys() - long.keys()
    assert not unneeded, f"short by now; remove from LONG_FUNCTIONS: {sorted(unneeded)}"


def test_import_circles_are_checked() -> None:
    """import-linter finds circles (`test_the_layers_hold`); this test fails if someone removes or narrows its contract.

    `acyclic_siblings` over all packages is stricter than a search for circles of modules: it counts imports within
    functions and refuses two sibling packages that import each other through different modules.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    acyclic = [contract for contract in contracts if contract["type"] == "acyclic_siblings"]
    assert [sorted(contract["ancestors"]) for contract in acyclic] == [["holdfast", "holdfast.**"]]
    assert not any("ignore_imports" in contract for contract in acyclic)


@pytest.mark.parametrize("room", [room for room in ROOMS if room != PACKAGE], ids=name_of)
def test_each_room_says_what_it_does_and_what_it_never_does(room: Path) -> None:
    """Checks the form: the lines, the sentences, one sentence with a negation, a file to read first that exists."""
    text = ast.get_docstring(tree_of(room / "__init__.py")) or ""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) in INIT_LINES, f"{len(lines)} lines of text; expected 3 to 6"
    # A file name such as `box.py` ends no sentence: a space or the end of a line follows the full stop.
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    assert len(sentences) >= INIT_SENTENCES_MIN, "expected: what the room does, who calls it, what it never does"
    assert any(NEGATIONS.search(sentence) for sentence in sentences), "expected a sentence with what it never does"
    missing = [name for name in re.findall(r"`([\w/]+\.py)`", text) if not _exists(room, name)]
    assert not missing, f"names files that do not exist: {missing}"
    siblings = [path for path in room.glob("*.py") if path.name != "__init__.py"]
    if len(siblings) > 1:
        named = re.findall(r"[Rr]ead `([\w/]+(?:\.py|/))`", text)
        assert named, "expected the file to read first: Read `name.py` first"


def _exists(room: Path, name: str) -> bool:
    return (room / name).is_file() or (PACKAGE / name).is_file()


def imports_of(module: str) -> set[str]:
    """Return the modules of the package that a module imports, within functions too, or names in a string.

    `holdfast/__init__.py` and `python -m` name modules as text.
    """
    names: set[str] = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & MODULES.keys()


def test_a_public_verb_reaches_every_module() -> None:
    reached: set[str] = set()
    ahead = [*PUBLIC_MODULES, *(name for name in MODULES if name.startswith("holdfast.integrations."))]
    while ahead:
        module = ahead.pop()
        if module in reached:
            continue
        reached.add(module)
        # Python runs the `__init__` of each parent before the module itself.
        parent = module.rpartition(".")[0]
        ahead += [*imports_of(module), *([parent] if parent else [])]
    unreached = {name for name in MODULES.keys() - reached if not name.startswith(UNREACHED)}
    assert not unreached, f"no public verb needs: {sorted(unreached)}"
