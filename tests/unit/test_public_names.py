"""Public names and modules are there after `import holdfast`, and each is imported on first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import holdfast
from holdfast import api

USES = """
import sys
import holdfast
assert not [name for name in sys.modules if name.startswith("holdfast.")]
holdfast.api.list_steps, holdfast.policies.LatestN, holdfast.observers.jsonl, holdfast.errors.InvalidError
"""

LOADS = """
import sys
import holdfast
holdfast.load, holdfast.save
unneeded = [name for name in sys.modules if name.startswith(("holdfast.offline", "holdfast.training.runs"))]
assert not unneeded, unneeded
"""


@pytest.mark.parametrize("code", [USES, LOADS], ids=["modules are reachable", "a load by path imports no run"])
def test_first_use(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


MODULES = pytest.mark.parametrize("module", [holdfast, api], ids=["holdfast", "holdfast.api"])


@MODULES
def test_every_public_name_is_there(module: ModuleType) -> None:
    names = module.__all__
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(set(names)) == len(names)
    assert not hasattr(module, "no_such_name")


@MODULES
def test_a_type_checker_sees_the_names_that_are_imported_on_first_use(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom) and statement.module is not None
        home = importlib.import_module(statement.module)
        for alias in statement.names:
            assert getattr(module, alias.name) is getattr(home, alias.name)
            assert alias.asname or alias.name in module.__all__


@MODULES
def test_an_import_of_everything_gives_the_public_names(module: ModuleType) -> None:
    names: dict[str, object] = {}
    exec(f"from {module.__name__} import *", names)
    assert set(module.__all__) == names.keys() - {"__builtins__"}
