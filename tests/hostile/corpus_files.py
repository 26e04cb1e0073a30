"""Files that are none, of sizes that are none, under names that are none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.cases import HARMLESS, Case
from tests.hostile.crafting import STEP, Crafted

INDEX, PART, PACK = "index-00000.msgpack", "parts/r00000.msgpack", "r00000.safetensors"
FIRST = {INDEX: "tensors", PART: "read", PACK: "read", "manifest.json": "open"}


def _path(crafted: Crafted, name: str) -> Path:
    return crafted.manifest_path if name == "manifest.json" else crafted.attempt / name


def _link_out(crafted: Crafted, path: Path) -> None:
    """The very bytes, outside the root, behind a link."""
    outside = crafted.root.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def _link_to(target: str) -> Callable[[Crafted, Path], None]:
    return lambda crafted, path: crafted.become(path, lambda place: place.symlink_to(target))


KINDS: dict[str, Callable[[Crafted, Path], object]] = {
    "a link out of the root": _link_out,
    "a link to itself": lambda crafted, path: crafted.become(path, lambda place: place.symlink_to(place)),
    "a link to /dev/zero": _link_to("/dev/zero"),
    "a link to /etc/passwd": _link_to("/etc/passwd"),
    "a FIFO": lambda crafted, path: crafted.become(path, os.mkfifo),
    "a folder": lambda crafted, path: crafted.become(path, Path.mkdir),
    "2 TiB of nothing": lambda crafted, path: crafted.sparse(path, 2 << 40),
}


def _kind(name: str, make: Callable[[Crafted, Path], object]) -> Any:
    return lambda crafted: make(crafted, _path(crafted, name))


def _sparse_and_said(name: str, count: int) -> Any:
    """As large as the manifest says, and empty."""

    def craft(crafted: Crafted) -> None:
        crafted.sparse(_path(crafted, name), count)
        crafted.record(name, count, "0" * 32)

    return craft


def _linked_folder(find: Callable[[Crafted], Path]) -> Any:
    def craft(crafted: Crafted) -> None:
        folder = find(crafted)
        outside = crafted.root.parent / "outside"
        folder.rename(outside)
        folder.symlink_to(outside)

    return craft


def _folders(*names: str) -> Any:
    def craft(crafted: Crafted) -> None:
        for name in names:
            (crafted.root / name).mkdir()

    return craft


def _many_files(crafted: Crafted) -> None:
    source = crafted.root / "x"
    source.touch()
    for number in range(30_000):
        os.link(source, crafted.root / f"x{number}")


def _step_copied(crafted: Crafted) -> None:
    shutil.copytree(crafted.folder, crafted.root / "step-000000000009")


CASES = [
    *(Case(f"{name} is {kind}", FIRST[name], _kind(name, make)) for name in FIRST for kind, make in KINDS.items()),
    *(
        Case(f"{name} of 2 TiB of nothing, as said", FIRST[name], _sparse_and_said(name, 2 << 40))
        for name in (INDEX, PART, PACK)
    ),
    Case("run file is a FIFO", "list", lambda c: c.become(c.root / "holdfast.json", os.mkfifo)),
    Case(
        "run file is a link to /dev/zero",
        "list",
        lambda c: c.become(c.root / "holdfast.json", lambda path: path.symlink_to("/dev/zero")),
    ),
    Case("attempt is a link out of the root", "tensors", _linked_folder(lambda crafted: crafted.attempt)),
    Case("step is a link out of the root", "manager", _linked_folder(lambda crafted: crafted.folder)),
    Case("parts is a link out of the root", "read", _linked_folder(lambda crafted: crafted.attempt / "parts")),
    Case(
        "folders with names that are none",
        HARMLESS,
        _folders(
            "step-٠٠٠٠٠٠٠٠٠٠٠٩",
            "step-9",
            "step-000000000008 ",
            "step-\x1b[31m",
            "STEP-000000000008",
            "step-0000000000080",
            "..x",
            "a" * 255,
            "step-000000000008\n",
        ),
    ),
    Case("folders with names that are no text", HARMLESS, lambda c: os.mkdir(os.fsencode(c.root) + b"/step-\xff\xfe")),
    Case("a step without a manifest", HARMLESS, _folders("step-000000000008", "step-999999999999")),
    Case(
        "attempts with names that are none",
        HARMLESS,
        lambda c: [
            (c.folder / name).mkdir()
            for name in ("0123456789abcdef", "0123456789ABCDEF", "\x1b[31m", "٠123456789abcdef")
        ],
    ),
    Case("a step that is a file", HARMLESS, lambda c: (c.root / "step-000000000008").write_bytes(b"")),
    Case("a step copied to another name", "list", _step_copied),
    Case(
        "a file in the attempt that nobody names",
        "verify",
        lambda c: (c.attempt / "r00001.safetensors").write_bytes(b"x"),
    ),
    Case(
        "a link in the attempt that nobody names",
        HARMLESS,
        lambda c: (c.attempt / "r00001.safetensors").symlink_to("/dev/zero"),
    ),
    Case(
        "a manifest beside the steps", "manager", lambda c: shutil.copyfile(c.manifest_path, c.root / "manifest.json")
    ),
    Case("30,000 files beside the steps", HARMLESS, _many_files),
]

assert STEP < 8, "further steps are newer"
