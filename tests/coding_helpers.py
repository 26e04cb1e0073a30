"""Helper processes for tests: what `CodingHelpers` starts, sound and broken."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from holdfast import wiring
from holdfast.engine.encoding import helper_main
from holdfast.engine.encoding.helper_main import serve
from holdfast.ports.codec import Codec, StoredPart

FAILING = "tests.coding_helpers:failing"
"""Starts, and codes nothing."""

BREAKING = "tests.coding_helpers:breaking"
"""Ends before it is ready."""


class FailingCodec:
    """Takes every type, and codes none."""

    name, base = "planes", "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        return True

    def coder(self, dtype: str, base_dtype: str = "") -> FailingCodec:
        return self

    def encode(self, raw: memoryview, base: memoryview | None = None) -> Sequence[StoredPart] | None:
        raise MemoryError("no room")


def failing() -> int:
    codec: Codec = FailingCodec()  # type: ignore[assignment]
    return serve(dict.fromkeys(wiring.codecs(), codec))


OTHER_VERSION = "tests.coding_helpers:of_another_version"
"""Says what a helper of another version would."""


def of_another_version() -> int:
    helper_main.READY = b"holdfast 99.0, slots of layout 7"
    return serve(wiring.codecs())


def breaking() -> int:
    time.sleep(0.05)
    print("no such library", file=sys.stderr)
    return 3
