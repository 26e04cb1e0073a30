"""The closed set of keys."""

from __future__ import annotations

import pytest

from holdfast.base.ports.keys import is_part, split_key, split_prefix
from holdfast.errors import InvalidError
from holdfast.testing.store import BAD_KEYS, BAD_PREFIXES


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_bad_keys(key: str) -> None:
    with pytest.raises(InvalidError, match="key"):
        split_key(key)


@pytest.mark.parametrize("prefix", BAD_PREFIXES, ids=ascii)
def test_bad_prefixes(prefix: str) -> None:
    with pytest.raises(InvalidError):
        split_prefix(prefix)


def test_good_ones() -> None:
    assert split_key("step-000000001000/0123/enc/r00003.safetensors")[-1] == "r00003.safetensors"
    assert split_key("a") == ("a",)
    assert split_prefix("") == ()
    assert split_prefix("a/b/") == ("a", "b")
    assert is_part("a.") and not is_part(".a") and not is_part("")
