"""The rooms: how large they may be, what their `__init__` says, and that a public verb reaches each module."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.source import FILES, MODULES, PACKAGE, ROOMS, ROOT, functions_in, lines_of, name_of, tree_of

ROOM_FILES_MAX = 20
FUNCTION_LINES_MAX = 60
SEQUENCE_LINES_MAX = 80
"""Lines of a function that only calls in order: no loop and at most `SEQUENCE_IFS_MAX` branches."""

SEQUENCE_IFS_MAX = 2
FILE_LINES_MAX = 400
INIT_LINES = range(3, 7)
INIT_SENTENCES_MIN = 3

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions over the limit, each with the reason. An entry that is no longer needed fails the test."""

LONG_FILES = {
    "_face/checkpoint_manager.py",
    "_face/offline_api.py",
    "_face/pieces/writer.py",
    "_face/wiring.py",
    "backends/torch/local_shards.py",
    "backends/torch/optimizers/restore.py",
    "backends/torch/private_layout.py",
    "backends/torch/state/collect.py",
    "backends/torch/state/restore.py",
    "backends/torch/tensors.py",
    "base/ports/framework.py",
    "core/engine/background.py",
    "core/plan/exchange.py",
    "integrations/dcp/writer.py",
    "integrations/transformers/run.py",
    "offline/repair/repair.py",
    "stored/checkpoint/checkpoint.py",
    "stored/leases/writer.py",
    "stored/repository/epochs.py",
    "stored/repository/timelines.py",
    "testing/store.py",
    "training/coordination/agreement/records.py",
    "training/loading/load.py",
    "training/runs/preemption.py",
    "training/runs/removal/garbage_collection.py",
    "training/saving/attempt.py",
    "training/saving/transfer.py",
}
"""Files over the limit, from before it. A file may leave this list; no file joins it."""

LONG_FILE_LINES_MAX = 500
"""Limit of the files in `LONG_FILES`."""

PUBLIC_MODULES = (
    "holdfast",
    "holdfast.activations",
    "holdfast.cli.__main__",
    "holdfast.data",
    "holdfast.observers",
    "holdfast.pieces",
    "holdfast.policies",
)
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


def lines_max(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function may have. A comprehension is a loop, and `and` in a test is one branch."""
    nodes = list(ast.walk(function))
    has_loop = any(isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.comprehension) for node in nodes)
    branches = sum(isinstance(node, ast.If | ast.IfExp | ast.match_case) for node in nodes)
    return FUNCTION_LINES_MAX if has_loop or branches > SEQUENCE_IFS_MAX else SEQUENCE_LINES_MAX


def test_no_function_is_longer_than_a_screen() -> None:
    functions = [found for path in FILES for found in functions_in(path)]
    long = {name: lines_of(node) for name, node in functions if lines_of(node) > lines_max(node)}
    added = {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS}
    assert not added, (
        f"too long: {added}; expected at most {FUNCTION_LINES_MAX} lines, or {SEQUENCE_LINES_MAX} without a loop and "
        f"with at most {SEQUENCE_IFS_MAX} branches. Move one idea into a function of its own"
    )
    unneeded = LONG_FUNCTIONS.keys() - long.keys()
    assert not unneeded, f"short by now; remove from LONG_FUNCTIONS: {sorted(unneeded)}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a()\n    if b: c()\n    return d() if e else f()", SEQUENCE_LINES_MAX),
        ("if a: b()\n    elif c: d()\n    if e: f()", FUNCTION_LINES_MAX),
        ("return [a(b) for b in c]", FUNCTION_LINES_MAX),
    ],
)
def test_only_a_function_that_calls_in_order_may_be_longer(body: str, expected: int) -> None:
    function = ast.parse(f"def f():\n    {body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lines_max(function) == expected


def test_no_file_is_larger_than_a_reader_can_hold() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in FILES}
    over = {
        name: count
        for name, count in lines.items()
        if count > (LONG_FILE_LINES_MAX if name in LONG_FILES else FILE_LINES_MAX)
    }
    assert not over, (
        f"more lines than {FILE_LINES_MAX}, or than {LONG_FILE_LINES_MAX} in LONG_FILES: {over}. Such a file usually "
        "holds two ideas: name the second one, and give the idea a file"
    )
    short = {name for name in LONG_FILES if lines.get(name, 0) <= FILE_LINES_MAX}
    assert not short, f"short by now, or gone; remove from LONG_FILES: {sorted(short)}"


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
