"""Crafted manifests and run files."""

from __future__ import annotations

import json
from typing import Any

from holdfast.core.format.state_order import text_of
from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Crafted, Document, digest, seal, sealed

NOT_WHOLE = {
    "true": True, "false": False, "a float": 1.0, "NaN": float("nan"), "infinity": float("inf"), "minus one": -1,
    "10**400": 10**400, "2**63": 1 << 63, "text": "7", "a list": [7], "an object": {"a": 7},
}  # fmt: skip

NAMES = {
    "..": "../r00000.safetensors",
    "a step above": "../../step-000000000007/r00000.safetensors",
    "absolute": "/etc/passwd",
    "NUL": "r00000.safetensors\0",
    "300 characters": "r" * 300,
    "a surrogate": "r\ud800.safetensors",
    "a line break at its end": "r00000.safetensors\n",
    "other digits": "r٠٠٠٠٠.safetensors",
    "a dot before it": ".r00000.safetensors",
    "empty": "",
    "a number": 7,
    "a part": "parts/r00000.msgpack",
    "backslashes": "..\\r00000.safetensors",
    "a folder twice": "enc/enc/r00000.safetensors",
    "an escape": "\x1b[31mr00000.safetensors",
    "the manifest": "manifest.json",
}


def _field(name: str, value: object) -> Any:
    return lambda crafted: crafted.edit_manifest(lambda document: document.update({name: value}))


def _record(kind: str, at: int, value: object) -> Any:
    def craft(crafted: Crafted) -> None:
        def change(document: Document) -> None:
            document[kind][0][at] = value

        crafted.edit_manifest(change)

    return craft


def _text(change: Any) -> Any:
    """Change the sealed text as bytes and seal it again."""

    def craft(crafted: Crafted) -> None:
        body = sealed(crafted.manifest()).rpartition(b',\n "digest"')[0]
        crafted.manifest_path.write_bytes(seal(change(body)))

    return craft


def _raw(make: Any) -> Any:
    """Replace the manifest by bytes."""
    return lambda crafted: crafted.manifest_path.write_bytes(make(crafted.manifest_path.read_bytes()))


def _run_file(change: Any) -> Any:
    def craft(crafted: Crafted) -> None:
        document = json.loads((crafted.root / "holdfast.json").read_bytes())
        del document["digest"]
        change(document)
        (crafted.root / "holdfast.json").write_bytes(sealed(document))

    return craft


def _deep(opening: bytes, closing: bytes, depth: int) -> Any:
    return _text(lambda body: body + b',\n "deep": ' + opening * depth + b"0" + closing * depth)


