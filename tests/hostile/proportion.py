"""Pickles that would make far more than they hold, and a process that tries each and tells what it took.

Run as a program: `python -m tests.hostile.proportion` prints one JSON line per pickle. Each is read by a child of its
own, whose memory is that of a fresh interpreter and what the reading adds: to trace every allocation instead takes five
times as long, and misses what is not Python's.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time

from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.errors import CheckpointError
from tests.hostile.torch_files import number, text


def _laughs(begin: bytes, make: bytes, levels: int) -> bytes:
    """Return a pickle of containers each of which holds the one before twice."""
    return b"\x80\x04" + begin + b"".join(b"q\0" + b"h\0" + make for _ in range(levels)) + b"."


_LIST_AROUND = b"\x86q\1](h\1e"

OUT_OF_PROPORTION = {
    "lists within lists": b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "tuples within tuples": b"\x80\x04)" + b"\x85" * 2_000_000 + b".",
    "dicts within dicts": b"\x80\x04" + b"}K\0" * 200_000 + b"N" + b"s" * 200_000 + b".",
    "a tuple deep as a key": b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",
    "a laugh of tuples": _laughs(b")", b"\x86", 64),
    "a laugh of lists": _laughs(b"]", _LIST_AROUND, 64),
    "a laugh of keys": b"\x80\x04}" + b"Nq\0" + b"h\0\x86q\0" * 60 + b"Ns.",
    "a laugh of frozensets": b"\x80\x04Nq\0" + b"(h\0h\0t(h\0K\1t\x86q\0" * 40 + b".",
    "a list in itself": b"\x80\x04]q\0h\0a.",
    "a dict in itself": b"\x80\x04}q\0K\1h\0s.",
    "a tuple in itself": b"\x80\x04]q\0h\0\x85q\1a0h\1.",
    "lists copied to sets": b"\x80\x04](" + b"K\1" * 200_000 + b"eq\0cbuiltins\nset\nq\1"
    + b"h\1h\0\x85R" * 50_000 + b".",
    "text copied to bytes": b"\x80\x04" + text("a" * 500_000) + b"q\0c_codecs\nencode\nq\1" + text("latin1") + b"q\2"
    + b"h\1h\0h\2\x86R" * 50_000 + b".",
    "sets": b"\x80\x04" + b"\x8f" * 3_000_000 + b".",
    "integers of one hash as keys": b"\x80\x04}("
    + b"".join(number(((1 << 61) - 1) * each) + b"N" for each in range(1, 60_000)) + b"u.",
    "integers of one hash in a set": b"\x80\x04\x8f("
    + b"".join(number(((1 << 61) - 1) * each) for each in range(1, 60_000)) + b"\x90.",
    "a huge integer as a key, ever again": b"\x80\x04" + b"\x8b\0\x20\0\0" + b"\x7f" * 8192 + b"q\0}q\1"
    + b"h\1h\0Ns0" * 100_000 + b".",
    "digits": b"L" + b"9" * 5_000_000 + b"L\n.",
    "an integer of many bytes": b"\x8b" + struct.pack("<I", 5_000_000) + b"\x7f" * 5_000_000 + b".",
}  # fmt: skip


def _memory(kind: str) -> int:
    """Return bytes of memory of this process, now (`VmRSS`) or at most so far (`VmHWM`)."""
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith(kind))) << 10


def _tried(name: str) -> None:
    before, begun = _memory("VmRSS"), time.perf_counter()
    met = message = ""
    try:
        unpickled(OUT_OF_PROPORTION[name], "here")
    except CheckpointError as error:
        met, message = "CheckpointError", str(error)
    except BaseException as error:
        met, message = type(error).__name__, str(error)
    seconds, peak = time.perf_counter() - begun, _memory("VmHWM") - before
    print(json.dumps({"name": name, "met": met, "message": message, "seconds": seconds, "peak": peak}), flush=True)


def main() -> None:
    """Try each in a child."""
    for name in OUT_OF_PROPORTION:
        child = os.fork()
        if not child:
            _tried(name)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(f"{name}: ended with status {status}")


if __name__ == "__main__":
    main()
