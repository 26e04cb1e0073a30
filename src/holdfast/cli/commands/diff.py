"""`holdfast diff`: compares two checkpoints of any formats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AllowRoot, AsJson, opened
from holdfast.cli.exit_status import DIFFERENT, NOT_DONE, ended_well
from holdfast.cli.layout_options import Layouts, with_layouts
from holdfast.cli.progress import shown_progress
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import counted, printable, shown_bytes

ROWS_MAX = 50

_COLUMNS = ("TENSOR", ">CHANGED", ">MAX ABS", ">MAX REL", ">NORM A", ">NORM B", ">NORM A-B")


@with_layouts
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="One checkpoint of any format, or a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="GLOB", help="Compare only tensors with matching names, and no values."),
    ] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Compare tensors of different types by value.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read tensors with equal digests too, for norms of whole tensors.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List equal tensors too, and every list in full.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="STEP", help="Of each run: the step, as number, tag or latest. Default: the newest valid."
        ),
    ] = None,
    step_b: Annotated[
        str | None, typer.Option("--step-b", metavar="STEP", help="Of B, if that is a run; default: as --step.")
    ] = None,
    layouts: Layouts = None,
    allow_root: AllowRoot = None,
    as_json: AsJson = False,
) -> None:
    """Compare tensors, names and values of two checkpoints. The exit status is 0 if they are equal, else 1.

    Bytes with equal digests are not read. A layout makes the tensors of A, which are then compared with those of B.
    """
    with ended_well(corrupt=NOT_DONE):
        step_b = step_b if step_b is not None or not api.is_run(b) else step
        step_a = step if api.is_run(a) or not api.is_run(b) else None
        checkpoints = opened(a, allow_root, step_a, layouts), opened(b, allow_root, step_b)
        with shown_progress("comparing") as bar:
            result = api.diff(*checkpoints, tensors=tensors, cast=cast, full=full, observer=bar)
        print_result(result, partial(_show, everything=everything), _document, as_json=as_json)
    if not result.equal:
        raise typer.Exit(DIFFERENT)


def _show(screen: Screen, result: api.Diff, *, everything: bool) -> None:
    limit = ROWS_MAX if screen.interactive and not everything else None
    listed = {api.Verdict.CHANGED, api.Verdict.EQUAL} if everything else {api.Verdict.CHANGED}
    _show_changes(screen, [tensor for tensor in result.tensors if tensor.verdict in listed], limit)
    _show_lines(screen, "different dtype or shape", _mismatches(result), limit)
    for title, names in (("only in A", result.only_a), ("only in B", result.only_b)):
        _show_lines(screen, title, map(_only, names), limit)
    ties = (f"{printable(tie.name)}: {printable(tie.a)} in A, {printable(tie.b)} in B" for tie in result.ties)
    _show_lines(screen, "tied otherwise", ties, limit)
    _show_lines(screen, "values", _values(result, together=limit is not None), limit)
    if not result.equal:
        screen.line()
    screen.line(_summary(result), style="green" if result.equal else "bold")


def _show_changes(screen: Screen, tensors: list[api.TensorDiff], limit: int | None) -> None:
    if not tensors:
        return
    screen.table(_COLUMNS, [_row(tensor) for tensor in tensors[:limit]])
    screen.note_left_out(len(tensors), limit, ": --all shows them, --tensors 'GLOB' chooses")
    for tensor in tensors[:limit]:
        change = tensor.change
        if change is not None and (any(change.nan) or any(change.inf)):
            screen.line(
                f"{printable(tensor.fqn)}: NaN {change.nan[0]:,} in A, {change.nan[1]:,} in B; infinite "
                f"{change.inf[0]:,} in A, {change.inf[1]:,} in B; {change.unmeasured:,} changed elements are one or "
                "the other, and in no maximum or norm",
                style="yellow",
            )


def _row(tensor: api.TensorDiff) -> list[str]:
    change = tensor.change
    if change is None:
        return [printable(tensor.fqn), "0 %", *"00---"]
    # Parts with equal digests were not read, so the norms of the whole tensor are unknown.
    norms = ["-", "-"] if tensor.settled_bytes else [_number(change.norm_a), _number(change.norm_b)]
    return [
        printable(tensor.fqn),
        _percent(change.changed, tensor.numel),
        _number(change.max_absolute),
        _number(change.max_relative),
        *norms,
        _number(change.norm_difference),
    ]


def _mismatches(result: api.Diff) -> Iterator[str]:
    for tensor in result.tensors:
        if tensor.verdict is api.Verdict.SHAPE:
            yield f"{printable(tensor.fqn)}: {list(tensor.shape[0])} in A, {list(tensor.shape[1])} in B"
        elif tensor.verdict is api.Verdict.DTYPE:
            yield f"{printable(tensor.fqn)}: {tensor.dtype[0]} in A, {tensor.dtype[1]} in B; not compared, --cast may"


def _only(name: api.NameOnly) -> str:
    tied = "" if name.tied_to is None else f", tied to {printable(name.tied_to)}"
    return f"{printable(name.fqn)}: {name.dtype} {list(name.shape)}{tied}"


def _values(result: api.Diff, *, together: bool) -> Iterator[str]:
    """Yield a line for each value; if `together`, one line for equal changes of values with the same last name."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for value in result.values:
        a = api.value_text(value.a) if value.in_a else "absent"
        b = api.value_text(value.b) if value.in_b else "absent"
        key = value.path.rpartition(".")[2] if together else value.path
        lines.setdefault((key, a, b), []).append(value.path)
    for (_, a, b), paths in lines.items():
        more = f" and {len(paths) - 1:,} more alike" if len(paths) > 1 else ""
        yield f"{printable(paths[0])}{more}: {a} in A, {b} in B"


