"""`holdfast diff`: what differs between two checkpoints, of whatever formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.ending import DIFFERENT, NOT_DONE, ended_well
from holdfast.cli.opening import AllowRoot, opened
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Column, Screen, shown_bytes, stdout
from holdfast.cli.tree import in_line
from holdfast.errors import printable

ROWS_MAX = 50

_COLUMNS = (
    Column("TENSOR"),
    Column("CHANGED", "right"),
    Column("MAX ABS", "right"),
    Column("MAX REL", "right"),
    Column("NORM A", "right"),
    Column("NORM B", "right"),
    Column("NORM A-B", "right"),
)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="One checkpoint, of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of the same format or not.")],
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="GLOB", help="Compare only tensors whose name matches, no values."),
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Compare tensors of different types by value.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Read what digests settle too: norms of whole tensors.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List equal tensors too; cut no list short.")] = False,
    allow_root: AllowRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")] = False,
) -> None:
    """Show what differs between two checkpoints: tensors, names, values. Exits with 0 if nothing does, else with 1.

    What digests show to be the same is not read.
    """
    with ended_well(corrupt=NOT_DONE):
        checkpoints = opened(a, allow_root), opened(b, allow_root)
        with shown_progress("comparing") as bar:
            found = api.diff(*checkpoints, tensors=tensors, cast=cast, full=full, observer=bar)
        if as_json:
            stdout().json(_document(found))
        else:
            screen = stdout()
            limit = ROWS_MAX if screen.interactive and not everything else None
            _show(screen, found, limit, equal_too=everything)
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def _show(screen: Screen, found: api.Diff, limit: int | None, *, equal_too: bool) -> None:
    _show_changes(screen, [each for each in found.tensors if _has_row(each, equal_too=equal_too)], limit)
    _show_lines(screen, "different dtype or shape", _mismatches(found), limit)
    for title, names in (("only in A", found.only_a), ("only in B", found.only_b)):
        _show_lines(screen, title, map(_only, names), limit)
    ties = (f"{printable(tie.name)}: {printable(tie.a)} in A, {printable(tie.b)} in B" for tie in found.ties)
    _show_lines(screen, "tied otherwise", ties, limit)
    _show_lines(screen, "values", _values(found, together=limit is not None), limit)
    if not found.equal:
        screen.line()
    screen.line(_summary(found), style="green" if found.equal else "bold")


def _has_row(each: api.TensorDiff, *, equal_too: bool) -> bool:
    return each.verdict is api.Verdict.CHANGED or (equal_too and each.verdict is api.Verdict.EQUAL)


def _show_changes(screen: Screen, tensors: list[api.TensorDiff], limit: int | None) -> None:
    if not tensors:
        return
    screen.table(_COLUMNS, [_row(each) for each in tensors[:limit]])
    if limit is not None and len(tensors) > limit:
        screen.line(f"… and {len(tensors) - limit:,} more: --all shows them, --tensors 'GLOB' chooses", style="dim")
    for each in tensors[:limit]:
        change = each.change
        if change is not None and (any(change.nan) or any(change.inf)):
            screen.line(
                f"{printable(each.fqn)}: NaN {change.nan[0]:,} in A, {change.nan[1]:,} in B; infinite "
                f"{change.inf[0]:,} in A, {change.inf[1]:,} in B; {change.unmeasured:,} changed elements are one or "
                "the other, and in no maximum or norm",
                style="yellow",
            )


def _row(each: api.TensorDiff) -> list[str]:
    change = each.change
    if change is None:
        return [printable(each.fqn), "0 %", *"00---"]
    # Of what digests settle the norms are not known.
    norms = ["-", "-"] if each.settled_bytes else [_number(change.norm_a), _number(change.norm_b)]
    return [
        printable(each.fqn),
        _percent(change.changed, each.numel),
        _number(change.max_absolute),
        _number(change.max_relative),
        *norms,
        _number(change.norm_difference),
    ]


def _mismatches(found: api.Diff) -> Iterator[str]:
    for each in found.tensors:
        if each.verdict is api.Verdict.SHAPE:
            yield f"{printable(each.fqn)}: {list(each.shape[0])} in A, {list(each.shape[1])} in B"
        elif each.verdict is api.Verdict.DTYPE:
            yield f"{printable(each.fqn)}: {each.dtype[0]} in A, {each.dtype[1]} in B; not compared, --cast may"


def _only(name: api.NameOnly) -> str:
    tied = "" if name.tied_to is None else f", tied to {printable(name.tied_to)}"
    return f"{printable(name.fqn)}: {name.dtype} {list(name.shape)}{tied}"


def _values(found: api.Diff, *, together: bool) -> Iterator[str]:
    """Yield a line for each value; where `together`, one for all of one name that changed alike."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for each in found.values:
        sides = tuple(
            in_line(value) if there else "absent" for value, there in ((each.a, each.in_a), (each.b, each.in_b))
        )
        key = each.path.rpartition(".")[2] if together else each.path
        lines.setdefault((key, *sides), []).append(each.path)
    for (_, a, b), paths in lines.items():
        more = f" and {len(paths) - 1:,} more alike" if len(paths) > 1 else ""
        yield f"{printable(paths[0])}{more}: {a} in A, {b} in B"


