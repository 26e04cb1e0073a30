"""How a rule of `rename` changes a name, and which rules are refused."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidError
from holdfast.training.loading.rename_rules import Renames


@pytest.mark.parametrize(
    ("rename", "name", "expected"),
    [
        # Below the top-level key, as a module names its parameters.
        ({"module.": ""}, "model.module.w", "model.w"),
        ({"module": ""}, "model.module.w", "model.w"),
        ({"backbone": "encoder"}, "model.backbone.w", "model.encoder.w"),
        ({"backbone": "encoder"}, "model.backbone", "model.encoder"),
        ({"a.b": "c"}, "model.a.b.w", "model.c.w"),
        ({"model.": ""}, "model.model.w", "model.w"),
        ({"": "encoder."}, "model.w", "model.encoder.w"),
        # From the start, if nothing below has it.
        ({"net": "model"}, "net.w", "model.w"),
        ({"model.backbone": "model.encoder"}, "model.backbone.w", "model.encoder.w"),
        ({"net.module": "model"}, "net.module.w", "model.w"),
        ({"w": "v"}, "w", "v"),
        # In order, each on what the rules before it made.
        ({"module.": "", "backbone": "encoder"}, "model.module.backbone.w", "model.encoder.w"),
        ({"a": "b", "b": "c"}, "model.a.w", "model.c.w"),
        # Stars.
        ({"*.attn.*": "*.attention.*"}, "model.layers.0.attn.w", "model.layers.0.attention.w"),
        ({"layers.*": "blocks.*"}, "model.layers.0.w", "model.blocks.0.w"),
        ({"layers.*.q": "h.*.query"}, "model.layers.10.q.w", "model.h.10.query.w"),
        ({"net.*": "model.*"}, "net.w", "model.w"),
        ({"*_proj": "*"}, "model.q_proj.w", "model.q.w"),
    ],
)
def test_a_rule_changes_the_first_segments(rename: dict[str, str], name: str, expected: str) -> None:
    assert Renames.of(rename).applied([name], "c") == {name: expected}


@pytest.mark.parametrize("rule", ["backbone", "backbone.", "back*"])
def test_a_rule_matches_whole_segments(rule: str) -> None:
    names = ["model.backbone2.w", "model.back"]
    star = "*" if "*" in rule else ""
    if star:
        assert Renames.of({rule: "x*"}).applied(names, "c") == {
            "model.backbone2.w": "model.xbone2.w",
            "model.back": "model.x",
        }
    else:
        with pytest.raises(InvalidError, match=r"matches no name\. .* has model\.back, model\.backbone2\.w"):
            Renames.of({rule: "encoder"}).applied(names, "c")


def test_with_a_dot_the_name_itself_does_not_match() -> None:
    names = ["model.head", "model.head.w"]
    assert Renames.of({"head.": "top."}).applied(names, "c") == {
        "model.head": "model.head",
        "model.head.w": "model.top.w",
    }


def test_a_name_below_counts_before_a_top_level_key() -> None:
    names = ["model.w", "model.model.w"]
    assert Renames.of({"model": "net"}).applied(names, "c") == {"model.w": "model.w", "model.model.w": "model.net.w"}


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("module.", "expected a dict such as"),
        ({"a": 1}, "expected a dict such as"),
        ({"": ""}, "changes nothing"),
        ({"*.a": "b"}, "1 and 0 stars"),
        ({"a?": "b"}, r"\* as the only wildcard"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(rename: object, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        Renames.of(rename)


def test_a_rule_leaves_a_name() -> None:
    with pytest.raises(InvalidError, match=r"leaves nothing of model\.w"):
        Renames.of({"w": ""}).applied(["model.w"], "c")
