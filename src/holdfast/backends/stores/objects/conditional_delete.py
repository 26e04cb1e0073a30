"""Deletes an object on condition that it is still the one that was seen.

The client has no such request. So it signs a plain one, and this module sends it with the condition. A server that
does not know the condition would delete anything: so one that deletes a probe in spite of it is not asked again, and
the object is looked at just before it is deleted instead. Between that look and the deletion is a window.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from holdfast.backends.stores.objects.address import Address
from holdfast.backends.stores.objects.client import Clients
from holdfast.backends.stores.remote.probe import probe_key
from holdfast.base.clock import Clock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import InvalidError, MissingError

_SIGNED_FOR = timedelta(minutes=5)
_OTHER_TAG = '"00000000000000000000000000000000"'

_BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Status of a server that says nothing about what it was asked."""

_ABSENT = 404
"""Status of a key that has no object."""

_UNSIGNED = 0
"""In place of a status: these credentials cannot sign a URL."""

_keeps_condition: dict[str, bool] = {}
"""By bucket, whether its server keeps the condition of a deletion."""


class ConditionalDelete:
    """Deletes objects of one bucket."""

    def __init__(self, address: Address, clients: Clients, clock: Clock) -> None:
        """Remember where; does no I/O."""
        self._address, self._clients, self._clock = address, clients, clock

    def delete(self, key: str, where: str, seen: Any, look: Callable[[str], Any]) -> bool:
        """Delete an object if it is still the one that was seen; return whether it is gone.

        Args:
            key: Its full key.
            where: Store and key, for messages.
            seen: Its metadata.
            look: Returns the metadata of a key.
        Raises:
            CheckpointError: The store failed.
        """
        is_kept = self._is_kept()
        if is_kept:
            status = self._send(key, str(seen["e_tag"]))
            if status is not None and (200 <= status < 300 or status == 404):
                return True
            if status is not None and status not in (409, 412):
                raise TemporaryError(f"could not delete {where}: the server answers {status}", may_take_effect=True)
        try:
            if look(key)["e_tag"] != seen["e_tag"]:
                return False
            if is_kept:
                raise TemporaryError(f"could not delete {where}: no answer, or a busy server", may_take_effect=True)
            self._clients.ask("delete", where, lambda api, client: api.delete(client, key))
        except MissingError:
            pass  # Another process, or an earlier try of this call, has deleted it.
        return True

    def _is_kept(self) -> bool:
        """Return whether the server keeps the condition; ask it until it has said so, or has said no.

        Raises:
            TemporaryError: It is busy, so it is not known.
        """
        if self._address.scheme == "gs":
            # Google compares generations, by a header that belongs into the signature, and the client signs none.
            return False
        bucket = f"{self._address.scheme}://{self._address.bucket} {self._clients.endpoint}"
        if bucket not in _keeps_condition:
            answers = self._answers()
            if _ABSENT in answers:
                # A collection may have removed what looks like an object that a killed process left.
                answers = self._answers()
            busy = [answer for answer in answers if answer in _BUSY]
            if busy:
                raise TemporaryError(
                    f"could not ask {self._address.url} whether it keeps a condition of a deletion: the server answers "
                    f"{busy[0]}",
                    is_throttled=busy[0] in (429, 503),
                )
            is_kept = answers[0] == 412 and answers[1] is not None and 200 <= answers[1] < 300
            if None in answers or answers in ([_ABSENT, _ABSENT], [412, _ABSENT]):
                return is_kept  # It is not known, so the next call asks again.
            _keeps_condition[bucket] = is_kept
        return _keeps_condition[bucket]

    def _answers(self) -> list[int | None]:
        """Return what the server answers to a deletion with another tag, and to one with the right tag."""
        key = f"{self._address.prefix}{probe_key(self._clock)}"
        stored = self._clients.ask("store", self._address.url, lambda api, client: api.put(client, key, b"probe"))
        # It must refuse another tag, and take the right one as it was written by the server.
        answers = [self._send(key, _OTHER_TAG), self._send(key, str(stored["e_tag"]))]
        with suppress(MissingError):
            self._clients.ask("delete", self._address.url, lambda api, client: api.delete(client, key))
        return answers

    def _send(self, key: str, tag: str) -> int | None:
        """Send one deletion with a condition; return the status, None if there was no answer.

        Nothing of the signed URL may be seen, so no error of this request is passed on.
        """
        try:
            url = self._clients.ask(
                "sign",
                self._address.url,
                lambda api, client: api.sign(client, "DELETE", key, expires_in=_SIGNED_FOR),
                is_request=False,
            )
            request = urllib.request.Request(url, method="DELETE", headers={"If-Match": tag})
            with self._clients.opener().open(request, timeout=self._clients.silence_seconds) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            error.close()
            return int(error.code)
        except InvalidError:
            return _UNSIGNED
        except Exception:  # noqa: BLE001 - without an answer the caller looks at the object, and deletes it in the plain way
            return None
