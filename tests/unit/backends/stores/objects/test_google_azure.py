"""`gs://` and `az://`: how their clients are set up, and what a fake of Google shows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.backends.stores.objects.address import address_of
from holdfast.backends.stores.objects.google_azure import credentials_of, options_of
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.errors import CheckpointError, ConflictError, InvalidError
from holdfast.settings import ObjectSettings, Settings
from tests.servers.all import only_variables_of
from tests.servers.google import GoogleFake, google
from tests.support.object_proxy import ObjectProxy, object_proxy

GS, AZ = address_of("gs://bucket/run"), address_of("az://container/run")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleFake]:
    with google(tmp_path_factory.mktemp("google")) as fake:
        yield fake


@pytest.fixture
def server(fake: GoogleFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GoogleFake:
    only_variables_of(fake, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    return fake


@pytest.fixture
def proxy(server: GoogleFake) -> Iterator[ObjectProxy]:
    with object_proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(server: GoogleFake, proxy: ObjectProxy) -> ObjectStore:
    return ObjectStore(server.new_url(), settings=server.settings(endpoint=proxy.endpoint))


def test_a_server_is_named_by_settings_or_variables(server: GoogleFake, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (server.settings(), Settings()):
        store = ObjectStore(server.new_url(), settings=settings)
        store.put("key", b"1")
        assert server.keys(store.url) == ["key"]
        monkeypatch.setenv("GOOGLE_BASE_URL", server.endpoint)
    assert options_of(AZ, ObjectSettings(), "https://host/account") == {"endpoint": "https://host/account"}
    with pytest.raises(InvalidError, match="kms_key"):
        options_of(AZ, ObjectSettings(kms_key="key"), None)


def test_a_run_is_saved_and_loaded(server: GoogleFake) -> None:
    url, settings = server.new_url(), server.settings()
    for step in (1, 2):
        holdfast.save(url, {"step": step}, settings=settings, process_group=False, overwrite=step == 2)
    state = {"step": 0}
    holdfast.load(url, state, settings=settings, process_group=False)
    assert state == {"step": 2}
    with pytest.raises(ConflictError):
        holdfast.save(url, {"step": 3}, settings=settings, process_group=False)


def test_a_server_that_cannot_be_asked_with_a_condition_is_not_asked(store: ObjectStore, proxy: ObjectProxy) -> None:
    store.put("key", b"1")
    proxy.asked.clear()
    store.move("key", "aside")
    assert store.get("aside", 1) == b"1"
    assert not [asked for asked in proxy.asked if "probe" in asked.path]


def test_what_comes_between_look_and_replacement_stays(
    store: ObjectStore, proxy: ObjectProxy, server: GoogleFake
) -> None:
    store.put("latest", b"step-1")

    def another_writer(asked: object) -> None:
        server.write(f"{store.url}/latest", b"step-3")
        proxy.rule = lambda _: None

    proxy.rule = lambda asked: another_writer(asked) if asked.method == "PUT" else None
    with pytest.raises(ConflictError, match="latest"):
        store.replace("latest", b"step-2", b"step-1")
    assert store.get("latest", 10) == b"step-3"


def test_refusals_name_what_is_wrong(server: GoogleFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for call in (lambda store: store.size("key"), lambda store: store.put("key", b"1")):
        with pytest.raises(InvalidError, match="create the bucket"):
            call(ObjectStore("gs://no-such-bucket/run", settings=server.settings()))
    with pytest.raises(InvalidError, match="no credentials were found"):
        ObjectStore(server.new_url(), settings=server.settings(anonymous=True)).size("key")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another-token")
    with pytest.raises(InvalidError, match="does not know these credentials") as raised:
        ObjectStore(server.new_url(), settings=server.settings()).size("key")
    assert "another-token" not in str(raised.value)
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InvalidError, match="mend the vendor's variables"):
        ObjectStore(server.new_url(), settings=server.settings()).size("key")


@pytest.mark.parametrize("name", ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME"))
def test_azure_without_an_account_or_with_a_broken_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in [each for each in os.environ if each.startswith("AZURE_")]:
        monkeypatch.delenv(each)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64, and secret")
    if name == "AZURE_STORAGE_ACCOUNT_KEY":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with pytest.raises(InvalidError, match="mend the vendor's variables") as raised:
        ObjectStore(AZ.url, settings=Settings()).size("key")
    assert "and secret" not in str(raised.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


class TestWhoIsAsked:
    def test_what_the_library_finds_is_left_to_it(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert credentials_of(GS) is None
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "key")
        assert credentials_of(AZ) is None
        file = home / ".config" / "gcloud" / "application_default_credentials.json"
        file.parent.mkdir(parents=True)
        for kind in ("service_account", "authorized_user"):
            file.write_text(json.dumps({"type": kind}))
            assert credentials_of(GS) is None
        for text in ("", "[]", "{}", '{"type": 1}'):
            file.write_text(text)
            assert credentials_of(GS) is None

    @pytest.mark.parametrize("variable", ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME"))
    def test_other_kinds_need_googles_package(self, home: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = home if variable != "HOME" else home / ".config" / "gcloud"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "application_default_credentials.json"
        file.write_text(json.dumps({"type": "external_account", "private": "canary"}))
        monkeypatch.setenv(variable, str(file if variable == "GOOGLE_APPLICATION_CREDENTIALS" else home))
        monkeypatch.setitem(sys.modules, "google.auth", None)
        with pytest.raises(InvalidError, match=r"'external_account'.*pip install 'holdfast\[gcs\]'"):
            credentials_of(GS)
        file.write_text(json.dumps({"type": "authorized_user"}))
        if variable == "CLOUDSDK_CONFIG":  # The library does not look there.
            with pytest.raises(InvalidError, match="authorized_user"):
                credentials_of(GS)
        else:
            assert credentials_of(GS) is None
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/a/file")
        assert credentials_of(GS) is None

    def test_azure_without_its_package_is_left_to_the_library(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "azure.identity", None)
        assert credentials_of(AZ) is None

    def test_no_secret_of_a_broken_file_is_shown(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = home / "credentials.json"
        file.write_text(json.dumps({"type": "impersonated_service_account", "private": "canary"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        with pytest.raises(CheckpointError) as raised:
            credentials_of(GS)
        assert "canary" not in str(raised.value)
