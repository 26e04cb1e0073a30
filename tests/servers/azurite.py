"""Azurite, Microsoft's server for tests that speaks Azure's protocol, from npm."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import ssl
import tempfile
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from pathlib import Path

from holdfast.settings import ObjectSettings
from tests.servers.packages import AZURITE
from tests.servers.process import ServerProcess, accepts, free_port
from tests.servers.server import BUCKET, TLS, Server

ACCOUNT = "canaryaccount"
KEY = base64.b64encode(b"canary-azure-key" * 4).decode()
_API_VERSION = "2021-12-02"
_PAGE = "restype=container&comp=list"


class AzuriteServer(Server):
    """One account with one container, looked at with requests that are signed here.

    Its program: `azurite`. Killed, it forgets what it was told in the last seconds.
    """

    def __init__(self, folder: Path, port: int, *, is_tls: bool = False) -> None:
        """Remember where it is."""
        self.name = "azurite"
        package = AZURITE.parents[1] / "azurite" / "package.json"
        self.version = json.loads(package.read_text())["version"]
        self.ca_file = str(TLS / "authority.pem") if is_tls else None
        self.endpoint = f"http{'s' if is_tls else ''}://127.0.0.1:{port}/{ACCOUNT}"
        self.root_url = f"az://{BUCKET}"
        self.variables = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        self.secrets = (KEY,)
        command = [
            AZURITE, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder, "--silent",
            "--disableTelemetry", "--skipApiVersionCheck",
        ]  # fmt: skip
        if is_tls:
            command += ["--cert", TLS / "server.pem", "--key", TLS / "server.pem", "--oauth", "basic"]
        log, accounts = folder / "azurite.log", {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        self.processes = {"azurite": ServerProcess(command, log, lambda: accepts(port), accounts)}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that finds it by them alone."""
        ca = {} if self.ca_file is None else {"AWS_CA_BUNDLE": self.ca_file}
        return {**self.variables, "AZURE_STORAGE_ENDPOINT": self.endpoint, **ca}

    def _object_settings(self) -> ObjectSettings:
        return ObjectSettings(endpoint=self.endpoint, ca_file=self.ca_file)

    def keys(self, url: str) -> list[str]:
        """Return all keys under the URL of a folder, sorted, without that folder."""
        prefix = "" if url == self.root_url else self.name_of(url) + "/"
        return sorted(name.removeprefix(prefix) for name in self._listed(f"{_PAGE}&prefix={prefix}"))

    def unfinished_uploads(self) -> list[str]:
        """Return the names of blobs that have blocks which were never committed."""
        return sorted({*self._listed(f"{_PAGE}&include=uncommittedblobs")} - {*self._listed(_PAGE)})

    def _listed(self, query: str) -> list[str]:
        names, marker = [], ""
        while True:
            document = ET.fromstring(self.request("GET", "", f"{query}&marker={marker}"))
            names += [found.text or "" for found in document.iter("Name")]
            marker = document.findtext("NextMarker") or ""
            if not marker:
                return names

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        return self.request("GET", self.name_of(url))

    def write(self, url: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        self.request("PUT", self.name_of(url), data=data, headers={"x-ms-blob-type": "BlockBlob"})

    def remove(self, url: str) -> None:
        """Remove an object."""
        self.request("DELETE", self.name_of(url))

    def make_container(self, name: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Make the container of the tests, or another one beside it."""
        self.request("PUT", "", "restype=container", headers=headers or {}, container=name or BUCKET)

    def request(
        self,
        method: str,
        name: str,
        query: str = "",
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        container: str = BUCKET,
    ) -> bytes:
        """Send one request that is signed with the account's key; return what comes."""
        path = f"/{ACCOUNT}/{container}" + (f"/{name}" if name else "")
        ours = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API_VERSION, **(headers or {})}
        asked = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
        length = str(len(data)) if data else ""
        lines = [
            method, "", "", length, "", "", "", "", "", "", "", "",
            *(f"{key}:{value}" for key, value in sorted(ours.items()) if key.startswith("x-ms-")),
            f"/{ACCOUNT}{path}",
            *(f"{key}:{value}" for key, value in asked),
        ]  # fmt: skip
        signed = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        url = self.endpoint.removesuffix(f"/{ACCOUNT}") + path + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
        request = urllib.request.Request(url, method=method, data=data if method == "PUT" else None, headers=ours)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}")
        request.add_header("Content-Type", "")
        trust = None if self.ca_file is None else ssl.create_default_context(cafile=self.ca_file)
        with urllib.request.urlopen(request, timeout=60, context=trust) as reply:
            body: bytes = reply.read()
            return body


@contextmanager
def azurite(folder: Path | None = None, *, is_tls: bool = False) -> Iterator[AzuriteServer]:
    """Run Azurite for the length of a block.

    Args:
        folder: Where it writes; None: a temporary folder that is removed.
        is_tls: Whether it speaks TLS, and takes tokens whose signature it does not check.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="azurite-")))
        server = AzuriteServer(folder, free_port(), is_tls=is_tls)
        stack.callback(server.kill, "azurite")
        server.restart("azurite")
        server.make_container()
        yield server