def _show_lines(screen: Screen, title: str, lines: Iterable[str], limit: int | None) -> None:
    shown = [f"  {line}" for line in lines]
    if shown:
        screen.heading(title)
        screen.first_lines(shown, limit, ": --all shows them")


def _summary(result: api.Diff) -> str:
    read = f"{shown_bytes(result.read_bytes)} read, {shown_bytes(result.settled_bytes)} settled by digests"
    tensors = counted(len(result.tensors), "tensor")
    if result.equal:
        return f"equal: {tensors}; {read}"
    differing = sum(tensor.verdict is not api.Verdict.EQUAL for tensor in result.tensors)
    parts = [f"{differing:,} of {tensors}"]
    for names, side in ((result.only_a, "A"), (result.only_b, "B")):
        if names:
            parts.append(f"{len(names):,} only in {side}")
    if result.values:
        parts.append(counted(len(result.values), "value"))
    return f"different: {', '.join(parts)}; {read}"


def _percent(part: int, whole: int) -> str:
    if part in (0, whole):
        return "100 %" if part else "0 %"
    shown = 100 * part / whole
    return f"{shown:.3g} %" if shown < 99.95 else "<100 %"


def _number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def _document(result: api.Diff) -> dict[str, object]:
    counts = Counter(tensor.verdict for tensor in result.tensors)
    return {
        **attributes(result, "a", "b", "equal"),
        "tensor_counts": {verdict.value: counts[verdict] for verdict in api.Verdict},
        "tensors": {tensor.fqn: _tensor_document(tensor) for tensor in result.tensors},
        "only_a": [_name_document(name) for name in result.only_a],
        "only_b": [_name_document(name) for name in result.only_b],
        "ties": [attributes(tie, "name", "a", "b") for tie in result.ties],
        "values": [_value_document(value) for value in result.values],
        **attributes(result, "read_bytes", "settled_bytes"),
    }


def _tensor_document(tensor: api.TensorDiff) -> dict[str, object]:
    document = {"verdict": tensor.verdict.value, **attributes(tensor, "dtype", "shape", "settled_bytes")}
    change = tensor.change
    if change is not None:
        document |= {
            "changed": change.changed,
            "changed_fraction": change.changed / tensor.numel,
            "unmeasured": change.unmeasured,
            "max_absolute": _finite(change.max_absolute),
            "max_relative": _finite(change.max_relative),
            "norm_difference": _finite(change.norm_difference),
        }
        if not tensor.settled_bytes:
            norms = [_finite(change.norm_a), _finite(change.norm_b)]
            document |= {"norm": norms, **attributes(change, "nan", "inf")}
    return document


def _name_document(name: api.NameOnly) -> dict[str, object]:
    return {"name": name.fqn, **attributes(name, "dtype", "shape", "tied_to")}


def _value_document(value: api.ValueDiff) -> dict[str, object]:
    document: dict[str, object] = {"path": value.path}
    if value.in_a:
        document["a"] = api.value_document(value.a)
    if value.in_b:
        document["b"] = api.value_document(value.b)
    return document


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
