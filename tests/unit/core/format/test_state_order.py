"""Numbers of names in the order of a state, and the names again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.types.values import Group
from holdfast.core.format.state_order import names_of, numbers_in, numbers_of, paths_of, text_of, unless_ascending
from holdfast.errors import CorruptError

NAMES = st.text("ab.\u00e9\udc80\U0001f600", min_size=1, max_size=4)


@given(st.lists(NAMES, unique=True), st.sets(NAMES), st.lists(NAMES))
def test_names_come_back_in_their_order(order: list[str], tensors: set[str], others: list[str]) -> None:
    """Others may be tensors too, and be listed twice; a name of the order that is none of them is left out."""
    numbers = numbers_of(order, sorted(tensors), others)
    known = [name for name in order if name in tensors or name in others]
    assert names_of(numbers, tensors, others, "here") == tuple(known)
    assert numbers_in(text_of(numbers), "here") == numbers
    assert unless_ascending(numbers) == (b"" if known == sorted(known) else numbers)


def test_ascending_names_need_no_numbers() -> None:
    assert unless_ascending(numbers_of(["a", "b", "d"], ["b", "d"], ["a", "c"])) == b""
    assert numbers_of([], ["a"], []) == numbers_of(["z"], ["a"], []) == unless_ascending(b"") == b""
    assert names_of(b"", ["a"], [], "here") == ()


def test_paths_stop_at_groups_of_other_kinds() -> None:
    inner = Group("module", {"x": 1, "y": Group("list", {"0": 2})})
    assert [*paths_of(Group("dict", {"model": inner, "lr": 0.1}))] == ["model", "model.x", "model.y", "lr"]


@pytest.mark.parametrize(
    ("numbers", "said"), ((b"\2\0\0\0\1\0\0\0", "has the number 2; expected below 2"), (b"\1\0\0", "has 3 bytes"))
)
def test_numbers_without_a_name_are_damage(numbers: bytes, said: str) -> None:
    with pytest.raises(CorruptError, match=f"here: order {said}"):
        names_of(numbers, ["a"], ["b"], "here")
