"""Translates what an object store and its client say into the five errors.

What a server says is not trusted: of its text only the code and the message of an error document are shown, without
control characters, cut, and without anything that is a credential. The original exception is never chained: it repeats
URLs and headers.
"""

from __future__ import annotations

import re

from holdfast.backends.stores.remote.redaction import without_secrets
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, MissingError, UnavailableError

_THROTTLED = (429, 503)
_NOT_CONNECTED = ("ConnectError", "dns error", "Connection refused")
_NO_CONNECTION = re.compile(r"kind: Connect\b")
_CAUSES = (
    re.compile(r'failed to lookup address information: ([^"\n]{1,100})'),
    re.compile(r'kind: \w+,\s+message: "([^"\n]{1,100})"'),
    re.compile(r"(invalid peer certificate: \w+)"),
    re.compile(r"(received corrupt message of type \w+)"),
)
"""Where the client's text says why there is no connection."""
_HOST = re.compile(r"Error performing [A-Z]+ (https?://[^/\s]+)")
_ASKING_FOR_CREDENTIALS = re.compile(
    r"token request|169\.254\.169\.254|metadata\.google\.internal|External \w+ credential provider"
)
_NETWORK = re.compile(r"credential provider: \w*(?:Transport|Connection|Connect|Timeout)\w*Error|ConnectTimeoutError")
"""A vendor's package that could not ask a service for credentials."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,2000})</Message>")

_REGION = "name the region of the bucket: AWS_REGION, or Settings(object_store=ObjectSettings(region=…))"
_CREDENTIALS = (
    "give this user credentials that may read, write, list and delete there (docs/stores.md has a policy), or choose "
    "another place"
)
_NO_CREDENTIALS = "no credentials were found; set the vendor's variables or a profile (docs/stores.md)"
_UNKNOWN = "the server does not know these credentials; " + _CREDENTIALS
_LOCKED = "a lock, a hold or a retention rule of the bucket forbids it; choose a bucket without one"
_SETUP = "mend the vendor's variables or the settings (docs/stores.md)"
_EXPIRED = "renew the credentials (variables, profile, or the role of the machine), then retry"
_ACTS: dict[str, tuple[type[CheckpointError], str]] = {
    "NoSuchBucket": (InvalidError, "create the bucket, or mend its name"),
    "ContainerNotFound": (InvalidError, "create the container, or mend its name"),
    "InvalidBucketName": (InvalidError, "mend the name of the bucket"),
    "PermanentRedirect": (InvalidError, _REGION),
    "AuthorizationHeaderMalformed": (InvalidError, _REGION),
    "IllegalLocationConstraintException": (InvalidError, _REGION),
    "RequestTimeTooSkewed": (InvalidError, "the server refuses the clock of this machine; set the clock"),
    "ExpiredToken": (UnavailableError, _EXPIRED),
    "ExpiredTokenException": (UnavailableError, _EXPIRED),
    "TokenRefreshRequired": (UnavailableError, _EXPIRED),
    "RequestExpired": (UnavailableError, _EXPIRED),
    "InvalidAccessKeyId": (InvalidError, _UNKNOWN),
    "InvalidToken": (InvalidError, _UNKNOWN),
    "InvalidAuthentication": (InvalidError, _UNKNOWN),
    "InvalidAuthenticationInfo": (InvalidError, _UNKNOWN),
    "AuthenticationRequired": (InvalidError, _NO_CREDENTIALS),
    "NoAuthenticationInformation": (InvalidError, _NO_CREDENTIALS),
    "PublicAccessNotPermitted": (InvalidError, _NO_CREDENTIALS),
    "AuthenticationFailed": (InvalidError, "look at account and key, and at the clock of this machine"),
    "AuthorizationFailure": (InvalidError, "look at account and key; or the network rules of the account forbid it"),
    "SignatureDoesNotMatch": (InvalidError, "the secret key is not that of the access key; " + _CREDENTIALS),
    "AccessDenied": (InvalidError, _CREDENTIALS),
    "AllAccessDisabled": (InvalidError, _CREDENTIALS),
    "EntityTooLarge": (InvalidError, "save from more ranks, so that each one writes less"),
    "KeyTooLongError": (InvalidError, "choose a shorter folder"),
    "InvalidObjectState": (InvalidError, "the object is in an archive; bring it back first"),
    "ObjectLocked": (InvalidError, _LOCKED),
    "RetentionPolicyNotMet": (InvalidError, _LOCKED),
    "ObjectUnderActiveHold": (InvalidError, _LOCKED),
    "BlobImmutableDueToPolicy": (InvalidError, _LOCKED),
    "BlobImmutableDueToLegalHold": (InvalidError, _LOCKED),
    "LeaseIdMissing": (InvalidError, "another program holds a lease on it; end that lease"),
    "BlobArchived": (InvalidError, "the object is in an archive; bring it back first"),
    "ContainerBeingDeleted": (InvalidError, "the container is being deleted; choose another one"),
    "ContainerDisabled": (InvalidError, "the container is disabled; choose another one"),
    "UserProjectMissing": (InvalidError, "the bucket wants a project that pays; choose another one"),
    "RequestTimeout": (TemporaryError, "the server waited for bytes; retry"),
    "IncompleteBody": (TemporaryError, "bytes were lost on the way; retry"),
    "BadDigest": (TemporaryError, "bytes were changed on the way; retry"),
    "XAmzContentSHA256Mismatch": (TemporaryError, "bytes were changed on the way; retry"),
    "QuotaExceeded": (UnavailableError, "raise the quota or free space, then retry"),
}
_BY_STATUS: dict[int, tuple[type[CheckpointError], str]] = {
    301: (InvalidError, _REGION),
    307: (InvalidError, _REGION),
    400: (InvalidError, "look at bucket, region and endpoint"),
    401: (InvalidError, _CREDENTIALS),
    403: (InvalidError, _CREDENTIALS),
    404: (MissingError, "it does not exist"),
    408: (TemporaryError, "the server waited for bytes; retry"),
    405: (InvalidError, "the endpoint does not take this request; look at the endpoint"),
    409: (ConflictError, "another writer stored it; it was not touched"),
    412: (ConflictError, "another writer stored it; it was not touched"),
    413: (InvalidError, "save from more ranks, so that each one writes less"),
    501: (InvalidError, "this store lacks what Holdfast needs; choose another one"),
}


def refusal(doing: str, where: str, error: BaseException) -> CheckpointError:
    """Return the error of Holdfast for one of the client.

    Args:
        doing: The operation as a verb.
        where: Store and key.
        error: What the client raised.
    """
    text = str(error)
    code, kind_and_act = code_of(text), None
    if code is not None:
        kind_and_act = _ACTS.get(code)
    if kind_and_act is None:
        kind_and_act = _without_credentials(text) or _by_class(error) or _by_status(text) or _by_text(text)
    kind, act = kind_and_act
    message = f"could not {doing} {where}: {_said(text, code)}; {act}"
    if kind is TemporaryError:
        return _temporary(message, text)
    return kind(message)


def setup_refusal(url: str, error: BaseException) -> InvalidError:
    """Return the error for a client that cannot be made: what it is made with is wrong."""
    return InvalidError(f"could not open {url}: {_said(str(error), None)}; {_SETUP}")


def has_status(text: str) -> bool:
    """Return whether the client's text is about an answer of a server."""
    return _STATUS.search(text) is not None


