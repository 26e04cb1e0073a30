"""How the clients of Google and of Azure are set up, and who is asked for their credentials."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.backends.stores.objects.address import Address
from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import ObjectSettings

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""By scheme, the variables that name a server, the strongest first."""

_GOOGLE_NATIVE = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
)
_GOOGLE_NATIVE_KINDS = ("service_account", "authorized_user")
"""Kinds of application default credentials that the library reads itself."""

_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

_AZURE_NATIVE = (
    ("AZURE_STORAGE_ACCOUNT_KEY",),
    ("AZURE_STORAGE_ACCESS_KEY",),
    ("AZURE_STORAGE_MASTER_KEY",),
    ("AZURE_STORAGE_SAS_KEY",),
    ("AZURE_STORAGE_SAS_TOKEN",),
    ("AZURE_STORAGE_TOKEN",),
    ("AZURE_STORAGE_USE_EMULATOR",),
    ("AZURE_USE_AZURE_CLI",),
    ("AZURE_CREDENTIAL_TYPE",),
    ("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID"),
    ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
    ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_TENANT_ID"),
)
"""Variables from which the library itself gets credentials, and renews them."""


def options_of(address: Address, settings: ObjectSettings, endpoint: str | None) -> dict[str, Any]:
    """Return what the client of Google or Azure is made with, beside credentials.

    Raises:
        InvalidError: A setting is of S3 alone.
    """
    options: dict[str, Any] = {"skip_signature": True} if settings.anonymous else {}
    if endpoint is not None:
        options["base_url" if address.scheme == "gs" else "endpoint"] = endpoint
    if settings.kms_key is not None:
        raise InvalidError(f"{address.url}: ObjectSettings(kms_key=…) works with s3:// only; set the key at the bucket")
    return options


def credentials_of(address: Address) -> Any:
    """Return who is asked for credentials of Google or Azure; None if the library finds them itself.

    Raises:
        InvalidError: The package that reads them is not installed, or cannot use them.
    """
    return _google(address) if address.scheme == "gs" else _azure()


def _google(address: Address) -> Any:
    if any(os.environ.get(name) for name in _GOOGLE_NATIVE):
        return None
    kind = _kind_of_default_credentials(os.environ)
    # The library does not know where Google's command line keeps its files if that is somewhere else.
    is_found = bool(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")) or not os.environ.get("CLOUDSDK_CONFIG")
    if kind is None or (kind in _GOOGLE_NATIVE_KINDS and is_found):
        # Without a file the library asks the machine.
        return None
    try:
        auth: Any = importlib.import_module("google.auth")
        kinds: Any = importlib.import_module("google.auth.credentials")
        providers: Any = importlib.import_module("obstore.auth.google")
        importlib.import_module("google.auth.transport.requests")
    except ImportError as error:
        raise InvalidError(
            f"{address.url}: needs the package {error.name} for application default credentials of the kind {kind!r}: "
            "pip install 'holdfast[gcs]'"
        ) from error
    failure: CheckpointError
    try:
        # With a scope from the start, the package would ask a service for the name of the project.
        found, _ = auth.default()
        return providers.GoogleCredentialProvider(kinds.with_scopes_if_required(found, [_GOOGLE_SCOPE]))
    except Exception as error:  # noqa: BLE001 - its text may show the content of the file
        failure = InvalidError(
            f"{address.url}: application default credentials of the kind {kind!r} cannot be used "
            f"({type(error).__name__}); mend the file, or run gcloud auth application-default login"
        )
    raise failure


def _kind_of_default_credentials(variables: Mapping[str, str]) -> str | None:
    """Return the kind that the file of Google's application default credentials says it has; None without a file."""
    named = variables.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = variables.get("CLOUDSDK_CONFIG") or Path(variables.get("HOME", "~")).expanduser() / ".config" / "gcloud"
    path = Path(named) if named else Path(folder) / "application_default_credentials.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # The library says what is wrong with it.
    kind = found.get("type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def _azure() -> Any:
    if any(all(os.environ.get(name) for name in names) for names in _AZURE_NATIVE):
        return None
    try:
        importlib.import_module("azure.identity")
        return importlib.import_module("obstore.auth.azure").AzureCredentialProvider()
    except ImportError:
        # The library asks the machine by itself.
        return None
