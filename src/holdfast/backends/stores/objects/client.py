"""The clients of one object store in this process: options, credentials, and requests with translated errors."""

from __future__ import annotations

import importlib
import os
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from holdfast.backends.stores.objects.address import Address
from holdfast.backends.stores.objects.first_contact import FirstContact
from holdfast.backends.stores.objects.google_azure import ENDPOINTS, credentials_of, options_of
from holdfast.backends.stores.objects.library import Library, keep_for_ever, library
from holdfast.backends.stores.objects.refusals import refusal, setup_refusal
from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import MIB, ObjectSettings, Settings

_SMALL_BYTES_MAX = 8 * MIB
"""A request of at most this much has the plain timeout."""

_PANIC = "PanicException"
"""Class of a panic in the client, which no module exports."""

_CREDENTIALS_ASKED_AGAIN = timedelta(minutes=5)
"""How long credentials of the vendor's chain are used before the chain is asked again. It renews them ten minutes
before they expire."""


@dataclass(slots=True)
class _Made:
    """What one process has made. A forked child makes its own."""

    process: int
    library: Library
    by_kind: dict[tuple[float, float | None, bool], Any] = field(default_factory=dict)
    """Clients by the timeouts of their requests, of a whole one and of silence within it, and by whether they keep
    connections."""
    credentials: Any = None
    """Asked for credentials; None: the library finds them in the variables."""
    opener: urllib.request.OpenerDirector | None = None
    """Opens URLs of requests that are signed here."""
    signing: Any = None
    """Asked for credentials of requests that are signed here; None: nobody has asked yet."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials for one request. Their repr shows none of them."""

    access: str = field(repr=False)
    """Which key signs."""

    secret: str = field(repr=False)
    """What it signs with."""

    token: str | None = field(repr=False)
    """Of a session; None for keys that last."""

    region: str | None
    """What the variables, or else the profile, say of the region; None if nothing."""


