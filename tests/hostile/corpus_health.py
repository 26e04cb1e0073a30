"""Crafted manifests that say what cannot be of a checkpoint's health."""

from __future__ import annotations

from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Crafted, Document

GOOD: Document = {
    "nonfinite": {"half": 3, "big": 1},
    "new": {"half": 2},
    "divergent": {"big": [0, 2]},
    "undecided": ["big"],
    "hosts": {"0": "a", "2": "b"},
}

WRONG: dict[str, tuple[str, object]] = {
    "a count of nothing": ("nonfinite", {"half": 0}),
    "a count that is true": ("nonfinite", {"half": True}),
    "a count of 10**400": ("nonfinite", {"half": 10**400}),
    "a count that is NaN": ("nonfinite", {"half": float("nan")}),
    "counts in a list": ("nonfinite", ["half", 3]),
    "a count of a surrogate": ("nonfinite", {"\ud800": 3}),
    "more before than now": ("new", {"half": 3}),
    "news of what was not counted": ("new", {"tied": 0}),
    "news of text": ("new", {"half": "2"}),
    "ranks that do not ascend": ("divergent", {"big": [2, 0]}),
    "a rank below 0": ("divergent", {"big": [-1]}),
    "a rank of 10**400": ("divergent", {"big": [10**400]}),
    "no ranks": ("divergent", {"big": []}),
    "ranks that are an object": ("divergent", {"big": {"0": 2}}),
    "undecided of what does not differ": ("undecided", ["half"]),
    "undecided of a list": ("undecided", [["big"]]),
    "a host that is a number": ("hosts", {"0": 5}),
    "a host of no rank": ("hosts", {"x": "a"}),
    "a host of a rank of many digits": ("hosts", {"9" * 100_000: "a"}),
    "a host of a rank with other digits": ("hosts", {"٠": "a"}),
}


def _health(value: object) -> Any:
    def craft(crafted: Crafted) -> None:
        crafted.edit_manifest(lambda document: document.update(health=value))

    return craft


CASES = [
    *(Case(f"health with {name}", "open", _health({**GOOD, key: value})) for name, (key, value) in WRONG.items()),
    Case("health is text", "open", _health("good")),
    Case("health is true", "open", _health(True)),
    Case("health of nothing", HARMLESS, _health({})),
    Case("health with fields of later versions", HARMLESS, _health({**GOOD, "later": [{"$b": 1}]})),
    Case(
        "health that steers a terminal",
        HARMLESS,
        _health({**GOOD, "divergent": {"\x1b[31m": [0], **GOOD["divergent"]}, "hosts": {"0": "\x1b]0;owned\x07"}}),
    ),
]
