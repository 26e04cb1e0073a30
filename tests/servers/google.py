"""The fake of Google Cloud Storage in `google_fake.py`, light enough for any test: no trustworthy server is known."""

from __future__ import annotations

import re
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.sax.saxutils import unescape

from holdfast.settings import ObjectSettings
from tests.servers import google_fake
from tests.servers.process import ServerProcess, accepts, free_port
from tests.servers.server import BUCKET, Server

TOKEN = "canary-google-token-canary-google-token"


class GoogleFake(Server):
    """One bucket of the fake. Its program: `fake`; it forgets everything if it is killed.

    Credentials come from the fake as well, in the place of the metadata server of a machine.
    """

    def __init__(self, folder: Path, port: int) -> None:
        """Remember where it is."""
        self.name, self.version = "fake of Google", "1"
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.root_url = f"gs://{BUCKET}"
        self.variables = {"GCE_METADATA_HOST": f"127.0.0.1:{port}"}
        self.secrets = (TOKEN,)
        command = [sys.executable, "-P", google_fake.__file__, str(port), BUCKET, TOKEN]
        self.processes = {"fake": ServerProcess(command, folder / "google.log", lambda: accepts(port))}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that finds it by them alone."""
        return {**self.variables, "GOOGLE_BASE_URL": self.endpoint}

    def _object_settings(self) -> ObjectSettings:
        return ObjectSettings(endpoint=self.endpoint)

    def keys(self, url: str) -> list[str]:
        """Return all keys under the URL of a folder, sorted, without that folder."""
        prefix = "" if url == self.root_url else self.name_of(url) + "/"
        names, token = [], ""
        while True:
            more = {"continuation-token": token} if token else {}
            asked = urllib.parse.urlencode({"list-type": "2", "prefix": prefix, **more})
            document = self.request("GET", f"?{asked}").decode()
            names += [unescape(name) for name in re.findall("<Key>(.*?)</Key>", document)]
            found = re.search("<NextContinuationToken>(.*?)</NextContinuationToken>", document)
            if found is None:
                return sorted(name.removeprefix(prefix) for name in names)
            token = unescape(found[1])

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        return self.request("GET", f"/{self.name_of(url)}")

    def write(self, url: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        self.request("PUT", f"/{self.name_of(url)}", data)

    def remove(self, url: str) -> None:
        """Remove an object."""
        self.request("DELETE", f"/{self.name_of(url)}")

    def request(
        self, method: str, target: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send one request for something of the bucket; return what comes."""
        given = {"Authorization": f"Bearer {TOKEN}", **(headers or {})}
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}{target}", method=method, data=data, headers=given)
        with urllib.request.urlopen(request, timeout=60) as reply:
            body: bytes = reply.read()
            return body


@contextmanager
def google(folder: Path | None = None) -> Iterator[GoogleFake]:
    """Run the fake for the length of a block.

    Args:
        folder: Where its log is; None: a temporary folder that is removed.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="google-")))
        server = GoogleFake(folder, free_port())
        stack.callback(server.kill, "fake")
        server.restart("fake")
        yield server