class Clients:
    """Makes requests to one bucket. Safe in any thread, and in a process that was forked."""

    def __init__(self, address: Address, settings: Settings) -> None:
        """Remember where; does no I/O and loads nothing."""
        self._address, self._settings = address, settings.object_store
        self.silence_seconds = self._settings.silence_timeout_seconds
        self._bytes_per_second_min = self._settings.bytes_per_second_min
        self._made_here: _Made | None = None
        self._first_contact = FirstContact(f"{address.scheme} {self.endpoint or settings.object_store.region}")

    def ask(
        self,
        doing: str,
        where: str,
        call: Callable[[Any, Any], Any],
        bytes_moved: int = 0,
        *,
        is_received: bool = False,
        is_request: bool = True,
    ) -> Any:
        """Make one request, and return what the client returns.

        Args:
            doing: The operation as a verb, for messages.
            where: Store and key, for messages.
            call: Gets the module `obstore` and the client.
            bytes_moved: Bytes of content that the request sends or receives at most: they lengthen its timeout.
            is_received: Whether it receives them. Then silence ends it, however many bytes may come.
            is_request: Whether the server has answered when the call returns.
        Raises:
            CheckpointError: The request failed. No exception of the client is chained to it.
        """
        api, client = self._client(bytes_moved, is_received=is_received)
        failure: CheckpointError
        try:
            result = call(api, client)
            if is_request:
                self._first_contact.note_answer()
            return result
        except BaseException as error:
            # A panic of the client is no `Exception`, and would end a thread that nobody waits for.
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            failure = self._first_contact.judged(refusal(doing, where, error), str(error))
        # Raised out here, so that no traceback shows the client's own text, with URLs and headers.
        raise failure

    def _client(self, bytes_moved: int, *, is_received: bool) -> tuple[Any, Any]:
        made = self._made()
        seconds = self.seconds_for(bytes_moved)
        # What is sent takes its time until the server answers at all.
        silence_seconds = self.silence_seconds if is_received and bytes_moved > _SMALL_BYTES_MAX else None
        keeps = not self._is_plain or (bytes_moved > _SMALL_BYTES_MAX and not is_received)
        kind = seconds, silence_seconds, keeps
        client = made.by_kind.get(kind)
        if client is None:
            client = made.by_kind.setdefault(kind, self._new_client(made, *kind))
        return made.library.api, client

    def _made(self) -> _Made:
        """Return what this process has made."""
        # Threads that come first together may each make their own: the last one stays, and none is wrong.
        made = self._made_here
        if made is None or made.process != os.getpid():
            keep_for_ever(made)
            made = self._made_here = _Made(os.getpid(), library(self._address.scheme))
        return made

    def seconds_for(self, bytes_moved: int) -> float:
        """Return how long a request may take that moves this many bytes."""
        if bytes_moved <= _SMALL_BYTES_MAX:
            return self.silence_seconds
        # A timeout belongs to a client, and a client has connections of its own: few kinds, so powers of two.
        return self.silence_seconds + (1 << (bytes_moved - 1).bit_length()) / self._bytes_per_second_min

    def keys(self) -> Keys:
        """Return credentials of S3 for a request that is signed here, from where the client finds its own.

        Raises:
            InvalidError: There are none.
        """
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None
        profile = self._settings.profile or os.environ.get("AWS_PROFILE") or None
        access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if profile is None and access and secret:
            return Keys(access, secret, os.environ.get("AWS_SESSION_TOKEN") or None, region)
        self._client(0, is_received=False)  # Which asks where credentials are.
        made = self._made()
        # Where the library asks a service by itself, boto3 asks the same one.
        made.signing = made.signing or made.credentials or _asked_by_boto3(self._address, self._settings, profile)
        failure: CheckpointError
        try:
            found = made.signing()
        except Exception as error:  # noqa: BLE001 - boto3 raises many kinds; all are translated
            failure = refusal("sign for", self._address.url, error)
        else:
            of_profile = made.signing.config.get("region")
            return Keys(found["access_key_id"], found["secret_access_key"], found["token"], region or of_profile)
        raise failure

    def opener(self) -> urllib.request.OpenerDirector:
        """Return what opens URLs: with the certificates and the proxy of the settings. Any thread may use it."""
        made = self._made()
        # Reading the certificates of a system takes 40 ms, as long as a request.
        made.opener = made.opener or self._new_opener()
        return made.opener

    def _new_opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = []
        if self.ca_file is not None:
            context = ssl.create_default_context()
            context.load_verify_locations(cadata=self._certificates().decode("ascii", "ignore"))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        if self._settings.proxy is not None:
            handlers.append(urllib.request.ProxyHandler({"http": self._settings.proxy, "https": self._settings.proxy}))
        return urllib.request.build_opener(*handlers)

    def _new_client(self, made: _Made, timeout_seconds: float, silence_seconds: float | None, keeps: bool) -> Any:
        """Return a new client; no request is made but those that credentials need."""
        address = self._address
        endpoint = self.endpoint
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout_seconds),
            "connect_timeout": timedelta(seconds=min(timeout_seconds, 10.0)),
            "allow_http": self._is_plain,
        }
        if not keeps:
            # A server that leaves Nagle's algorithm on holds the end of a short reply back until this side acknowledges
            # its beginning, and on a used connection the kernel waits 40 ms with that. Ceph is one.
            options["pool_max_idle_per_host"] = "0"
        if silence_seconds is not None:
            options["read_timeout"] = timedelta(seconds=silence_seconds)
        if self._settings.proxy is not None:
            options["proxy_url"] = self._settings.proxy
        if self.ca_file is not None:
            options["root_certificate"] = self._certificates()
        is_s3 = address.scheme == "s3"
        configuration = self._s3_options() if is_s3 else options_of(address, self._settings, endpoint)
        if not self._settings.anonymous:
            made.credentials = made.credentials or (
                _s3_credentials(address, self._settings) if is_s3 else credentials_of(address)
            )
            if made.credentials is not None:
                configuration["credential_provider"] = made.credentials
        stores = made.library.stores
        kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
        failure: CheckpointError
        try:
            # The library's own retries are off: it would find its own object and report it as another writer's.
            return kind(address.bucket, client_options=options, retry_config={"max_retries": 0}, **configuration)
        except Exception as error:  # noqa: BLE001 - as above
            failure = setup_refusal(address.url, error)
        raise failure

    @property
    def endpoint(self) -> str | None:
        """URL of the server, or None for the vendor's own."""
        if self._settings.endpoint is not None:
            return self._settings.endpoint
        return next((os.environ[name] for name in ENDPOINTS[self._address.scheme] if os.environ.get(name)), None)

    @property
    def signs_content(self) -> bool:
        """Whether requests to S3 sign what they send.

        TLS protects the content already, and hashing it once more would take most of the time. Plain HTTP does not.
        """
        return self._is_plain

    @property
    def _is_plain(self) -> bool:
        """Whether the server is asked over plain HTTP."""
        return self.endpoint is not None and self.endpoint.startswith("http://")

    def _s3_options(self) -> dict[str, Any]:
        """Return the options of a client of S3 beside those of all clients."""
        settings, endpoint = self._settings, self.endpoint
        configuration: dict[str, Any] = {
            "unsigned_payload": not self.signs_content,
            "skip_signature": settings.anonymous,
        }
        if settings.virtual_hosted:
            configuration["virtual_hosted_style_request"] = True
        if endpoint is not None:
            configuration["endpoint"] = endpoint
        region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region:
            configuration["region"] = region
        if settings.kms_key is not None:
            configuration |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": settings.kms_key}
        return configuration

    @property
    def ca_file(self) -> str | None:
        """File of certificates to trust beside those of the system."""
        return self._settings.ca_file or os.environ.get("AWS_CA_BUNDLE") or None

    def _certificates(self) -> bytes:
        assert self.ca_file is not None, "asked for only if there is one"
        try:
            with open(self.ca_file, "rb") as file:
                return file.read()
        except OSError as error:
            raise InvalidError(
                f"{self._address.url}: cannot read the certificates in {self.ca_file}: {error.strerror}; mend "
                "ObjectSettings(ca_file=…) or AWS_CA_BUNDLE"
            ) from error


