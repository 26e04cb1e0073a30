"""Counts the functions and files of Holdfast that a warm save and a warm load call. Runs in a process of its own.

    python -m tests.house.hops

Each verb is called twice; the second call is counted, on all threads. A call is one process, one `torch.nn.Linear` and
a local folder.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

import holdfast

PACKAGE = str(Path(holdfast.__file__).parent) + os.sep
SYSCALLS = PACKAGE + "backends/stores/syscalls.py"


class Hops:
    """The functions called while `counts` runs: until the first byte of a pack was written or read, and in all."""

    def __init__(self) -> None:
        self._is_counting = False
        self._called: set[CodeType] = set()
        self._before_first_byte: set[CodeType] | None = None

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self._is_counting or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # A comprehension is a function in Python 3.11 and none in 3.12. A module runs at its first import only.
        if not code.co_name.startswith("<") or code.co_name == "<lambda>":
            self._called.add(code)
        is_transfer = code.co_filename == SYSCALLS and code.co_name in ("pwrite", "preadv")
        if is_transfer and self._before_first_byte is None and _is_pack(frame.f_locals["fd"]):
            self._before_first_byte = self._called.copy()

    def counts(self, call: Callable[[], object]) -> dict[str, int]:
        self._called, self._before_first_byte, self._is_counting = set(), None, True
        sys.setprofile(self.profile)
        call()
        sys.setprofile(None)
        self._is_counting = False
        assert self._before_first_byte, "no pwrite or preadv of a pack was seen"
        return {
            "functions_before_first_byte": len(self._before_first_byte),
            "files_before_first_byte": _files(self._before_first_byte),
            "functions": len(self._called),
            "files": _files(self._called),
        }


def _files(called: set[CodeType]) -> int:
    return len({code.co_filename for code in called})


def _is_pack(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors")


def main() -> None:
    state = {"model": torch.nn.Linear(256, 256)}
    hops = Hops()
    # Before the first save, whose threads serve the second one.
    threading.setprofile(hops.profile)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        holdfast.save(first, state)
        save = hops.counts(lambda: holdfast.save(second, state))
        holdfast.load(first, state)
        load = hops.counts(lambda: holdfast.load(second, state))
    print(json.dumps({"save": save, "load": load}))


if __name__ == "__main__":
    main()
