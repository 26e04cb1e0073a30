"""The folder of an object store that is measured: its bare client, the limit that this client sets, and quiet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import conditions
from bench.state import MIB

VARIABLE = "BENCH_STORE_URL"
"""Has the URL in the processes of the parts."""

OBJECT_BYTES = 32 * MIB
"""Size of the objects of the limit: that of a pack."""

RANGE_BYTES = 8 * MIB
"""Bytes of one ranged read of the limit."""

SHAPES = (4, 8)
"""Requests in flight per process; the limit of a round is the best of them."""

_TIMEOUT = timedelta(seconds=300)
_IDLE_SHARE, _IDLE_SECONDS, _IDLE_SECONDS_MAX = 0.75, 1.0, 6.0


@dataclass(frozen=True)
class Place:
    """A folder of a bucket, and where its server is."""

    url: str
    """`s3://bucket/folder`."""

    endpoint: str
    """URL of the server, or of a proxy before it."""

    @classmethod
    def here(cls) -> Place:
        """Return the place that the command has chosen for this process."""
        return cls(os.environ[VARIABLE], os.environ["AWS_ENDPOINT_URL"])

    def folder(self, name: str) -> str:
        """Return the URL of a folder in it."""
        return f"{self.url}/{name}"

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.url.removeprefix("s3://").partition("/")[0]

    def key(self, name: str) -> str:
        """Return the key of an object in it."""
        return f"{self.url.removeprefix('s3://').partition('/')[2]}/{name}"

    def client(self) -> Any:
        """Return a bare client, which signs what it sends over plain HTTP as Holdfast does."""
        from obstore.store import S3Store

        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            region=os.environ.get("AWS_REGION", "us-east-1"),
            client_options={"allow_http": True, "timeout": _TIMEOUT},
            retry_config={"max_retries": 0},
        )

    def remove(self, name: str) -> None:
        """Remove a folder."""
        import obstore

        client = self.client()
        for page in obstore.list(client, prefix=self.key(name)):
            obstore.delete(client, [each["path"] for each in page])


class Limit:
    """Puts objects and reads their ranges with the bare client. What is read goes nowhere."""

    def __init__(self, place: Place, own_bytes: int) -> None:
        """Make the memory of this rank's objects and the threads, and touch all of it."""
        self._place, self._client = place, place.client()
        block = os.urandom(MIB)
        self._memory = memoryview(bytearray(block * (max(own_bytes // MIB, 1))))
        self._threads = {count: ThreadPoolExecutor(count) for count in SHAPES}
        self.rank = conditions.rank()

    def write(self, name: str, in_flight: int) -> None:
        """Store this rank's objects, each by one put on condition that it is not there."""
        import obstore

        def put(start: int) -> None:
            data = self._memory[start : start + OBJECT_BYTES]
            obstore.put(self._client, self._key(name, start), data, mode="create", use_multipart=False)

        self._all(put, in_flight, self._starts)

    def read(self, name: str, in_flight: int) -> None:
        """Read this rank's objects by ranges."""
        import obstore

        def get(start: int) -> None:
            count = min(RANGE_BYTES, len(self._memory) - start)
            first = start % OBJECT_BYTES
            got = obstore.get_range(self._client, self._key(name, start), start=first, length=count)
            assert len(got) == count, f"{len(got)} of {count} bytes"

        self._all(get, in_flight, range(0, len(self._memory), RANGE_BYTES))

    def close(self) -> None:
        """Release threads and memory."""
        for each in self._threads.values():
            each.shutdown()
        self._memory.release()

    @property
    def _starts(self) -> range:
        return range(0, len(self._memory), OBJECT_BYTES)

    def _key(self, name: str, start: int) -> str:
        return self._place.key(f"{name}/rank{self.rank}/{start // OBJECT_BYTES}")

    def _all(self, call: Callable[[int], None], in_flight: int, starts: Iterable[int]) -> None:
        list(self._threads[in_flight].map(call, starts))


def wait_until_idle() -> None:
    """Wait until the machine does little, for a server frees what was deleted some time afterwards.

    Not for ever: another program may keep the machine busy.
    """
    limit = time.monotonic() + _IDLE_SECONDS_MAX
    while time.monotonic() < limit:
        idle, total = _processor_times()
        time.sleep(_IDLE_SECONDS)
        idle_after, total_after = _processor_times()
        if idle_after - idle >= _IDLE_SHARE * (total_after - total):
            return


def _processor_times() -> tuple[int, int]:
    """Return the idle time and the whole time of all processors, in ticks."""
    times = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return times[3] + times[4], sum(times)