def _temporary(message: str, text: str) -> TemporaryError:
    """Return a failure that another try may mend, with what is known of its effect."""
    found = _STATUS.search(text)
    if found is not None:
        is_throttled = int(found[1]) in _THROTTLED
        # What a server refuses with a status below 500 had no effect.
        has_failed = int(found[1]) >= 500 and not is_throttled
        return TemporaryError(message, is_throttled=is_throttled, may_take_effect=has_failed)
    if "timed out" in text or "TimedOut" in text:
        return TemporaryError(message, is_throttled=True, may_take_effect=True)
    return TemporaryError(message, may_take_effect=not any(sign in text for sign in _NOT_CONNECTED))


def code_of(text: str) -> str | None:
    """Return the code in a server's error document; None if there is none."""
    found = _CODE.search(text)
    return found[1] if found else None


def _by_class(error: BaseException) -> tuple[type[CheckpointError], str] | None:
    if isinstance(error, FileNotFoundError):
        return _BY_STATUS[404]
    name = type(error).__name__
    if name in ("AlreadyExistsError", "PreconditionError"):
        return _BY_STATUS[412]
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return _BY_STATUS[403]
    return None


def _without_credentials(text: str) -> tuple[type[CheckpointError], str] | None:
    """Return what to say if the vendor's service for credentials was asked, and has none; None otherwise."""
    if not _ASKING_FOR_CREDENTIALS.search(text):
        return None
    found = _STATUS.search(text)
    if _NETWORK.search(text) or (found is not None and (int(found[1]) >= 500 or int(found[1]) in _THROTTLED)):
        return TemporaryError, "the service for credentials failed; retry"
    return InvalidError, _NO_CREDENTIALS


def _by_status(text: str) -> tuple[type[CheckpointError], str] | None:
    found = _STATUS.search(text)
    if found is None:
        return None
    status = int(found[1])
    return _BY_STATUS.get(status, (TemporaryError, "the store failed; retry later"))


def _by_text(text: str) -> tuple[type[CheckpointError], str]:
    if "redirect without LOCATION" in text:
        return InvalidError, _REGION
    if "Missing" in text and "redential" in text:
        return InvalidError, _NO_CREDENTIALS
    if "certificate" in text.lower():
        return InvalidError, "trust the authority of the server: AWS_CA_BUNDLE, or ObjectSettings(ca_file=…)"
    if "timed out" in text or "TimedOut" in text:
        return TemporaryError, "no answer came in time, and the request may still take effect"
    return TemporaryError, "look at endpoint and network"


def _said(text: str, code: str | None) -> str:
    """Return what to show of an error's text."""
    if code is not None:
        message = _MESSAGE.search(text)
        return without_secrets(f"{code}{f' ({message[1]})' if message and message[1] else ''}")
    if _NO_CONNECTION.search(text):
        host = _HOST.search(text)
        causes = [found[1] for found in (each.search(text) for each in _CAUSES) if found]
        why = causes[0] if causes else "no reason is known"
        return without_secrets(f"no connection{f' to {host[1]}' if host else ''}: {why}")
    return without_secrets(text.split("\n", 1)[0].partition("<?xml")[0].rstrip(" :"))
