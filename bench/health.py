"""The cost of health checks: `python -m bench.health [MIB]`. Processor time of one core, side by side in rounds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.ports.framework import Collected, Selection
from holdfast.core.engine.buffers import BufferPool, allocate_aligned
from holdfast.core.engine.nonfinite import NonFinite
from holdfast.core.engine.stream import Scratch, stream
from holdfast.core.format.pack import header_of
from holdfast.core.plan.ownership import Owned
from holdfast.core.plan.packing import packs_of
from holdfast.settings import MIB
from holdfast.training.saving.health.health_record import REPLICA_WINDOW_BYTES, content_digest

ROUNDS = 15
_BUFFERS = BufferPool(1, 4 * MIB)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e5m2)


def main() -> None:
    """Print, for each element type, the cost of each check per GiB, beside the cost of every save."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    for dtype in DTYPES:
        tensor = torch.randn(mib * MIB // dtype.itemsize).to(dtype)
        collected = TorchFramework(Ranks(0, 1, lambda rank: rank)).collect({"w": tensor}, Selection())
        copy = torch.empty_like(tensor)
        works: dict[str, Callable[[], object]] = {
            "copied and hashed": lambda collected=collected: _streamed(collected, is_counted=False),
            "and counted": lambda collected=collected: _streamed(collected, is_counted=True),
            "replica hashed": lambda collected=collected: _compared(collected),
            "memcpy": lambda copy=copy, tensor=tensor: copy.copy_(tensor),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                start = time.thread_time()
                work()
                seconds[name].append((time.thread_time() - start) * 1024 / mib)
        base = seconds["copied and hashed"]
        for name, each in seconds.items():
            ratio = statistics.median(one / other for one, other in zip(each, base, strict=True))
            print(f"{dtype!s:20} {name:18} {statistics.median(each):6.3f} s/GiB  {ratio:5.2f} of copied and hashed")


def _streamed(collected: Collected, *, is_counted: bool) -> None:
    shards = collected.shards
    whole = [Owned(number, each.shard.pieces[0]) for number, each in enumerate(shards)]
    (pack,) = packs_of(0, [each.shard for each in shards], whole, MIB)
    nonfinite = NonFinite() if is_counted else None
    with _BUFFERS.lent() as buffer:
        stream(header_of(pack, {}), pack, Scratch(buffer), MIB, [each.source for each in shards], nonfinite)


def _compared(collected: Collected) -> None:
    buffer = allocate_aligned(REPLICA_WINDOW_BYTES)
    for each in collected.shards:
        content_digest(each.source, each.shard.pieces, each.shard.tensor.itemsize, buffer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
