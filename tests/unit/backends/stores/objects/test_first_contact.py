"""A server that never answered: a mistyped endpoint is said at once, and a server that restarts is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.backends.stores.objects.first_contact import FirstContact
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import ObjectSettings, Settings
from tests.servers.process import free_port
from tests.support.object_proxy import object_proxy
from tests.support.object_server import ObjectServer
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep

UNKNOWN_NAME = "dns error: failed to lookup address information: Name or service not known"
NO_NAME_SERVER = "dns error: failed to lookup address information: Temporary failure in name resolution"
REFUSED = "tcp connect error: Connection refused"


def judged(contact: FirstContact, text: str) -> Exception:
    return contact.judged(TemporaryError("could not list s3://bucket"), text)


def test_a_name_that_nobody_has_is_final_until_the_server_has_answered(request: pytest.FixtureRequest) -> None:
    contact = FirstContact(request.node.nodeid)
    assert isinstance(judged(contact, UNKNOWN_NAME), InvalidError)
    assert "mend endpoint" in str(judged(contact, UNKNOWN_NAME))
    for text in (NO_NAME_SERVER, REFUSED):
        failure = judged(contact, text)
        assert isinstance(failure, TemporaryError)
        assert failure.is_first_contact
    contact.note_answer()
    for text in (UNKNOWN_NAME, NO_NAME_SERVER, REFUSED):
        failure = judged(FirstContact(request.node.nodeid), text)
        assert isinstance(failure, TemporaryError)
        assert not failure.is_first_contact


def test_a_refusal_is_an_answer(request: pytest.FixtureRequest) -> None:
    contact = FirstContact(request.node.nodeid)
    contact.judged(InvalidError("AccessDenied"), "Server returned non-2xx status code: 403 Forbidden")
    assert isinstance(judged(contact, UNKNOWN_NAME), TemporaryError)


def retried(url: str, endpoint: str) -> RetryingStore:
    settings = Settings(object_store=ObjectSettings(endpoint=endpoint))
    return RetryingStore(ObjectStore(url, settings=settings), settings, ClockBySleep())


def test_no_server_is_said_at_once_and_waited_for(objects: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = retried(objects.new_url(), endpoint)
    for call in (lambda: store.put("key", b"1"), lambda: list(store.list())):
        caplog.clear()
        with pytest.raises(UnavailableError, match="retry_seconds_per_call is 60"):
            call()
        first = caplog.records[0].getMessage()
        assert "has not answered this process yet (0 s)" in first
        assert f"no connection to {endpoint}: Connection refused" in first
        assert len(caplog.records) == 2  # It is said again when it is over, and never in between.


def test_a_server_that_is_gone_is_no_first_contact(objects: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    with object_proxy(objects.endpoint) as proxy:
        assert list(retried(objects.new_url(), proxy.endpoint).list()) == []
    # A store of its own has no connection that is open still.
    with pytest.raises(UnavailableError):
        list(retried(objects.new_url(), proxy.endpoint).list())
    assert "has waited" in caplog.records[0].getMessage()


def test_a_server_without_tls_is_no_server_for_tls(objects: ObjectServer, tmp_path: Path) -> None:
    endpoint = objects.endpoint.replace("http://", "https://")
    with pytest.raises(InvalidError, match="begin the endpoint with http://"):
        retried(objects.new_url(), endpoint).put("key", b"1")


def test_a_listing_that_has_not_begun_is_no_answer(objects: ObjectServer) -> None:
    settings = replace(objects.settings(), object_store=ObjectSettings(endpoint=f"http://127.0.0.1:{free_port()}"))
    store = ObjectStore(objects.new_url(), settings=settings)
    for _ in range(2):
        with pytest.raises(TemporaryError) as raised:
            list(store.list())
        assert raised.value.is_first_contact
