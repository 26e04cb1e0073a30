"""The field `timeline` of a manifest: written for every timeline but the first."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from holdfast.base.types.inspected import inspected
from holdfast.base.types.timeline import ANCESTORS_STATED, FIRST_TIMELINE, Fork, Timeline
from holdfast.core.format.sealed_json import Digest, StepNumber

_NUMBER_MAX = (1 << 53) - 1
_ANCESTORS_MAX = 100_000

_FIRST_LINE = re.compile(rb'^ "timeline": (?=\{\n)', re.MULTILINE)
_LAST_LINE = b"\n },\n"

_Number = Annotated[int, msgspec.Meta(ge=2, le=_NUMBER_MAX)]
_Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
_AncestorId = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")]


ParentDocument = tuple[_Id, _AncestorId, StepNumber, Digest]
"""The id of a timeline, and where it leaves its parent."""


class TimelineDocument(msgspec.Struct):
    """A timeline as JSON: its number, its id, and `[id, step, digest]` of its nearest ancestors, the parent first."""

    number: _Number
    id: _Id
    ancestors: Annotated[list[tuple[_AncestorId, StepNumber, Digest]], msgspec.Meta(max_length=_ANCESTORS_MAX)]


def encode_timeline(timeline: Timeline) -> dict[str, object]:
    """Return a timeline as a JSON object. The list of the epoch has the ancestors that it leaves out."""
    ancestors = [[fork.timeline, fork.step, fork.digest] for fork in timeline.ancestors[:ANCESTORS_STATED]]
    return {"number": timeline.number, "id": timeline.id, "ancestors": ancestors}


def decode_timeline(document: TimelineDocument | None) -> Timeline:
    """Return the timeline that a manifest states; the first one if it states none."""
    if document is None:
        return FIRST_TIMELINE
    return Timeline(document.number, document.id, tuple(Fork(*ancestor) for ancestor in document.ancestors))


def timeline_in_damaged(damaged: bytes) -> Timeline | None:
    """Return the timeline that a damaged manifest states; None if it states none, or if its lines are damaged.

    Nothing proves it: a caller compares it with the timelines of other manifests.
    """
    first = _FIRST_LINE.search(damaged)
    # Two searches, not one pattern: a crafted text must not make the second one begin again and again.
    stop = -1 if first is None else damaged.find(_LAST_LINE, first.end())
    if first is None or stop < 0:
        return None
    text = damaged[first.end() : stop + len(b"\n }")]
    try:
        return decode_timeline(msgspec.json.decode(text, type=inspected(TimelineDocument, msgspec.msgpack.Decoder)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
