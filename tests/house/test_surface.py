"""The surface of the package: folders and modules at its top, parameters of functions, fields of `Settings`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from holdfast.settings import Settings
from tests.house.source import FILES, PACKAGE, ROOMS, tree_of

TOP_FOLDERS = {
    "cli", "page", "integrations",  # the front: public names only
    "activations", "data",  # products of their own
    "offline", "agent", "training", "stored", "core", "backends", "base",  # the layers
    "testing", "_face",
}  # fmt: skip
"""The folders of `src/holdfast/` from top to bottom. `activations`, `agent`, `data` and `page` may be absent."""

TOP_FILES = {
    "__init__.py", "api.py", "errors.py", "observers.py", "pieces.py", "policies.py", "settings.py", "py.typed"
}  # fmt: skip

PARAMETERS_MAX = 8

PARAMETERS = {
    "_face/checkpoint_manager.py:CheckpointManager.__init__": 12,
    "_face/checkpoint_manager.py:CheckpointManager.load": 13,
    "_face/checkpoint_manager.py:CheckpointManager.save": 9,
    "_face/offline_api.py:export": 12,
    "api.py:load": 15,
    "backends/torch/data/batches.py:Batches.__init__": 9,
    "backends/torch/data/loader.py:Loader.__init__": 12,
    "cli/commands/diff.py:diff": 11,
    "cli/commands/export.py:export": 14,
    "cli/commands/gc.py:gc": 9,
    "cli/commands/importing.py:import_": 10,
    "cli/commands/serve.py:serve": 10,
    "integrations/dcp/verbs.py:async_save": 9,
}
"""Public functions with more than `PARAMETERS_MAX` parameters, each with its number. A command has its options."""

SETTINGS_MAX = 24


def test_the_folders_at_the_top_are_the_layers() -> None:
    added = {room.name for room in ROOMS if room.parent == PACKAGE} - TOP_FOLDERS
    assert not added, f"new folders in src/holdfast/: {sorted(added)}; move each into one of {sorted(TOP_FOLDERS)}"


def test_the_files_at_the_top_are_the_public_modules() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert found == TOP_FILES, "a new public name belongs to `holdfast`; its code belongs into a folder"


def parameters_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function as `folder/file.py:Class.name` with its number of parameters, without `self` and `cls`."""

    def of(node: ast.AST, outer: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                each = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                yield outer + child.name, len([arg for arg in each if arg.arg not in ("self", "cls")])
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from of(child, f"{outer}{child.name}." if is_scope else outer)

    yield from of(tree_of(path), f"{path.relative_to(PACKAGE).as_posix()}:")


def test_a_function_has_few_parameters() -> None:
    many = {name: count for path in FILES for name, count in parameters_in(path) if count > PARAMETERS_MAX}
    grown = {name: count for name, count in many.items() if count > PARAMETERS.get(name, PARAMETERS_MAX)}
    assert not grown, f"more parameters than {PARAMETERS_MAX}, or than in PARAMETERS: {grown}; bundle those of one idea"
    shrunk = {name: many.get(name) for name, count in PARAMETERS.items() if many.get(name) != count}
    assert not shrunk, f"fewer parameters than in PARAMETERS: {shrunk}; lower the entry, or remove it"


def test_settings_have_few_fields() -> None:
    count = len(fields(Settings))
    assert count <= SETTINGS_MAX, (
        f"Settings has {count} fields; expected at most {SETTINGS_MAX}. Use a constant with its reason, `Tuning` for "
        "benches and tests, or `ObjectSettings` for object stores"
    )
