"""Credentials that only the vendors' packages find, used against servers. Run by name, as the files beside it.

It needs `google-auth` and `azure-identity`, which `make campaign-stores` installs.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import InvalidError
from tests.servers.all import only_variables_of
from tests.servers.azurite import azurite
from tests.servers.google import google
from tests.servers.process import free_port

_TENANT = "ab1f708d-50f6-404c-a006-d71b2ac7a606"


def test_workload_identity_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cloud's token is exchanged for one of Google, by the fake's token service."""
    with google(tmp_path) as server:
        only_variables_of(server, monkeypatch)
        # The machine has no credentials, so the file is what is used.
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{free_port()}")
        file = tmp_path / "credentials.json"
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        (tmp_path / "subject").write_text("canary-subject-token")
        found = {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/own",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{server.endpoint}/token",
            "credential_source": {"file": str(tmp_path / "subject")},
        }
        file.write_text(json.dumps(found))
        store = ObjectStore(server.new_url(), settings=server.settings())
        store.put("key", b"1")
        assert server.keys(store.url) == ["key"]
        file.write_text(json.dumps({**found, "token_url": f"http://127.0.0.1:{free_port()}/token"}))
        with pytest.raises(TemporaryError, match="service for credentials failed") as raised:
            ObjectStore(server.new_url(), settings=server.settings()).put("key", b"1")
        assert "canary" not in str(raised.value)


def _encoded(values: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).rstrip(b"=").decode()


def test_the_command_line_of_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's command is signed in, and its token is used: over TLS with an own authority."""
    now = int(time.time())
    claims = {"aud": "https://storage.azure.com", "iss": f"https://sts.windows.net/{_TENANT}/", "tid": _TENANT}
    claims |= {"iat": now - 60, "nbf": now - 60, "exp": now + 3600, "oid": "someone"}
    token = f"{_encoded({'alg': 'RS256', 'typ': 'JWT'})}.{_encoded(claims)}.c2lnbmF0dXJl"
    answer = json.dumps({"accessToken": token, "expires_on": now + 3600, "tenant": _TENANT, "tokenType": "Bearer"})
    command = tmp_path / "az"
    command.write_text(f"#!/bin/sh\necho '{answer}'\n")
    command.chmod(0o755)
    with azurite(is_tls=True) as server:
        only_variables_of(server, monkeypatch)
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        store = ObjectStore(server.new_url(), settings=server.settings())
        store.put("key", b"1")
        store.move("key", "moved")
        assert server.keys(store.url) == ["moved"]
        command.write_text("#!/bin/sh\necho 'Please run az login' >&2\nexit 1\n")
        with pytest.raises(InvalidError, match="no credentials were found") as raised:
            ObjectStore(server.new_url(), settings=server.settings()).put("key", b"1")
        assert token not in str(raised.value)
