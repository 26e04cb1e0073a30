"""The keys of a rule file as written: msgspec refuses unknown keys and wrong types by place."""

from __future__ import annotations

import msgspec

_Number = int | str


class SizePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One place in which a size may stand."""

    value: str = ""
    """Path of a plain value of the checkpoint."""

    condition: str = msgspec.field(default="", name="if")
    """Path of a plain value that must be true for this place to count."""

    json: str = ""
    """A file that lies with the checkpoint."""

    key: str = ""
    """Key in that file, with dots for nested keys."""

    shape: str = ""
    """Name of a tensor of the checkpoint."""

    dim: int = 0
    """The dimension."""

    given: str = ""
    """Explanation of a size that only the caller knows."""


class Unstack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Takes a dimension apart: one tensor for each index, or for each block."""

    dim: int
    field: str = msgspec.field(name="as")
    block: _Number | None = None


class Pad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leaves out padding: rows from `content` on."""

    dim: int
    content: _Number


class Interleave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In each block, element `i * by + j` goes to `j * (block // by) + i`."""

    dim: int
    block: _Number
    by: _Number


class SectionPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of every block of `Sections`."""

    length: _Number
    to: str = ""
    skip: str = ""
    interleave: Interleave | None = None
    permute: tuple[int, ...] | None = None
    transpose: bool = False


class Sections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cuts a dimension into `repeat` blocks of all parts."""

    dim: int
    parts: tuple[SectionPart, ...]
    repeat: _Number = 1


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Puts tensors one after the other along a dimension."""

    dim: int
    by: str
    count: _Number | None = None


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Puts tensors one after the other along a new dimension."""

    dim: int
    by: str


class RuleText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[rule]]`. `to`, `sections` or `skip` says the result; the other keys are its steps."""

    source: str = msgspec.field(name="from")
    name: str = ""
    unstack: Unstack | tuple[Unstack, ...] = ()
    pad: Pad | None = None
    sections: Sections | None = None
    interleave: Interleave | None = None
    permute: tuple[int, ...] | None = None
    transpose: bool = False
    join: Join | None = None
    stack: Stack | tuple[Stack, ...] = ()
    to: str = ""
    skip: str = ""
    optional: bool = False


class FileText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file."""

    layout: int
    about: str = ""
    follow: tuple[tuple[str, ...], ...] = (("{}", "{}"),)
    sizes: dict[str, tuple[SizePlace | str, ...]] = {}
    ties: dict[str, str] = {}
    rule: tuple[RuleText, ...] = ()
