"""Looks for credentials in everything that a campaign left: outputs, files, objects, exceptions, cores."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.servers.server import S3Server, Server

_CANARY = "canary-of-the-campaign"

UNUSED = {
    "aws": {
        "AWS_ACCESS_KEY_ID": f"{_CANARY}-aws-id",
        "AWS_SECRET_ACCESS_KEY": f"{_CANARY}-aws-secret",
        "AWS_SESSION_TOKEN": f"{_CANARY}-aws-token",
    },
    "azure": {
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(f"{_CANARY}-azure-account".encode()).decode(),
        "AZURE_STORAGE_CLIENT_SECRET": f"{_CANARY}-azure-client",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2020-08-04&sig={_CANARY}-azure-sas",
    },
    "google": {"GOOGLE_SERVICE_ACCOUNT_KEY": f'{{"private_key": "{_CANARY}-google"}}'},
}
"""By vendor, credentials that no server of the campaign knows: processes have those of the other vendors."""

PROXY = {"HTTPS_PROXY": f"http://{_CANARY}-user:{_CANARY}-password@127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
"""A proxy with a password, which no request to loopback passes."""

_VENDORS = {"s3": "aws", "az": "azure", "gs": "google"}
_BLOCK_BYTES = 1 << 20


def unused_variables(server: Server) -> dict[str, str]:
    """Return credential variables that a process has besides those of its server."""
    own = _VENDORS.get(server.root_url.partition("://")[0])
    others = {name: value for vendor, each in UNUSED.items() if vendor != own for name, value in each.items()}
    return {**others, **PROXY}


def forms_of(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Return what a secret may look like in a file: as it is, quoted for URLs, in base 64."""
    forms = set[bytes]()
    for secret in (*secrets, _CANARY):
        encoded = base64.b64encode(secret.encode()).rstrip(b"=")
        # Its last character changes with what follows.
        forms |= {secret.encode(), quote(secret, safe="").encode(), encoded[:-1]}
    return tuple(sorted(forms))


@dataclass(frozen=True)
class Sought:
    """What was looked through, and where a secret was."""

    looked_at: int
    """Files or objects."""
    bytes: int
    found: tuple[str, ...]
    """Names of what has one."""


def in_files(folder: Path, secrets: Iterable[str], *, besides: Sequence[Path] = ()) -> Sought:
    """Look through all files under a folder.

    Args:
        folder: Where to look.
        secrets: What to look for.
        besides: Folders of servers: they must know the credentials that they check.
    """
    forms, found, count, total = forms_of(secrets), [], 0, 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(path.is_relative_to(each) for each in besides):
            continue
        count += 1
        total += path.stat().st_size
        if any(any(form in block for form in forms) for block in _blocks(path)):
            found.append(str(path))
    return Sought(count, total, tuple(found))


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file in blocks that overlap, so that no secret is cut."""
    before = b""
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            yield before + data
            before = data[-4096:]


def in_objects(server: Server, secrets: Iterable[str], *, delete: bool = False) -> Sought:
    """Look through all objects of a server.

    Args:
        server: The server.
        secrets: What to look for.
        delete: Whether to delete what was looked at: the bytes of a campaign would fill the memory of a server.
    """
    forms, found, total = forms_of(secrets), [], 0
    keys = server.keys(server.root_url)
    client = server.client() if isinstance(server, S3Server) else None
    bucket = server.root_url.partition("://")[2]
    for key in keys:
        if client is not None:
            data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        else:
            data = server.read(f"{server.root_url}/{key}")
        total += len(data)
        if any(form in data or form in key.encode() for form in forms):
            found.append(f"{server.root_url}/{key}")
    if delete:
        for first in range(0, len(keys), 500):
            batch = keys[first : first + 500]
            if client is not None:
                client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in batch]})
            else:
                for key in batch:
                    server.remove(f"{server.root_url}/{key}")
    return Sought(len(keys), total, tuple(found))


def core_files(folder: Path) -> list[str]:
    """Return the cores that processes left under a folder, or where the system stores them."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|"):
        return []  # Another program gets them.
    stem = Path(pattern).name.partition("%")[0]
    beside = Path(pattern).parent if pattern.startswith("/") else Path.cwd()
    return sorted(str(path) for path in {*folder.rglob(f"{stem}*"), *beside.glob(f"{stem}*")} if _is_core(path))


def _is_core(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(18)
    except OSError:
        return False
    # An ELF file of type 4.
    return head[:4] == b"\x7fELF" and head[16:18] in (b"\x04\x00", b"\x00\x04")


def let_cores_be_written() -> None:
    """Raise the limit, so that a process that crashes leaves a core."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
