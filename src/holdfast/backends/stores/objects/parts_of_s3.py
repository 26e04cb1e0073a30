"""Uploads in parts of S3: signed requests of our own, since those of the client can be neither listed nor aborted."""

from __future__ import annotations

import html
import re
import urllib.parse
from collections.abc import Iterator

from holdfast.backends.stores.objects.signed import SignedRequests
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import MissingError

_UPLOAD_ID = re.compile(r"<UploadId>([^<]{1,2000})</UploadId>")
_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_KEY = re.compile(r"<Key>([^<]{1,4000})</Key>")
_JOINED = "CompleteMultipartUploadResult"
_NEXT = re.compile(r"<(NextKeyMarker|NextUploadIdMarker)>([^<]{1,4000})</")


class PartsOfBucket:
    """The uploads of one bucket of S3; see `Parts`."""

    part_bytes_min = 5 << 20
    parts_max = 10_000

    def __init__(self, requests: SignedRequests, creation: dict[str, str]) -> None:
        """Remember; does no I/O.

        Args:
            requests: Sends.
            creation: Headers of a request that begins an object, as for encryption.
        """
        self._requests, self._creation = requests, creation

    def begin(self, full: str, where: str) -> str:
        """Begin an upload; return its id."""
        reply = self._requests.send("begin", where, "POST", full, {"uploads": ""}, headers=self._creation)
        found = _UPLOAD_ID.search(reply.text)
        if found is None:
            raise TemporaryError(f"could not begin {where}: the server gave no id", may_take_effect=True)
        return html.unescape(found[1])

    def put(self, full: str, where: str, upload_id: str, number: int, data: memoryview) -> str:
        """Store a part; return its tag."""
        query = {"partNumber": str(number), "uploadId": upload_id}
        reply = self._requests.send("store", f"{where} (part {number})", "PUT", full, query, data)
        tag = reply.headers.get("etag")
        if not tag:
            raise TemporaryError(f"could not store {where} (part {number}): the server gave no tag of it")
        return tag

    def join(self, full: str, where: str, upload_id: str, tags: list[str], *, on_condition: bool) -> None:
        """Join the parts of an upload into an object, if the server keeps the condition only where its key is free."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{html.escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        headers = {"if-none-match": "*"} if on_condition else {}
        headers["content-type"] = "application/xml"
        reply = self._requests.send("complete", where, "POST", full, {"uploadId": upload_id}, document, headers)
        # The status is sent before the parts are joined, and blanks meanwhile: it may fail after that, or be cut off.
        if _JOINED not in reply.text:
            raise TemporaryError(f"could not complete {where}: the server does not confirm it", may_take_effect=True)

    def abort(self, full: str, where: str, upload_id: str) -> None:
        """Remove an upload and its parts; one that is gone is no error."""
        try:
            self._requests.send("abort", where, "DELETE", full, {"uploadId": upload_id})
        except MissingError:
            return

    def listed(self, prefix: str, where: str) -> Iterator[tuple[str, str]]:
        """Yield the full key and the id of every upload under a prefix that is neither completed nor aborted."""
        markers: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": prefix, "encoding-type": "url"} | markers
            text = self._requests.send("list the uploads of", where, "GET", "", query).text
            is_quoted = "<EncodingType>url</EncodingType>" in text
            for upload in _UPLOAD.findall(text):
                key, upload_id = _KEY.search(upload), _UPLOAD_ID.search(upload)
                if key is not None and upload_id is not None:
                    name = html.unescape(key[1])
                    yield urllib.parse.unquote_plus(name) if is_quoted else name, html.unescape(upload_id[1])
            found = {name: html.unescape(value) for name, value in _NEXT.findall(text)}
            next_key = found.get("NextKeyMarker", "")
            after = {
                "key-marker": urllib.parse.unquote_plus(next_key) if is_quoted else next_key,
                "upload-id-marker": found.get("NextUploadIdMarker", ""),
            }
            if "<IsTruncated>true</IsTruncated>" not in text or not after["key-marker"] or after == markers:
                return
            markers = after
