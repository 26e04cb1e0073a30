"""Crafted manifests and indexes that refer to packs of other steps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import STEP, Crafted, Document

PACK = "r00000.safetensors"
ATTEMPT = "0123456789abcdef"
OTHER = f"step-{STEP - 2:012d}/{ATTEMPT}"

NO_PACKS = {
    "above the root": f"../step-{STEP - 2:012d}/{ATTEMPT}/{PACK}",
    "that climbs out of its step": f"step-{STEP - 2:012d}/../{ATTEMPT}/{PACK}",
    "that climbs out of its attempt": f"{OTHER}/../../{PACK}",
    "of a step of few digits": f"step-5/{ATTEMPT}/{PACK}",
    "of a step of other digits": f"step-{'٠' * 11}٥/{ATTEMPT}/{PACK}",
    "of no attempt": f"step-{STEP - 2:012d}/{PACK}",
    "of an attempt in capitals": f"step-{STEP - 2:012d}/{ATTEMPT.upper()}/{PACK}",
    "that is a manifest": f"step-{STEP - 2:012d}/manifest.json",
    "that is an index": f"{OTHER}/index-00000.msgpack",
    "from the root of the system": f"/{OTHER}/{PACK}",
    "with an empty part": f"{OTHER}//{PACK}",
    "with NUL": f"{OTHER}/{PACK}\0",
}


def _moved(
    name: str = f"{OTHER}/{PACK}",
    *,
    in_index: str | None = None,
    kind: str = "step",
    bytes_: int = 0,
    put: bool = True,
    change: Any = None,
) -> Any:
    """Move the first pack to another step, and name it there in the manifest and in the index."""

    def craft(crafted: Crafted) -> None:
        def index(document: Document) -> None:
            named = [[kind, in_index or name] if own[1] == PACK else own for own in document["packs"]]
            document["packs"] = named

        def manifest(document: Document) -> None:
            for record in document["packs"]:
                if record[0] == PACK:
                    record[0], record[1] = name, record[1] + bytes_

        there = crafted.root / OTHER / PACK
        there.parent.mkdir(parents=True)
        shutil.move(crafted.pack, there)
        if not put:
            there.unlink()
        if change is not None:
            change(there)
        crafted.edit_index(index)
        crafted.edit_manifest(manifest)

    return craft


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _elsewhere(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


def _through_a_folder(path: Path) -> None:
    """Make the attempt of the other step a link to a folder that lies elsewhere."""
    moved = path.parent.rename(path.parents[2] / "moved")
    path.parent.symlink_to(moved)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _by_path(crafted: Crafted) -> None:
    _moved()(crafted)
    crafted.edit_manifest(lambda document: document.update(step=None))


CASES = [
    *(Case(f"a pack of another step {name}", "open", _moved(each)) for name, each in NO_PACKS.items()),
    Case("a pack of another step that is whole", HARMLESS, _moved()),
    Case("a pack of the step itself", "open", _moved(f"step-{STEP:012d}/{ATTEMPT}/{PACK}")),
    Case("a pack of another step in a checkpoint by path", "open", _by_path),
    Case("a pack of another step that is missing", "read", _moved(put=False)),
    Case("a pack of another step that is longer", "read", _moved(change=_longer)),
    Case("a pack of another step that is cut short", "read", _moved(change=lambda path: os.truncate(path, 5000))),
    Case("a pack of another step that is changed", "read", _moved(change=_flipped)),
    Case("a pack of another step through a link", "read", _moved(change=_elsewhere)),
    Case("a pack of another step through a linked folder", "read", _moved(change=_through_a_folder)),
    Case("a pack of another step of other bytes in the manifest", "read", _moved(bytes_=4096)),
    Case("a pack of another step of too few bytes in the manifest", "tensors", _moved(bytes_=-4096)),
    Case("a pack of another step of the kind own", "tensors", _moved(kind="own")),
    Case("a pack of another step of the kind file", "tensors", _moved(kind="file")),
    Case("a pack of its own of the kind step", "tensors", _moved(in_index=PACK)),
    Case(
        "a pack of another step that the manifest does not name",
        "tensors",
        _moved(in_index=f"{OTHER}/r00001.safetensors"),
    ),
]
