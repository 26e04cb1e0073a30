"""Health in a manifest and in a part: it comes back, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from holdfast.base.types.health import Health, ReplicaGroup, Replicas
from holdfast.core.format.health import decode_health
from holdfast.core.format.index.index_builder import IndexBuilder
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.core.format.part import RankPart, decode_part, encode_part
from holdfast.core.format.sealed_json import unsealed
from holdfast.errors import CorruptError
from tests.unit.core.format.documents import manifest

FOUND = Health({"v": 1, "w": 7}, {"w": 3}, {"v": (0, 2), "x": (1,)}, ("v",), {0: "a", 1: "b", 2: "c"})
SAID = {"nonfinite": {"v": 1, "w": 7}, "new": {"w": 3}, "divergent": {"v": [0, 2], "x": [1]}, "undecided": ["v"]}


@pytest.mark.parametrize("health", [Health({}), Health(divergent={}), Health({}, divergent={}), FOUND])
def test_a_manifest_brings_its_health_back(health: Health) -> None:
    data = encode_manifest(replace(manifest(), health=health))
    assert decode_manifest(data, "here").health == health
    assert unsealed(data, "here")[0]["holdfast"] == {"format": [1, 2], "kind": "checkpoint"}


def test_a_manifest_of_which_nothing_was_looked_at_says_nothing() -> None:
    document, _ = unsealed(encode_manifest(manifest()), "here")
    assert "health" not in document
    assert decode_manifest(encode_manifest(manifest()), "here").health is None


BAD: dict[str, tuple[object, ...]] = {
    "nonfinite": ([], {"w": 0}, {"w": -1}, {"w": 1.0}, {"w": True}, {"w": 1 << 63}, {"\ud800": 1}, "w"),
    "new": ([], {"w": 7}, {"w": -1}, {"absent": 0}, {"w": None}),
    "divergent": ([], {"w": []}, {"w": [True]}, {"w": [1, 1]}, {"w": [2, 1]}, {"w": [-1]}, {"w": [1 << 40]}, {"w": 1}),
    "undecided": ({}, ["w"], [1], "v"),
    "hosts": ([], {"-1": "a"}, {"01": "a"}, {"٣": "a"}, {"1": 5}, {"x": "a"}, {"9" * 5000: "a"}, {"100000": "a"}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name: str) -> None:
    assert decode_health(SAID, "here") is not None
    for value in BAD[name]:
        with pytest.raises(CorruptError, match="here: "):
            decode_health({**SAID, name: value}, "here")
    for value in (7, "healthy", [1], True):
        with pytest.raises(CorruptError, match="here: health: expected `object`"):
            decode_health(value, "here")


def part(**found: object) -> RankPart:
    return replace(RankPart(3, "0123456789abcdef", IndexBuilder(4096, []).index(), (), None, {}, ()), **found)  # type: ignore[arg-type]


def test_a_part_brings_back_what_was_found() -> None:
    replicas = Replicas("host", 0, ("v", "w"), (ReplicaGroup(b"8 bytes.", (0, 1), b"0123456789abcdef"),))
    again = decode_part(encode_part(part(counted={"w": (3, "buffer")}, replicas=replicas)), "here")
    assert again.counted == {"w": (3, "buffer")} and again.replicas == replicas


def test_a_part_of_which_nothing_was_looked_at_is_written_as_before() -> None:
    document = msgspec.msgpack.decode(encode_part(part()))
    common = ["rank", "attempt", "index", "packs", "tree", "aliases", "layouts", "per_rank", "world_size", "digest"]
    assert list(document) == common
    again = decode_part(encode_part(part()), "here")
    assert again.counted is None and again.replicas is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonfinite", {"w": [0, "buffer"]}),
        ("nonfinite", {"w": [1, "cushion"]}),
        ("nonfinite", {"w": 1}),
        ("replicas", {"host": "a", "speaker": 0, "names": [], "groups": 5}),
        ("replicas", {"host": "a", "speaker": 0, "names": ["w"], "groups": [[b"x", [1, b"\0"], b"short"]]}),
        (
            "replicas",
            {"host": "a", "speaker": 0, "names": ["w"],
             "groups": [{"holders": b"x", "positions": [1, b"\0\0"], "digests": bytes(16)}]},
        ),
        (
            "replicas",
            {"host": "a", "speaker": 0, "names": ["w"],
             "groups": [{"holders": b"x", "positions": [1, b"\0"], "digests": b"short"}]},
        ),
    ],
)  # fmt: skip
def test_a_part_that_says_what_cannot_be_is_refused(field: str, value: object) -> None:
    document = msgspec.msgpack.decode(encode_part(part()))
    with pytest.raises(CorruptError, match="here: "):
        decode_part(msgspec.msgpack.encode({**document, field: value}), "here")
