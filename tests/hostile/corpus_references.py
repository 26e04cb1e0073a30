"""Crafted manifests and indexes that reference files elsewhere."""

from __future__ import annotations

import os
from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import Crafted, Document

PACK = "r00000.safetensors"

NO_URLS = {
    "one above": "file:///tmp/../etc/passwd",
    "of dots": "file:///etc/./passwd",
    "relative": "file://etc/passwd",
    "of nothing": "file://",
    "of the root": "file:///",
    "with an empty part": "file:///etc//passwd",
    "that ends in a slash": "file:///etc/",
    "with NUL": "file:///etc/passwd\0",
    "of a host over the network": "https://example.com/etc/passwd",
    "in capitals": "FILE:///etc/passwd",
    "of a surrogate": "file:///etc/\ud800",
}


def _referenced(url: str, *, index: str | None = None, kind: str = "file", bytes_: int | None = None) -> Any:
    """Name a file elsewhere in place of the first pack, in the manifest and in the index."""

    def craft(crafted: Crafted) -> None:
        def in_index(document: Document) -> None:
            named = [
                [kind, url if index is None else index] if name == PACK else [own, name]
                for own, name in document["packs"]
            ]
            document["packs"] = named

        def in_manifest(document: Document) -> None:
            for record in document["packs"]:
                if record[0] == PACK:
                    record[0] = url
                    record[1] = record[1] if bytes_ is None else bytes_

        crafted.edit_index(in_index)
        crafted.edit_manifest(in_manifest)

    return craft


def _of_the_pack_itself(crafted: Crafted) -> None:
    _referenced(f"file://{crafted.pack}")(crafted)


def _through_a_link(crafted: Crafted) -> None:
    os.symlink("/etc/passwd", crafted.attempt / "enc.link")
    _referenced(f"file://{crafted.attempt}/enc.link")(crafted)


CASES = [
    *(Case(f"a reference {name}", "open", _referenced(url, index="file:///x")) for name, url in NO_URLS.items()),
    Case("a reference to a file of the system", "read", _referenced("file:///etc/passwd")),
    Case("a reference to a device", "read", _referenced("file:///dev/zero")),
    Case("a reference to the memory of the process", "read", _referenced("file:///proc/self/mem")),
    Case("a reference to the checkpoint's own pack", "read", _of_the_pack_itself),
    Case("a reference to a link", "read", _through_a_link),
    Case("a reference that steers a terminal", "read", _referenced("file:///\x1b]0;owned\x07\x9b31m\u202e")),
    Case("a reference to a file that is nowhere", "read", _referenced("file:///nowhere/at/all")),
    Case("a reference of no bytes", "tensors", _referenced("file:///etc/passwd", bytes_=0)),
    Case("a reference of the kind own", "tensors", _referenced("file:///etc/passwd", kind="own")),
    Case("a reference of a kind reserved", "tensors", _referenced("file:///etc/passwd", kind="http")),
    Case("a pack of the kind file", "tensors", _referenced("file:///etc/passwd", index=PACK)),
    Case(
        "a reference that the manifest does not name", "tensors", _referenced("file:///etc/passwd", index="file:///x")
    ),
    Case("an origin that is a number", "open", lambda c: c.edit_manifest(lambda d: d.update(origin=5))),
    Case("an origin of a surrogate", "open", lambda c: c.edit_manifest(lambda d: d.update(origin="\ud800"))),
    Case(
        "an origin that steers a terminal", HARMLESS, lambda c: c.edit_manifest(lambda d: d.update(origin="\x1b[31m\n"))
    ),
]