CASES = [
    *(Case(f"step is {name}", "open", _field("step", value)) for name, value in NOT_WHOLE.items()),
    *(Case(f"world_size is {name}", "open", _field("world_size", value)) for name, value in NOT_WHOLE.items()),
    *(
        Case(f"pack of bytes {name}", "open", _record("packs", 1, value))
        for name, value in list(NOT_WHOLE.items())[:8]
        if name != "2**63"
    ),
    *(Case(f"pack named {name}", "open", _record("packs", 0, value)) for name, value in NAMES.items()),
    Case("index named as a pack", "open", _record("indexes", 0, "r00000.safetensors")),
    Case("part named above", "open", _record("parts", 0, "parts/../../r00000.msgpack")),
    Case("step of another folder", "manager", _field("step", 8)),
    Case("step null in a run", "manager", _field("step", None)),
    Case("step beyond its folder's digits", "open", _field("step", 10**12)),
    Case("attempt is ..", "open", _field("attempt", "..")),
    Case("attempt with a line break", "open", lambda c: _field("attempt", c.attempt.name + "\n")(c)),
    Case("attempt of another folder", "tensors", _field("attempt", "0" * 16)),
    Case("attempt absent", "open", lambda c: c.edit_manifest(lambda document: document.pop("attempt"))),
    Case("run_id is a number", "open", _field("run_id", 5)),
    Case("run_id steers a terminal", HARMLESS, _field("run_id", "\x1b]0;owned\x07\x9b31m\u202e")),
    Case("run_id of a surrogate", "open", _field("run_id", "\ud800")),
    Case("created steers a terminal", HARMLESS, _field("created", "\x1b[2J\r+00:00")),
    Case("created is null", "open", _field("created", None)),
    Case("software steers a terminal", HARMLESS, _field("software", {"\x1b[31m": "\x1b[0m\n"})),
    Case("software of objects", "open", _field("software", {"torch": {"a": [1]}})),
    Case(
        "layouts that are none",
        HARMLESS,
        _field("layouts", [1, None, {"mesh": 5}, {"mesh": [[[]]], "placements": [{}]}]),
    ),
    Case("layouts is an object", "open", _field("layouts", {})),
    Case("parent is a number", "open", _field("parent", 5)),
    Case("parent of wrong kinds", "open", _field("parent", [1, "a", None])),
    Case("parent's step is true", "open", _field("parent", ["a", True, "b"])),
    Case("parent steers a terminal", HARMLESS, _field("parent", ["\x1b[31m", 3, "\x1b[0m"])),
    Case("fewer tensors than the index", "tensors", _field("tensors", 1)),
    Case("more tensors than the index", "tensors", _field("tensors", 1 << 40)),
    Case("tensors negative", "open", _field("tensors", -1)),
    Case("tensor_bytes lies", "tensors", _field("tensor_bytes", 1 << 60)),
    Case("tensor_bytes is a float", "open", _field("tensor_bytes", 1e30)),
    Case("aliases is a list", "open", _field("aliases", ["a", "b"])),
    Case("order is a list", "open", _field("order", [1, 0])),
    Case("order is no base64", "open", _field("order", "half a name")),
    Case("order ends within a number", "open", _field("order", "AAAAAAA=")),
    Case(
        "order repeats a number", HARMLESS, _field("order", text_of(bytes([0, 0, 0, 0] * 2 + [1, 0, 0, 0] + [0] * 4)))
    ),
    Case("alias to a number", "open", _field("aliases", {"model.tied": 5})),
    Case("alias to nothing", "tensors", _field("aliases", {"model.tied": "nothing"})),
    Case("alias to itself", "tensors", _field("aliases", {"model.tied": "model.tied"})),
    Case("aliases in a ring", "tensors", _field("aliases", {"model.tied": "b", "b": "model.tied"})),
    Case("alias of a stored tensor", "tensors", _field("aliases", {"half": "big"})),
    Case("alias steers a terminal", "load", _field("aliases", {"model.\x1b[31m": "model.tied"})),
    Case("newer types that are numbers", "open", _field("newer_types", [1, 2])),
    Case("newer types in a text", "open", _field("newer_types", "float8_e8m0fnu")),
    Case("newer types that steer a terminal", HARMLESS, _field("newer_types", ["\x1b[2J", "int8"])),
    Case("no index", "tensors", _field("indexes", [])),
    Case("no packs", "tensors", _field("packs", [])),
    Case("no parts", "read", _field("parts", [])),
    Case("packs is null", "open", _field("packs", None)),
    Case(
        "a pack twice",
        "open",
        lambda c: c.edit_manifest(lambda document: document["packs"].append(document["packs"][0])),
    ),
    Case("an index twice", "open", lambda c: c.edit_manifest(lambda d: d["indexes"].append(d["indexes"][0]))),
    Case("a record of two", "open", lambda c: c.edit_manifest(lambda document: document["packs"][0].pop())),
    Case("a record that is an object", "open", _field("packs", [{"name": "r00000.safetensors"}])),
    Case("digest of an index is no text", "open", _record("indexes", 2, 5)),
    Case("digest of an index is no digest", "open", _record("indexes", 2, "\x1b[31m")),
    Case("index said to be huge", "tensors", _record("indexes", 1, 1 << 62)),
    Case("index said to be empty", "tensors", _record("indexes", 1, 0)),
    Case("pack said to be huge", "verify", _record("packs", 1, 1 << 62)),
    Case("pack said to be empty", "tensors", _record("packs", 1, 0)),
    Case(
        "a million packs that are not there",
        "verify",
        lambda c: c.edit_manifest(
            lambda d: d["packs"].extend([f"r{n:05d}.safetensors", 1 << 50, "0" * 32] for n in range(1, 10_000))
        ),
    ),
    Case("major version 2", "open", _field("holdfast", {"format": [2, 0], "kind": "checkpoint"})),
    Case("major version true", "open", _field("holdfast", {"format": [True, 0], "kind": "checkpoint"})),
    Case("major version 1.0", "open", _field("holdfast", {"format": [1.0, 0], "kind": "checkpoint"})),
    Case("version of text", "open", _field("holdfast", {"format": ["\x1b[31m" * 9999], "kind": "checkpoint"})),
    Case("version empty", "open", _field("holdfast", {"format": [], "kind": "checkpoint"})),
    Case("a later minor version", "open", _field("holdfast", {"format": [1, 99], "kind": "checkpoint"})),
    Case("of another kind", "open", _field("holdfast", {"format": [1, 0], "kind": "\x1b[31mrun"})),
    Case("no version", "open", lambda c: c.edit_manifest(lambda document: document.pop("holdfast"))),
    Case("unknown fields", HARMLESS, _field("later", {"a": [1, {"$b": None}]})),
    Case("state is a list", "open", _field("state", [1])),
    Case("state is a dict without a group", "open", _field("state", {"a": 1})),
    Case("state is absent", "open", lambda c: c.edit_manifest(lambda document: document.pop("state"))),
    Case("a key twice", "open", _text(lambda body: body + b',\n "step": 7')),
    Case(
        "a key twice, below",
        "open",
        _text(lambda body: body.replace(b'"kind": "checkpoint"', b'"kind": "run", "kind": "checkpoint"', 1)),
    ),
    Case("100,000 lists deep", "open", _deep(b"[", b"]", 100_000)),
    Case("100,000 objects deep", "open", _deep(b'{"a":', b"}", 100_000)),
    Case("quotes that hide depth", "open", _text(lambda body: body + b',\n "\\\\": ' + b"[" * 5000 + b"]" * 5000)),
    Case("a number of 100,000 digits", "open", _text(lambda body: body + b',\n "n": ' + b"9" * 100_000)),
    Case("a number beyond a double", "open", _text(lambda body: body + b',\n "n": 1e999')),
    Case("not UTF-8", "open", _text(lambda body: body + b',\n "\xff": 1')),
    Case("UTF-8 of a surrogate", "open", _text(lambda body: body + b',\n "\xed\xa0\x80": 1')),
    Case("a byte order mark", "open", _text(lambda body: b"\xef\xbb\xbf" + body)),
    Case("a list sealed", "open", _raw(lambda _: seal(b"[1"))),
    Case("nothing sealed", "open", _raw(lambda _: seal(b""))),
    Case("something after the seal", "open", _raw(lambda data: data + b" ")),
    Case("a seal of another text", "open", _raw(lambda data: data.replace(b'"step": 7', b'"step": 8'))),
    Case("a seal in capitals", "open", _raw(lambda data: data[:-36] + data[-36:].upper())),
    Case("two seals", "open", _raw(lambda data: seal(data[:-3]))),
    Case("a pickle", "open", _raw(lambda _: b"cos\nsystem\n(S'touch /tmp/holdfast-was-here'\ntR.")),
    Case("zeros", "open", _raw(lambda _: bytes(5000))),
    Case("run file of a number", "list", _run_file(lambda document: document.update(run_id=5))),
    Case("run file steers a terminal", HARMLESS, _run_file(lambda document: document.update(run_id="\x1b[31m\n"))),
    Case(
        "run file of a checkpoint",
        "list",
        _run_file(lambda d: d.update(holdfast={"format": [1, 0], "kind": "checkpoint"})),
    ),
    Case(
        "run file of major version 9", "list", _run_file(lambda d: d.update(holdfast={"format": [9, 0], "kind": "run"}))
    ),
    Case("run file that is large", "list", lambda c: (c.root / "holdfast.json").write_bytes(b"[" * 100_000)),
    Case(
        "run file of another seal",
        "list",
        lambda c: (c.root / "holdfast.json").write_bytes(
            b'{\n "a": 1,\n "digest": "' + digest(b"b").encode() + b'"\n}\n'
        ),
    ),
]
