"""Locks that a signal handler may meet: each one on the way of a save has a word why it holds nobody up.

A handler runs on the training thread, within what it interrupted, and may save or wait. See decision 099.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import FILES, PACKAGE, name_of, tree_of

WATCHED = ("training/saving/", "core/engine/", "training/coordination/", "training/runs/", "base/interrupts.py")
KINDS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Queue", "LifoQueue"}
"""Those of the standard library that hold a lock while Python code runs."""


def made_in(text: str, tree: ast.AST) -> Iterator[tuple[int, bool]]:
    """Yield the line of each lock that a module makes, and whether a comment is on it or on the line before it."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in KINDS:
            before = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
            yield node.lineno, " # " in lines[node.lineno - 1] or before.startswith("#")


def without_a_word(path: Path) -> list[int]:
    return [line for line, has_word in made_in(path.read_text(encoding="utf-8"), tree_of(path)) if not has_word]


def test_each_lock_on_the_way_of_a_save_has_a_word_why_no_handler_meets_it() -> None:
    watched = [path for path in FILES if path.relative_to(PACKAGE).as_posix().startswith(WATCHED)]
    assert len(watched) > len(WATCHED)
    assert {name_of(path): lines for path in watched if (lines := without_a_word(path))} == {}


def test_the_rule_sees_locks_under_any_name_and_their_words() -> None:
    text = (
        "import threading, queue\nfrom threading import RLock\n"
        "a = threading.Lock()\n"
        "b = threading.Lock()  # Taken on the commit thread alone.\n"
        "# Taken on the commit thread alone.\n"
        "c, d = RLock(), queue.LifoQueue()\n"
        "\n"
        "e = queue.SimpleQueue()\n"
        "f = threading.Condition(a)\n"
    )
    assert sorted(made_in(text, ast.parse(text))) == [(3, False), (4, True), (6, True), (6, True), (9, False)]