_NATIVE = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
)
"""Variables from which the library itself gets credentials, and renews them."""


def _s3_credentials(address: Address, settings: ObjectSettings) -> Any:
    """Return who is asked for credentials; None if the library finds them in the variables.

    Raises:
        InvalidError: There are none, or the profile is not there.
    """
    profile = settings.profile or os.environ.get("AWS_PROFILE") or None
    if profile is None and any(all(os.environ.get(name) for name in names) for names in _NATIVE):
        return None
    return _asked_by_boto3(address, settings, profile)


def _asked_by_boto3(address: Address, settings: ObjectSettings, profile: str | None) -> Any:
    """Return what asks for credentials as boto3 does.

    Raises:
        InvalidError: As `_s3_credentials`.
    """
    try:
        session: Any = importlib.import_module("boto3.session")
        exceptions: Any = importlib.import_module("botocore.exceptions")
        providers: Any = importlib.import_module("obstore.auth.boto3")
    except ImportError as error:
        raise InvalidError(
            f"{address.url}: needs the package {error.name} to look for credentials in profiles and at the machine: "
            "pip install 'holdfast[s3]'; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    failure: CheckpointError
    try:
        return providers.Boto3CredentialProvider(
            session.Session(profile_name=profile, region_name=settings.region), ttl=_CREDENTIALS_ASKED_AGAIN
        )
    except (ValueError, exceptions.BotoCoreError) as error:
        found = f"profile {profile!r} cannot be used ({type(error).__name__})" if profile else "none were found"
        failure = InvalidError(
            f"{address.url}: needs credentials, and {found}; expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a "
            "profile, or a role of the machine (docs/stores.md). To read what is public: ObjectSettings(anonymous=True)"
        )
    raise failure
