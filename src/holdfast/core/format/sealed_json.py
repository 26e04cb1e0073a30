"""JSON documents that end in their own digest, and msgpack files, decoded into typed structs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, TypeVar

import msgspec

from holdfast.base.types.inspected import inspected
from holdfast.base.types.manifest import FORMAT_MAJOR, FORMAT_MINOR_MAX, FORMAT_MINOR_RUN
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.names import EPOCH_MAX, STEP_MAX, WORLD_SIZE_MAX
from holdfast.core.format.values.json_text import dumps, loads
from holdfast.errors import CorruptError, InvalidError

Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\ud800-\udfff]*\Z")]
"""Text without surrogates: `dumps` refuses surrogates, so a document that holds one could not be written again."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
EpochNumber = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=WORLD_SIZE_MAX)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=WORLD_SIZE_MAX)]

_SEAL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_BYTES = len(b',\n "digest": "') + 32 + len(b'"\n}\n')
_PATH = re.compile(r"\$\.(\w+)")
_MISSING = re.compile(r"required field `(\w+)`")

_T = TypeVar("_T")
_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def header(kind: str, minor: int = FORMAT_MINOR_RUN) -> dict[str, object]:
    """Return the first field of a document: the version of the format that it needs, and its kind."""
    return {"holdfast": {"format": [FORMAT_MAJOR, minor], "kind": kind}}


def sealed(document: Mapping[str, object]) -> bytes:
    """Return a JSON object as text whose last field, `digest`, is the xxh3-128 of everything before it."""
    text = dumps(dict(document), indent=1)
    assert text.endswith(b"\n}"), "an object of at least one field, indented by one"
    body = text[:-2]
    return body + b',\n "digest": "' + hex_digest_of(body).encode() + b'"\n}\n'


def unsealed(data: bytes, where: str) -> tuple[dict[str, object], str]:
    """Return the JSON object of a sealed text, and its digest.

    Raises:
        CorruptError: The text is truncated, or differs from its digest.
    """
    expected = _proven_digest(data, where)
    document = loads(data[:-_SEAL_BYTES] + b"\n}")
    if not isinstance(document, dict) or "digest" in document:
        raise CorruptError(f"{where}: not a JSON object with one digest; it is damaged or not ours")
    return document, expected


def stated_digest(data: bytes) -> str | None:
    """Return the digest at the end of a sealed text, unverified; None if there is none."""
    match = _SEAL.search(data)
    return match[1].decode() if match else None


def possible_digests(data: bytes) -> list[str]:
    """Return the digests that a sealed text may have had before it was damaged: that of its body, and the stated one.

    One of the two is right if only the body or only the end of the text is damaged.
    """
    stated = stated_digest(data)
    return [hex_digest_of(data[:-_SEAL_BYTES]), *([] if stated is None else [stated])]


def decode_sealed(data: bytes, kind: str | tuple[str, ...], into: type[_T], where: str) -> tuple[_T, str]:
    """Return a sealed document as a typed struct, and its digest. Unknown fields are ignored.

    Args:
        data: The text.
        kind: The kind of document that is expected, as its header names it; or several kinds.
        into: A `msgspec.Struct` with the types and limits of the fields.
        where: The file, for messages.
    Raises:
        CorruptError: The text is damaged, or a field is outside its limits.
        InvalidError: The document is of another version or kind.
    """
    document, digest = unsealed(data, where)
    _check_format(document, (kind,) if isinstance(kind, str) else kind, where)
    return convert(document, into, where), digest


