"""A real server that speaks S3 behind a proxy with faults: each request is made again, and nothing is stored wrong."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.concurrency import ConcurrencyLimit
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB, PAGE_BYTES, ObjectSettings, Settings
from tests.doubles.fault_proxy import FaultKind, FaultProxy, ProxiedRequest, ProxyFault
from tests.support.object_server import ObjectServer
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", int(objects.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def url(objects: ObjectServer) -> str:
    return objects.new_url()


def through(proxy: FaultProxy, **changes: float) -> Settings:
    return Settings(object_store=ObjectSettings(endpoint=proxy.url, **changes))  # type: ignore[arg-type]


@pytest.fixture
def store(proxy: FaultProxy, url: str) -> RetryingStore:
    """A store whose waits take no time, and that has been asked for its creates already."""
    settings = through(proxy)
    store = RetryingStore(ObjectStore(url, settings=settings), settings, ClockBySleep())
    store.put_if_absent("first", b"")
    return store


@pytest.fixture
def plain(objects: ObjectServer, url: str) -> ObjectStore:
    """The same place, past the proxy."""
    return ObjectStore(url, settings=objects.settings())


def is_put_of(name: str) -> Callable[[ProxiedRequest], bool]:
    return lambda request: request.method == "PUT" and request.target.partition("?")[0].endswith(name)


DAEMON_POOL: dict[str, Callable[[RetryingStore], object]] = {
    "size": lambda store: store.size("there"),
    "get": lambda store: store.get("there", 100),
    "list": lambda store: [entry.key for entry in store.list()],
    "folders": lambda store: store.folders(),
    "read_into": lambda store: store.read_into("there", [(2, 5)], [memoryview(bytearray(3))]),
    "put": lambda store: store.put("new", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("new", b"1"),
    "delete": lambda store: store.delete(["there", "none"]),
    "move": lambda store: store.move("there", "new"),
}


class TestEachCall:
    @pytest.mark.parametrize("name", DAEMON_POOL)
    def test_it_outlives_refusals_and_cuts(self, proxy: FaultProxy, store: RetryingStore, name: str) -> None:
        store.put("there", b"0123456789")
        faults = [
            proxy.inject(ProxyFault(FaultKind.REFUSE, times=2)),
            proxy.inject(ProxyFault(FaultKind.CUT_BEFORE)),
            proxy.inject(ProxyFault(FaultKind.CUT_AFTER)),
        ]
        DAEMON_POOL[name](store)
        assert [fault.met for fault in faults] == [2, 1, 1]
        assert store.retry_counts.throttled == 2 and store.retry_counts.retries >= 4

    def test_pressure_narrows_what_is_in_flight(self, proxy: FaultProxy, store: RetryingStore, url: str) -> None:
        limit = ConcurrencyLimit.shared(url[: url.index("/", 5)], 64)
        limit._reset()  # Other tests of this process have narrowed it.
        proxy.inject(ProxyFault(FaultKind.REFUSE, status=429, times=3))
        store.put("key", b"")
        assert limit.limit == 8

    @pytest.mark.parametrize(
        ("status", "code"), ((403, "AccessDenied"), (400, "InvalidRequest"), (404, "NoSuchBucket"))
    )
    def test_what_lasts_is_asked_once(self, proxy: FaultProxy, store: RetryingStore, status: int, code: str) -> None:
        before = len(proxy.requests)
        fault = proxy.inject(ProxyFault(FaultKind.REFUSE, status=status, code=code, times=math.inf))
        with pytest.raises(InvalidError):
            store.put("key", b"")
        assert fault.met == len(proxy.requests) - before == 1


class TestCreates:
    def test_a_lost_reply_is_a_success(self, proxy: FaultProxy, store: RetryingStore, plain: ObjectStore) -> None:
        fault = proxy.inject(ProxyFault(FaultKind.CUT_AFTER, is_put_of("/key")))
        store.put_if_absent("key", b"ours")
        assert fault.met == 1 and plain.get("key", 10) == b"ours"

    def test_another_writer_in_between_wins(self, proxy: FaultProxy, store: RetryingStore, plain: ObjectStore) -> None:
        proxy.inject(ProxyFault(FaultKind.CUT_BEFORE, is_put_of("/key")))
        plain.put("key", b"them")
        with pytest.raises(ConflictError):
            store.put_if_absent("key", b"ours")
        assert plain.get("key", 10) == b"them"

    @pytest.mark.parametrize("kind", (FaultKind.CUT_BEFORE, FaultKind.CUT_AFTER))
    def test_a_pack_is_sent_again(
        self, proxy: FaultProxy, store: RetryingStore, plain: ObjectStore, kind: FaultKind
    ) -> None:
        fault = proxy.inject(ProxyFault(kind, is_put_of("/pack"), times=2))
        data = bytes(range(256)) * (PAGE_BYTES // 128)
        upload = store.upload("a/pack", len(data), PAGE_BYTES)
        for offset in (PAGE_BYTES, 0):
            upload.write(offset, memoryview(data)[offset : offset + PAGE_BYTES])
        upload.complete()
        # The second try finds the object of the first one, and asks for no more.
        assert fault.met == 2
        assert plain.get("a/pack", len(data)) == data

    def test_at_the_deadline_it_says_what_is_known(self, proxy: FaultProxy, store: RetryingStore) -> None:
        proxy.inject(ProxyFault(FaultKind.REFUSE, times=math.inf))
        with pytest.raises(UnavailableError, match="None of the requests took effect") as caught:
            store.put_if_absent("key", b"ours")
        assert not isinstance(caught.value, TemporaryError)
        proxy.heal()
        proxy.inject(ProxyFault(FaultKind.CUT_AFTER, times=math.inf))
        with pytest.raises(UnavailableError, match="The outcome is unknown"):
            store.put_if_absent("key", b"ours")
        proxy.heal()
        # The next one works.
        store.put_if_absent("other", b"ours")


def test_a_black_hole_is_left_and_the_window_may_be_rewritten(proxy: FaultProxy, url: str, plain: ObjectStore) -> None:
    """The caller rewrites its memory as soon as it may, while the first request still hangs."""
    settings = through(proxy, silence_timeout_seconds=0.5)
    store = RetryingStore(ObjectStore(url, settings=settings), settings)
    store.put_if_absent("first", b"")
    fault = proxy.inject(ProxyFault(FaultKind.SILENCE, is_put_of("/pack")))
    window, released = bytearray(b"1" * MIB), threading.Event()
    upload = store.upload("pack", len(window), len(window))
    upload.write(0, memoryview(window), released.set)
    completing = threading.Thread(target=upload.complete)
    completing.start()
    assert fault.reached.wait(60)
    if released.is_set():
        window[:] = b"2" * MIB
    completing.join(60)
    assert released.is_set()
    window[:] = b"3" * MIB
    fault.release()
    assert plain.get("pack", MIB) == b"1" * MIB
    assert fault.met == 1 and store.retry_counts.throttled >= 1


def test_silence_ends_a_read_whose_object_may_be_large(proxy: FaultProxy, url: str) -> None:
    """Of a manifest only a bound of its size is known, which is far above most of them."""
    settings = through(proxy, silence_timeout_seconds=0.5, bytes_per_second_min=1)
    store = RetryingStore(ObjectStore(url, settings=settings), settings)
    store.put("manifest", b"small")
    fault = proxy.inject(ProxyFault(FaultKind.SILENCE, lambda request: request.method == "GET"))
    # By its size alone the first request would have a year.
    assert store.get("manifest", 64 * MIB) == b"small"
    assert fault.met == 1 and store.retry_counts.throttled >= 1


def test_a_flipped_bit_of_a_read_is_for_digests_to_see(proxy: FaultProxy, store: RetryingStore) -> None:
    proxy.inject(ProxyFault(FaultKind.FLIP_REPLY, lambda request: request.method == "GET", offset=1))
    store.put("key", b"0123")
    into = bytearray(4)
    store.read_into("key", [(0, 4)], [memoryview(into)])
    assert into == b"0023"


def test_an_operation_has_one_deadline_for_all_its_calls(proxy: FaultProxy, store: RetryingStore) -> None:
    with pytest.raises(MissingError):
        store.get("none", 1)
    view = store.for_operation("save of step 7", 0, 1)
    fault = proxy.inject(ProxyFault(FaultKind.CUT_BEFORE, times=math.inf))
    for number in range(20):
        with pytest.raises(UnavailableError, match=r"retry_seconds_per_(call|save)"):
            view.put(f"key-{number}", b"")
    assert store.retry_counts.seconds < 400
    proxy.heal()
    assert fault.met > 20
    store.for_operation("save of step 8", 0, 1).put("key", b"")