def _show_lines(screen: Screen, title: str, lines: Iterable[str], limit: int | None) -> None:
    shown = list(lines)
    if not shown:
        return
    screen.heading(title)
    for line in shown[:limit]:
        screen.line(f"  {line}")
    if limit is not None and len(shown) > limit:
        screen.line(f"  … and {len(shown) - limit:,} more: --all shows them", style="dim")


def _summary(found: api.Diff) -> str:
    read = f"{shown_bytes(found.read_bytes)} read, {shown_bytes(found.settled_bytes)} settled by digests"
    count = len(found.tensors)
    if found.equal:
        return f"equal: {count:,} tensor{'s' * (count != 1)}; {read}"
    differing = sum(each.verdict is not api.Verdict.EQUAL for each in found.tensors)
    parts = [f"{differing:,} of {count:,} tensor{'s' * (count != 1)}"]
    for names, where in ((found.only_a, "A"), (found.only_b, "B")):
        if names:
            parts.append(f"{len(names):,} only in {where}")
    if found.values:
        parts.append(f"{len(found.values):,} value{'s' * (len(found.values) != 1)}")
    return f"different: {', '.join(parts)}; {read}"


def _percent(part: int, whole: int) -> str:
    if part in (0, whole):
        return "100 %" if part else "0 %"
    shown = 100 * part / whole
    return f"{shown:.3g} %" if shown < 99.95 else "<100 %"


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def _document(found: api.Diff) -> dict[str, object]:
    counts = {verdict.value: 0 for verdict in api.Verdict}
    for each in found.tensors:
        counts[each.verdict.value] += 1
    return {
        "a": found.a,
        "b": found.b,
        "equal": found.equal,
        "tensor_counts": counts,
        "tensors": {each.fqn: _tensor_document(each) for each in found.tensors},
        "only_a": [_name_document(each) for each in found.only_a],
        "only_b": [_name_document(each) for each in found.only_b],
        "ties": [{"name": each.name, "a": each.a, "b": each.b} for each in found.ties],
        "values": [_value_document(each) for each in found.values],
        "read_bytes": found.read_bytes,
        "settled_bytes": found.settled_bytes,
    }


def _tensor_document(each: api.TensorDiff) -> dict[str, object]:
    document: dict[str, object] = {
        "verdict": each.verdict.value,
        "dtype": list(each.dtype),
        "shape": [list(shape) for shape in each.shape],
        "settled_bytes": each.settled_bytes,
    }
    change = each.change
    if change is not None:
        document |= {
            "changed": change.changed,
            "changed_fraction": change.changed / each.numel,
            "unmeasured": change.unmeasured,
            "max_absolute": _finite(change.max_absolute),
            "max_relative": _finite(change.max_relative),
            "norm_difference": _finite(change.norm_difference),
        }
        if not each.settled_bytes:
            document |= {
                "norm": [_finite(change.norm_a), _finite(change.norm_b)],
                "nan": list(change.nan),
                "inf": list(change.inf),
            }
    return document


def _name_document(each: api.NameOnly) -> dict[str, object]:
    return {"name": each.fqn, "dtype": each.dtype, "shape": list(each.shape), "tied_to": each.tied_to}


def _value_document(each: api.ValueDiff) -> dict[str, object]:
    document: dict[str, object] = {"path": each.path}
    if each.in_a:
        document["a"] = api.value_document(each.a)
    if each.in_b:
        document["b"] = api.value_document(each.b)
    return document


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