def decode_fields(data: bytes, kind: str, into: type[_Fields], where: str) -> tuple[_Fields, str]:
    """Return some fields of a sealed document as a typed struct, and its digest. All other fields are skipped.

    Nothing is made of the other fields, nor are they checked: a manifest names tens of thousands of files, and a run
    has many manifests, of which a load reads one.

    Args:
        data: The text.
        kind: The kind of document that is expected, as its header names it.
        into: A `msgspec.Struct` with the types and limits of the fields that are wanted.
        where: The file, for messages.
    Raises:
        CorruptError: The text is damaged, or one of these fields is outside its limits.
        InvalidError: The document is of another version or kind.
    """
    digest = _proven_digest(data, where)
    try:
        raw = msgspec.structs.asdict(_raw_decoder(into.__struct_encode_fields__).decode(data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: JSON text of {len(data)} bytes: {error}; read another copy") from error
    document = {name: loads(bytes(text)) for name, text in raw.items() if bytes(text)}
    _check_format(document, (kind,), where)
    return convert(document, into, where), digest


@cache
def _raw_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Return a decoder that leaves the header and some fields of a document as text, and skips all others."""
    absent = msgspec.Raw(b"")
    # A new class for each decoder, so that no other thread uses it while msgspec inspects it: see `inspected`.
    fields = [(name, msgspec.Raw, absent) for name in ("holdfast", *names)]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields))


def _proven_digest(data: bytes, where: str) -> str:
    """Return the digest at the end of a sealed text, after comparing it with the text.

    Raises:
        CorruptError: The text is truncated, or differs from its digest.
    """
    expected = stated_digest(data[-_SEAL_BYTES:])
    if expected is None:
        raise CorruptError(f"{where}: does not end in its own digest; it is truncated, damaged or not ours")
    body = memoryview(data)[:-_SEAL_BYTES]
    actual = hex_digest_of(body)
    if actual != expected:
        raise CorruptError(f"{where}: bytes 0–{len(body)} hash to {actual}; expected {expected}. Read another copy")
    return expected


def convert(document: object, into: type[_T], where: str) -> _T:
    """Return a JSON document as a typed struct. Strict: true is no number, 1.0 is no whole number.

    Raises:
        CorruptError: A field is missing or outside its limits; the message names the file and the field.
    """
    try:
        return msgspec.convert(document, inspected(into, msgspec.msgpack.Decoder))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # The latter where text has surrogates.
        problem = str(error)[0].lower() + str(error)[1:]
        field = _PATH.search(problem) or _MISSING.search(problem)
        if field is not None and isinstance(document, dict):
            problem = f"{field[1]} is {str(document.get(field[1]))[:80]!r}; {problem}"
        raise CorruptError(f"{where}: {problem}. Read another copy") from error


def decode_msgpack(decoder: msgspec.msgpack.Decoder[_T], data: bytes, kind: str, where: str) -> _T:
    """Return the typed struct in a msgpack file.

    Args:
        decoder: Decoder of the struct.
        data: Content of the file.
        kind: Kind of the file with its article, such as "an index", for messages.
        where: The file, for messages.
    Raises:
        CorruptError: The file is damaged, or a field is outside its limits.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: not {kind} of format {FORMAT_MAJOR}: {error}. Read another copy") from error


def _check_format(document: Mapping[str, object], kinds: tuple[str, ...], where: str) -> None:
    """Refuse a document of another kind, another major version or a newer minor version.

    Raises:
        CorruptError: It has no format version.
        InvalidError: It is of another major version, a newer minor version, or another kind.
    """
    head = document.get("holdfast")
    version = head.get("format") if isinstance(head, dict) else None
    if not isinstance(head, dict) or not isinstance(version, list) or list(map(type, version)) != [int, int]:
        raise CorruptError(f"{where}: has no Holdfast format version; it is damaged or not ours")
    if version[0] != FORMAT_MAJOR:
        raise InvalidError(
            f"{where}: format {'.'.join(map(str, version))}; this Holdfast reads format {FORMAT_MAJOR}. "
            f"Read it with a Holdfast of major format {version[0]}"
        )
    if version[1] > FORMAT_MINOR_MAX:
        # Its additions may change what a file means. A good step must not be taken for a damaged one.
        raise InvalidError(
            f"{where}: format {FORMAT_MAJOR}.{version[1]}; this Holdfast reads format {FORMAT_MAJOR}.0 to "
            f"{FORMAT_MAJOR}.{FORMAT_MINOR_MAX}. Read it with a newer Holdfast"
        )
    if head.get("kind") not in kinds:
        raise InvalidError(
            f"{where}: is of kind {str(head.get('kind'))[:80]!r}; expected kind {' or '.join(map(repr, kinds))}"
        )
