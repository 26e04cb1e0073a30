"""Requests that the client library lacks, signed here and sent over a connection of their own: Signature Version 4.

They carry parts of an upload, and list and abort uploads. Credentials come from where the client finds its own.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.backends.stores.objects.address import Address
from holdfast.backends.stores.objects.client import Clients, Keys
from holdfast.backends.stores.objects.refusals import refusal
from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import ObjectSettings

_REGION = "us-east-1"
_REPLY_BYTES_MAX = 8 << 20
"""Longest reply that is read: a page of a listing has a thousand entries."""

_UNSIGNED = "UNSIGNED-PAYLOAD"


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
            headers: Further headers; those that begin with `x-amz-` are signed.
        Raises:
            CheckpointError: The request failed. No exception of the connection is chained to it: it may repeat headers.
        """
        url, signed = self.signed(method, key, dict(query or {}), data, dict(headers or {}))
        return sent(self._clients, doing, where, method, url, data, signed)

    def signed(
        self, method: str, key: str, query: dict[str, str], data: bytes | memoryview, headers: dict[str, str]
    ) -> tuple[str, dict[str, str]]:
        """Return URL and headers of a request with its signature."""
        keys = self._clients.keys()
        origin, path = self._place(key, keys)
        host = urllib.parse.urlsplit(origin).netloc
        digest = hashlib.sha256(data).hexdigest() if self._clients.signs_content else _UNSIGNED
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers |= {"x-amz-content-sha256": digest, "x-amz-date": moment}
        if keys.token:
            headers["x-amz-security-token"] = keys.token
        covered = {name: value for name, value in headers.items() if name.startswith("x-amz-")} | {"host": host}
        names = ";".join(sorted(covered))
        asked = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(query.items()))
        lines = "".join(f"{name}:{covered[name].strip()}\n" for name in sorted(covered))
        canonical = "\n".join((method, path, asked, lines, names, digest))
        region = self._settings.region or keys.region or _REGION
        scope = f"{moment[:8]}/{region}/s3/aws4_request"
        to_sign = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        signing = f"AWS4{keys.secret}".encode()
        for part in scope.split("/"):
            signing = hmac.digest(signing, part.encode(), "sha256")
        signature = hmac.digest(signing, to_sign.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        headers.setdefault("content-type", "application/octet-stream")
        return f"{origin}{path}{'?' if asked else ''}{asked}", headers

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


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")
