"""A Protocol serves two implementations. One with fewer has a line with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.house.source import FILES, tree_of

IMPLEMENTATIONS_MIN = 2

ALONE = {
    "Clock": "tests pass clocks of their own",
    "DescribedState": "coordination is below saving, which implements it",
    "DirectPart": "ports may not import the codec that implements it",
    "FilledWindows": "staging implements it and imports stream, which states it",
    "Framework": "other rooms may not import backends; tests pass a framework over numpy",
    "GradientCapture": "other rooms may not import backends",
    "InFlight": "attempt implements it and imports handle, which states it",
    "InnerTaker": "torch/state implements it and imports torch/subclasses, which states it",
    "PairCoder": "the engine may not import the codec that implements it",
    "RecordMemory": "the redo log implements it, which backends may not import",
    "RecordingFramework": "other rooms may not import backends",
    "Restoration": "of a framework, whose rooms others may not import; tests pass one over numpy",
    "Stateful": "objects of users implement it",
    "StepRedo": "other rooms may not import backends",
    "StoredParts": "the store implements it and imports multipart, which states it",
    "TensorTaker": "torch/state implements it and imports torch/optimizers, which states it",
}
"""Protocols with fewer implementations in `src`, each with the reason."""


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return each class by its name; no name is defined twice (test_rooms)."""
    return {node.name: node for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}


def bases_of(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of the bases of a class, without parameters in brackets. `lightning.Trainer` is another's."""
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Name):
            yield named.id


def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in bases_of(node)


def own_members(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class defines, those of `self` among them, and its methods as `name(parameters)`."""
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any(
                getattr(each, "id", "") in ("property", "cached_property") for each in child.decorator_list
            )
            found.add(child.name if is_property else f"{child.name}({', '.join(names_of(child.args))})")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {each.attr} if getattr(each.value, "id", "") == "self" else set()
    return found


def names_of(args: ast.arguments) -> list[str]:
    """Return the names of parameters that a caller must give."""
    required = args.args[: len(args.args) - len(args.defaults)]
    by_keyword = [arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in [*required, *by_keyword]]


@cache
def members(name: str) -> set[str]:
    """Return the members of a class and of its bases."""
    node = classes().get(name)
    return own_members(node).union(*map(members, bases_of(node))) if node else set()


def ancestors(name: str) -> set[str]:
    node = classes().get(name)
    return set().union(*({base} | ancestors(base) for base in bases_of(node))) if node else set()


def implementations() -> dict[str, list[str]]:
    """Return the classes that implement each Protocol: by inheritance, or because they define all its members."""
    real = [name for name, node in classes().items() if not is_protocol(node)]
    return {
        name: [each for each in real if name in ancestors(each) or members(name) <= members(each)]
        for name, node in classes().items()
        if is_protocol(node)
    }


def test_a_protocol_has_two_implementations_or_a_reason() -> None:
    found = implementations()
    alone = {name: names for name, names in found.items() if len(names) < IMPLEMENTATIONS_MIN}
    added = {name: names for name, names in alone.items() if name not in ALONE}
    assert not added, f"fewer than two implementations: {added}; name the class itself, or add the reason to ALONE"
    unneeded = ALONE.keys() - alone.keys()
    assert not unneeded, f"two implementations by now, or gone; remove from ALONE: {sorted(unneeded)}"


def test_an_implementation_has_the_names_of_methods_parameters_and_attributes() -> None:
    text = (
        "class X(Protocol):\n"
        "    url: str\n"
        "    @property\n"
        "    def size(self): ...\n"
        "    def get(self, key, *, limit): ...\n"
        "class Y:\n"
        "    def __init__(self): self.url = self.size = 1\n"
        "    def get(self, key, more=1, *, limit): ...\n"
    )
    protocol, implementation = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert own_members(protocol) == {"url", "size", "get(self, key, limit)"}
    assert own_members(protocol) < own_members(implementation)
