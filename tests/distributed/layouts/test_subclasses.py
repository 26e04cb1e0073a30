"""Tensor subclasses over real gloo processes: on another split where the class is known, on the same one otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import InvalidError
from tests.distributed.layouts.subclass_cases import training, whole
from tests.support.gloo_worlds import Case, run_world


def case(function: str, name: str, **arguments: object) -> Case:
    return Case(f"tests.distributed.layouts.subclass_cases:{function}", arguments, name)


def test_inner_tensors_follow_the_split(tmp_path: Path) -> None:
    def at(name: str) -> str:
        return str(tmp_path / name)

    plain = training("known", None, 3)
    holdfast.save(at("plain"), plain, process_group=False)
    two = run_world(
        2,
        [
            case("save", "known", path=at("known"), kind="known"),
            case("save", "unknown", path=at("unknown"), kind="unknown"),
            case("save", "columns", path=at("columns"), kind="known", dim=1),
            case("load", "known_again", path=at("known"), kind="known"),
            case("load", "stepped", path=at("known"), kind="known", steps=2),
            case("load", "from_plain", path=at("plain"), kind="known"),
            case("load", "replicated", path=at("known"), kind="known", dim=None),
            case("load", "unknown_again", path=at("unknown"), kind="unknown"),
            case("load", "columns_again", path=at("columns"), kind="known", dim=1),
            case("refuse", "rows_of_columns", path=at("columns"), kind="known"),
            case("refuse", "unknown_replicated", path=at("unknown"), kind="unknown", dim=None),
            case("refuse_mixed", "mixed", path=at("mixed")),
            case("refuse_opaque", "opaque", path=at("opaque")),
            case("refuse_unequal", "unequal", path=at("unequal")),
            case("refuse_unlike", "context", path=at("context"), split=False, unlike="context"),
            case("refuse_unlike", "context_of_parts", path=at("context_of_parts"), split=True, unlike="context"),
            case("refuse_unlike", "class", path=at("class"), split=False, unlike="class"),
        ],
        tmp_path / "two",
    )
    (saved,) = {repr(each) for each in two.values("known")}
    assert saved == repr(whole(plain))
    for name in ("known_again", "stepped", "from_plain", "replicated", "unknown", "unknown_again"):
        assert {repr(each) for each in two.values(name)} == {saved}, name
    assert {repr(each) for each in two.values("columns_again")} == {repr(each) for each in two.values("columns")}
    for name in ("rows_of_columns", "unknown_replicated"):
        for text in two.values(name):
            assert "momentum: the number of parts in each dimension" in str(text) and "does not know how to" in str(
                text
            )
    for text in two.values("mixed"):
        assert "on some ranks a tensor subclass, on others a plain tensor: w." in str(text)
    for text in two.values("opaque"):
        assert "w: tensor subclass Opaque cannot be saved" in str(text)
    for text in two.values("unequal"):
        assert "w: Blocks [5, 4] is split into shards of unequal size" in str(text)
    for name in ("context", "context_of_parts", "class"):
        for text in two.values(name):
            assert "differ between ranks that hold them under one name: w (ranks [0]" in str(text), name
    assert not any((tmp_path / name / "manifest.json").exists() for name in ("mixed", "context", "class"))

    three = run_world(3, [case("load", "known", path=at("known"), kind="known")], tmp_path / "three")
    assert {repr(each) for each in three.values("known")} == {saved}
    one = training("known", None, 0)
    holdfast.load(at("known"), one, process_group=False)
    assert repr(whole(one)) == saved
    with pytest.raises(InvalidError, match="Load it on as many ranks, sharded as it was saved"):
        holdfast.load(at("unknown"), training("unknown", None, 0), process_group=False)
