"""Requests that the client library lacks, signed by botocore and sent over a connection of their own.

They carry parts of an upload, and list and abort uploads. Credentials come from where the client finds its own.
"""

from __future__ import annotations

import importlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import ObjectSettings
from holdfast.stores.objects.address import Address
from holdfast.stores.objects.client import Clients, Keys
from holdfast.stores.objects.refusals import refusal

_REGION = "us-east-1"
_REPLY_BYTES_MAX = 8 << 20
"""Longest reply that is read: a page of a listing has a thousand entries."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    headers: Mapping[str, str]
    """By lower-case name."""

    text: str
    """Its document."""


class SignedRequests:
    """Sends requests to one bucket. Any thread may call."""

    def __init__(self, address: Address, settings: ObjectSettings, clients: Clients) -> None:
        """Remember where; does no I/O."""
        self._address, self._settings, self._clients = address, settings, clients

    def send(
        self,
        doing: str,
        where: str,
        method: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        data: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request, and return the reply to it. The data is read no more once the call has ended.

        Args:
            doing: The operation as a verb, for messages.
            where: Store and key, for messages.
            method: Method of HTTP.
            key: Full key of an object; empty for the bucket.
            query: Parameters.
            data: Content.
            headers: Further headers.
        Raises:
            CheckpointError: The request failed. No exception of the connection is chained to it: it may repeat headers.
        """
        url, signed = self.signed(method, key, dict(query or {}), data, dict(headers or {}))
        return sent(self._clients, doing, where, method, url, data, signed)

    def signed(
        self, method: str, key: str, query: dict[str, str], data: bytes | memoryview, headers: dict[str, str]
    ) -> tuple[str, dict[str, str]]:
        """Return URL and headers of a request with its signature.

        Raises:
            InvalidError: botocore is not installed.
        """
        auth, requests, credentials, config = _botocore(self._address)
        keys = self._clients.keys()
        origin, path = self._place(key, keys)
        asked = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(query.items()))
        url = f"{origin}{path}{'?' if asked else ''}{asked}"
        # botocore would leave out a port that is the default one, and urllib sends that port.
        headers["host"] = urllib.parse.urlsplit(origin).netloc
        headers.setdefault("content-type", "application/octet-stream")
        request = requests.AWSRequest(method, url, headers=headers, data=data)
        request.context["client_config"] = config.Config(s3={"payload_signing_enabled": self._clients.signs_content})
        region = self._settings.region or keys.region or _REGION
        owner = credentials.Credentials(keys.access, keys.secret, keys.token or None)
        auth.S3SigV4Auth(owner, "s3", region).add_auth(request)
        return url, dict(request.headers.items())

    def _place(self, key: str, keys: Keys) -> tuple[str, str]:
        """Return scheme and host of the server, and the path of an object there."""
        bucket, endpoint = self._address.bucket, self._clients.endpoint
        quoted = urllib.parse.quote(key, safe="/-_.~")
        is_hosted = self._settings.virtual_hosted
        if endpoint is None:
            host = f"s3.{self._settings.region or keys.region or _REGION}.amazonaws.com"
            endpoint = f"https://{bucket}.{host}" if is_hosted else f"https://{host}"
        split = urllib.parse.urlsplit(endpoint)
        if not split.netloc:
            raise InvalidError(f"{self._address.url}: the endpoint has no host; expected a URL such as https://host")
        before = split.path.rstrip("/")
        return f"{split.scheme}://{split.netloc}", f"{before}/{quoted}" if is_hosted else f"{before}/{bucket}/{quoted}"


def sent(
    clients: Clients,
    doing: str,
    where: str,
    method: str,
    url: str,
    data: bytes | memoryview,
    headers: Mapping[str, str],
) -> Reply:
    """Send a request that is signed, and return the reply to it; arguments and errors as `SignedRequests.send`.

    The URL may be signed itself: no message repeats it.
    """
    has_content = method in ("PUT", "POST")
    request = urllib.request.Request(url, data=data if has_content else None, method=method)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    if has_content:
        request.add_unredirected_header("content-length", str(memoryview(data).nbytes))
    failure: CheckpointError
    try:
        with clients.opener().open(request, timeout=clients.seconds_for(memoryview(data).nbytes)) as reply:
            text = reply.read(_REPLY_BYTES_MAX).decode("utf-8", "replace")
            found = {name.lower(): value for name, value in reply.headers.items()}
        if "<Error>" not in text[:400]:
            return Reply(found, text)
        # The end of a long request may fail after its status was sent.
        failure = refusal(doing, where, OSError(f"status code: 500 {text}"))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(_REPLY_BYTES_MAX).decode("utf-8", "replace")
        failure = refusal(doing, where, OSError(f"status code: {error.code} {text}"))
    except Exception as error:  # noqa: BLE001 - a connection fails in many ways; all are translated
        failure = refusal(doing, where, OSError(str(error)))
    raise failure


def _botocore(address: Address) -> tuple[Any, ...]:
    """Return the modules of botocore that sign.

    Raises:
        InvalidError: The package is not installed.
    """
    try:
        return tuple(
            importlib.import_module(f"botocore.{name}") for name in ("auth", "awsrequest", "credentials", "config")
        )
    except ImportError as error:
        raise InvalidError(
            f"{address.url}: needs the package botocore for parts of an upload: pip install 'holdfast[s3]'; or raise "
            "Settings.object_bytes_in_flight_max above the largest object"
        ) from error


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
