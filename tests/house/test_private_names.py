"""torch's private names are read in one module, so that a new version of torch breaks one file.

The syntax tree does not tell whose attribute is read. So every name with one leading underscore must be Holdfast's own:
defined in the same file, or anywhere in Holdfast where it is read off `self`. All others count as torch's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import FILES, PACKAGE, name_of, tree_of

LAYOUT = PACKAGE / "backends" / "torch" / "private_layout.py"
"""The one module that may."""

OF_OTHERS = {
    "_custom_objects": "of Accelerate's Accelerator: what was registered",
    "_dataloaders": "of Accelerate's Accelerator",
    "_exit": "documented in os",
    "_load_model_state_pre_hook": "of Accelerate's Accelerator",
    "_models": "of Accelerate's Accelerator: what was prepared",
    "_optimizers": "of Accelerate's Accelerator",
    "_fields": "documented of named tuples",
    "_get_output_dir": "of Trainer, which integrations/transformers extends",
    "_push_from_checkpoint": "of Trainer, likewise",
    "_register_atexit": "of threading; read in one file",
    "_is_owned": "of threading.RLock, as threading.Condition reads it; read in one file",
    "_replace": "documented of named tuples",
    "_save_model_state_pre_hook": "of Accelerate's Accelerator",
    "_schedulers": "of Accelerate's Accelerator",
    "_tuning": "Settings, for the rooms that use them",
}
"""Names that are not torch's, each with whose they are."""

READERS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}
"""Functions that take the name of an attribute as text."""

SELF = {"self", "cls"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def defined_in(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, names, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


@cache
def defined_anywhere() -> set[str]:
    return set().union(*map(defined_in, FILES))


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in SELF


def private_reads(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield each private attribute that is read or set, by name or as text, with its line and whether off `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno, is_of_self(node)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in READERS:
                for text in (each.value for each in node.args if isinstance(each, ast.Constant)):
                    if isinstance(text, str) and is_private(text):
                        yield text, node.lineno, False


def private_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each import of a private module of torch, or of a private name of any module of it, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            named = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        else:
            continue
        for name in named:
            top, *parts = name.split(".")
            if top == "torch" and any(map(is_private, parts)):
                yield name, node.lineno


def names_of_torch() -> set[str]:
    """The private names that the one module reads, and the texts in it that are such names."""
    texts = {
        node.value
        for node in ast.walk(tree_of(LAYOUT))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
    }
    read = {name for name, _, off_self in private_reads(tree_of(LAYOUT)) if not off_self}
    return read | set(filter(is_private, texts))


def findings(path: Path) -> list[str]:
    tree, own, of_torch = tree_of(path), defined_in(path), names_of_torch()
    found = [f"line {line}: import of {name}" for name, line in private_imports(tree)]
    for name, line, off_self in private_reads(tree):
        # A name that both have, such as `_handle`, is Holdfast's off `self` only.
        is_own = name in own if off_self or name not in of_torch else False
        is_inherited = off_self and name in defined_anywhere() - of_torch
        if not (is_own or is_inherited or name in OF_OTHERS):
            found.append(f"line {line}: {name}")
    if path.is_relative_to(PACKAGE / "backends" / "torch"):
        # Foreign formats state such names as text, because they are in the files. Only this room holds torch's objects.
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in of_torch:
                found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_only_one_module_reads_private_names_of_torch() -> None:
    found = {name_of(path): names for path in FILES if path != LAYOUT and (names := findings(path))}
    assert not found, f"names that are not Holdfast's are read: {found}; expected in {name_of(LAYOUT)}"


def test_the_module_is_where_the_names_are() -> None:
    """The test above would hold if this module were empty, and its list of names with it."""
    assert {"_local_tensor", "_orig_mod", "_fsdp_param_groups", "_get_default_store"} <= names_of_torch()
    assert "torch.distributed.tensor.placement_types._StridedShard" in dict(private_imports(tree_of(LAYOUT)))


@pytest.mark.parametrize(
    "line",
    [
        "tensor._local_tensor",
        "tensor._brand_new_field",
        "getattr(tensor, '_is_flat_param', False)",
        "operator.attrgetter('_version')",
        "from torch.distributed.fsdp._runtime_utils import _reshard",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch._C as native",
        "importlib.import_module('torch._dynamo')",
    ],
)
def test_each_way_of_reading_is_seen(line: str) -> None:
    tree = ast.parse(line)
    reads = [name for name, _, _ in private_reads(tree) if name not in defined_anywhere() - names_of_torch()]
    assert reads or list(private_imports(tree))
