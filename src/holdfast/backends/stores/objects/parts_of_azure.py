"""Uploads in parts of Azure: blocks of a blob, and the list that joins them.

The client signs a URL to write one blob, and what is asked of that blob is added to it. The server discards blocks that
no list names after a week, or with the next list of their blob: nobody can list or remove them before.
"""

from __future__ import annotations

import base64
import hashlib
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta

from holdfast.backends.stores.objects.client import Clients
from holdfast.backends.stores.objects.signed import sent
from holdfast.base.clock import Clock

_SIGNED_FOR = timedelta(minutes=60)
_ID_BYTES = 12


class BlocksOfContainer:
    """The uploads of one container of Azure; see `Parts`."""

    part_bytes_min = 0
    parts_max = 50_000

    def __init__(self, clients: Clients, clock: Clock, url: str) -> None:
        """Remember; does no I/O.

        Args:
            clients: Sign.
            clock: Gives ids of uploads.
            url: Of the container, for messages.
        """
        self._clients, self._clock, self._url = clients, clock, url

    def begin(self, full: str, where: str) -> str:
        """Return a new id, which no request needs."""
        return self._clock.random_bytes(_ID_BYTES).hex()

    def put(self, full: str, where: str, upload_id: str, number: int, data: memoryview) -> str:
        """Store a block; return its name. All names of a blob have one length."""
        name = base64.b64encode(f"{upload_id}-{number:06d}".encode()).decode()
        url = self._url_of(full)
        headers = {"content-type": "application/octet-stream"}
        if url.startswith("http://"):
            # TLS protects the content already. Plain HTTP does not.
            headers["content-md5"] = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        asked = f"{url}&comp=block&blockid={urllib.parse.quote(name, safe='')}"
        sent(self._clients, "store", f"{where} (part {number})", "PUT", asked, data, headers)
        return name

    def join(self, full: str, where: str, upload_id: str, tags: list[str], *, on_condition: bool) -> None:
        """Join blocks into a blob."""
        blocks = "".join(f"<Latest>{tag}</Latest>" for tag in tags)
        document = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode()
        headers = {"content-type": "application/xml", "x-ms-blob-content-type": "application/octet-stream"}
        if on_condition:
            headers["if-none-match"] = "*"
        sent(self._clients, "complete", where, "PUT", f"{self._url_of(full)}&comp=blocklist", document, headers)

    def abort(self, full: str, where: str, upload_id: str) -> None:
        """Do nothing: the server discards the blocks."""

    def listed(self, prefix: str, where: str) -> Iterator[tuple[str, str]]:
        """Yield nothing: nobody can list the blocks of blobs that do not exist."""
        return iter(())

    def _url_of(self, full: str) -> str:
        signed: str = self._clients.ask(
            "sign", self._url, lambda api, client: api.sign(client, "PUT", full, expires_in=_SIGNED_FOR)
        )
        return signed
