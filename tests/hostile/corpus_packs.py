"""Crafted packs."""

from __future__ import annotations

import json
import struct
from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Crafted


def _entry(**fields: object) -> Any:
    """Change the entry of one tensor."""
    return lambda crafted: crafted.edit_header(lambda header: header["big"].update(fields))


def _header(text: bytes) -> Any:
    return lambda crafted: crafted.write_header(text)


def _length(length: int) -> Any:
    return lambda crafted: crafted.write_header(json.dumps(crafted.header()).encode(), length=length)


def _whole(change: Any) -> Any:
    """Replace the bytes of the pack and record their number."""

    def craft(crafted: Crafted) -> None:
        data = change(crafted.pack.read_bytes())
        crafted.pack.write_bytes(data)
        crafted.record(crafted.pack.name, len(data), "0" * 32)

    return craft


def _twice(crafted: Crafted) -> None:
    text = json.dumps(crafted.header(), separators=(",", ":"))
    entry = json.dumps(crafted.header()["half"], separators=(",", ":"))
    crafted.write_header((text[:-1] + ',"half":' + entry + "}").encode())


ENTRIES: dict[str, dict[str, object]] = {
    "of text": {"data_offsets": ["0", "4"]},
    "of one": {"data_offsets": [0]},
    "of floats": {"data_offsets": [0.0, 32768.0]},
    "of NaN": {"data_offsets": [float("nan"), 4]},
    "of true": {"data_offsets": [False, 32768]},
    "negative": {"data_offsets": [-4096, 28672]},
    "backwards": {"data_offsets": [32768, 0]},
    "beyond 64 bits": {"data_offsets": [1 << 70, 1 << 71]},
    "past the end": {"data_offsets": [1 << 40, (1 << 40) + 32768]},
    "of another tensor": {"data_offsets": [4096, 36864]},
}

CASES = [
    *(Case(f"header offsets {name}", "verify", _entry(**fields)) for name, fields in ENTRIES.items()),
    Case("header shape of lists", "verify", _entry(shape=[[64], 128])),
    Case("header shape of text", "verify", _entry(shape="64")),
    Case("header shape of mixed kinds", "verify", _entry(shape=[64, "128"])),
    Case("header shape of objects", "verify", _entry(shape=[{}])),
    Case("header shape of floats", "verify", _entry(shape=[64.0, 128])),
    Case("header shape huge", "verify", _entry(shape=[1 << 62, 1 << 62])),
    Case("header shape negative", "verify", _entry(shape=[-64, -128])),
    Case(
        "header shape of a million",
        "verify",
        lambda c: c.write_header(b'{"a":{"dtype":"I8","shape":[' + b"1," * 500 + b"1]}}"),
    ),
    Case("header shape null", "verify", _entry(shape=None)),
    Case("header dtype unknown", "verify", _entry(dtype="PICKLE")),
    Case("header dtype of a list", "verify", _entry(dtype=["I32"])),
    Case("header dtype absent", "verify", lambda c: c.edit_header(lambda header: header["big"].pop("dtype"))),
    Case("header dtype of another size", "verify", _entry(dtype="F64")),
    Case("header entry a number", "verify", lambda c: c.edit_header(lambda header: header.update(big=5))),
    Case("header lacks a tensor", "verify", lambda c: c.edit_header(lambda header: header.pop("big"))),
    Case(
        "header renames a tensor",
        "verify",
        lambda c: c.edit_header(lambda header: header.update({"\x1b[31m": header.pop("big")})),
    ),
    Case("header says a tensor twice", "verify", _twice),
    Case("header without metadata", HARMLESS, lambda c: c.edit_header(lambda header: header.pop("__metadata__"))),
    Case(
        "header metadata lies",
        HARMLESS,
        lambda c: c.edit_header(lambda header: header["__metadata__"].update({"holdfast.step": "\x1b[31m"})),
    ),
    Case("header a list", "verify", _header(b"[]")),
    Case("header null", "verify", _header(b"null")),
    Case("header empty", "verify", _header(b"")),
    Case("header not JSON", "verify", _header(b"{'a': 1}")),
    Case("header not UTF-8", "verify", _header(b'{"\xff":1}')),
    Case("header deep", "verify", _header(b'{"a":' + b"[" * 3000)),
    Case("header a pickle", "verify", _header(b"\x80\x04cos\nsystem\n(S'touch /tmp/holdfast-was-here'\ntR.")),
    Case("header length 2**63", "verify", _length(1 << 63)),
    Case("header length 2**64 - 1", "verify", _length((1 << 64) - 1)),
    Case("header length 0", "verify", _length(0)),
    Case("header length one less", "verify", lambda c: _length(struct.unpack("<Q", c.pack.read_bytes()[:8])[0] - 1)(c)),
    Case("header longer than the file", "verify", _length(1 << 30)),
    Case("pack longer than it was", "verify", _whole(lambda data: data + bytes(4096))),
    Case("pack of zeros", "read", _whole(lambda data: bytes(len(data)))),
    Case("pack cut to eight bytes", "tensors", _whole(lambda data: data[:8])),
    Case("pack empty", "tensors", _whole(lambda data: b"")),
    Case("pack of other bytes", "read", _whole(lambda data: data[:-1] + b"\xff")),
]
