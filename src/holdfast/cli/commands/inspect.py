"""`holdfast inspect`: shows one checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Step, opened
from holdfast.cli.commands.ls import health_document, json_number, log_document
from holdfast.cli.exit_status import ended_well
from holdfast.cli.layout_options import Layouts, with_layouts
from holdfast.cli.screen import Screen, attributes, stdout
from holdfast.cli.stored_forms import codings_document, show_codings, shown_codecs, shown_ratio
from holdfast.errors import InvalidError, counted, printable, shown_bytes, shown_ranks

TENSORS_MAX = 50
RANKS_MAX = 64
VALUE_LINES_MAX = 60
_MORE_LINES = " lines: --all shows them"

_COLUMNS = ("TENSOR", "DTYPE", "SHAPE", ">BYTES", ">PIECES", "WRITTEN BY")
_CODED_COLUMNS = (*_COLUMNS, ">RATIO", "CODEC")
_TOTAL_COLUMNS = ("KEY", ">TENSORS", ">BYTES")
_CODED_TOTAL_COLUMNS = (*_TOTAL_COLUMNS, ">STORED", ">RATIO")
_PLAN_COLUMNS = (">RANK", ">HOLDS", ">READS", ">CHUNKS", ">RUNS")


@with_layouts
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint (a step-* folder, or a path saved to), or a run.")
    ],
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="GLOB", help="Show only tensors with matching names, and no values."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--plan", metavar="MESH", help="Show how much each rank of a job, e.g. dp=2,fsdp=4, would read."),
    ] = None,
    layouts: Layouts = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Show how the layouts make each tensor, from metadata alone.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every list in full on a terminal.")] = False,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Show tensors, values and provenance of one checkpoint, and which rank wrote each tensor.

    Long lists are cut short on a terminal, never in a pipe.
    """
    with ended_well():
        if explained and not layouts:
            raise InvalidError("--explain without --layout; expected --layout NAME|FILE")
        if layouts and mesh is not None:
            raise InvalidError("--plan with --layout; expected one of them: a plan is of the stored tensors")
        checkpoint = opened(path, step=step, layouts=layouts)
        names = _chosen(checkpoint, tensors)
        screen = stdout()
        is_short = screen.interactive and not everything
        if explained:
            _explain(checkpoint, names, VALUE_LINES_MAX if is_short else None, as_json=as_json)
        elif mesh is not None:
            forecast = checkpoint.plan_for(mesh, names)
            if as_json:
                screen.json(_plan_document(checkpoint, forecast))
            else:
                _show_plan(screen, checkpoint, forecast, RANKS_MAX if is_short else None)
        elif as_json:
            screen.json(_document(checkpoint, names, tensors))
        else:
            names.sort(key=_natural)
            for name, text in api.provenance(checkpoint):
                if name:
                    screen.field(name, text)
                else:
                    screen.line(text, style="bold")
            forms = _coded_forms(checkpoint, names)
            _show_totals(screen, _totals(checkpoint, names, forms), TENSORS_MAX if is_short else None)
            show_codings(screen, checkpoint.codings)
            if tensors is None:
                _show_values(screen, checkpoint, VALUE_LINES_MAX if is_short else None)
            _show_tensors(screen, checkpoint, names, forms, TENSORS_MAX if is_short else None)
            _show_aliases(screen, checkpoint.aliases, names, TENSORS_MAX if is_short else None)


def _chosen(checkpoint: api.Checkpoint, glob: str | None) -> list[str]:
    """Return the stored tensors whose own name or tied name matches."""
    if glob is None:
        return list(checkpoint.tensors)
    tied = {fqn for alias, fqn in checkpoint.aliases.items() if fnmatchcase(alias, glob)}
    return [fqn for fqn in checkpoint.tensors if fqn in tied or fnmatchcase(fqn, glob)]


def _explain(checkpoint: api.Checkpoint, names: list[str], limit: int | None, *, as_json: bool) -> None:
    screen, names = stdout(), sorted(names, key=_natural)
    explained = [*api.explain(checkpoint.layouts, checkpoint.viewed.views, checkpoint.index.tensors, names)]
    if as_json:
        screen.json({**attributes(checkpoint, "url", "step"), "layouts": [each.document for each in explained]})
    for each in () if as_json else explained:
        screen.first_lines([printable(line) for line in each.lines], limit, _MORE_LINES)
        screen.line(printable(each.summary), style="dim")


def _natural(fqn: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layers.2` before `layers.10`."""
    return [(int(run), "") if run.isdecimal() else (-1, run) for run in re.split(r"(\d{1,18})", fqn)]


def _coded_forms(checkpoint: api.Checkpoint, names: list[str]) -> dict[str, api.StoredForm]:
    """Return how each tensor is stored; nothing for a checkpoint whose tensors are all stored as they are."""
    forms = {fqn: checkpoint.stored_form(fqn) for fqn in names}
    return forms if any(form.codecs for form in forms.values()) else {}


def _totals(
    checkpoint: api.Checkpoint, names: list[str], forms: Mapping[str, api.StoredForm]
) -> dict[str, dict[str, int]]:
    """Return number and bytes of tensors by the first part of their names, the key of the state.

    Where some are coded, their stored bytes too.
    """
    totals: dict[str, dict[str, int]] = {}
    for fqn in names:
        total = totals.setdefault(fqn.partition(".")[0], {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += checkpoint.tensors[fqn].bytes
        if forms:
            total["stored_bytes"] = total.get("stored_bytes", 0) + forms[fqn].stored_bytes
    return totals


def _show_totals(screen: Screen, totals: Mapping[str, Mapping[str, int]], limit: int | None) -> None:
    if totals:
        screen.line()
        rows = [[printable(key), f"{each['tensors']:,}", shown_bytes(each["bytes"])] for key, each in totals.items()]
        is_coded = any("stored_bytes" in each for each in totals.values())
        for row, each in zip(rows, totals.values(), strict=True):
            if is_coded:
                row += [shown_bytes(each["stored_bytes"]), shown_ratio(each["bytes"], each["stored_bytes"])]
        screen.table(_CODED_TOTAL_COLUMNS if is_coded else _TOTAL_COLUMNS, rows[:limit])
        screen.note_left_out(len(totals), limit, " keys: --all shows them")


def _show_tensors(
    screen: Screen, checkpoint: api.Checkpoint, names: list[str], forms: Mapping[str, api.StoredForm], limit: int | None
) -> None:
    if not names:
        screen.line()
        screen.line("no tensors" if not checkpoint.tensors else "no tensor matches", style="yellow")
        return
    screen.line()
    rows = []
    for fqn in names[:limit]:
        info, writers = checkpoint.tensors[fqn], checkpoint.written_by(fqn)
        ranks = shown_ranks(sorted(writers))
        rows.append(
            [
                printable(fqn),
                info.dtype,
                f"[{', '.join(map(str, info.shape))}]",
                shown_bytes(info.bytes),
                str(len(checkpoint.pieces(fqn))),
                f"rank{'s' * (len(writers) != 1)} {ranks}" if writers else "-",
            ]
        )
        if forms:
            rows[-1] += [shown_ratio(info.bytes, forms[fqn].stored_bytes), shown_codecs(forms[fqn])]
    screen.table(_CODED_COLUMNS if forms else _COLUMNS, rows)
    screen.note_left_out(len(names), limit, " tensors: --all shows them, --tensors 'GLOB' chooses")


def _show_aliases(screen: Screen, aliases: Mapping[str, str], names: list[str], limit: int | None) -> None:
    chosen = set(names)
    tied = [f"  {printable(alias)} = {printable(fqn)}" for alias, fqn in sorted(aliases.items()) if fqn in chosen]
    if tied:
        screen.heading("tied")
        screen.first_lines(tied, limit, _MORE_LINES)


def _show_values(screen: Screen, checkpoint: api.Checkpoint, limit: int | None) -> None:
    screen.heading("values")
    lines = api.value_lines(checkpoint.objects, whole_names=limit is None)
    screen.first_lines([f"  {line}" for line in lines] or ["  none"], limit, _MORE_LINES)


def _document(checkpoint: api.Checkpoint, names: list[str], glob: str | None) -> dict[str, object]:
    manifest = checkpoint.manifest
    parent = manifest.parent
    chosen = set(names)
    document: dict[str, object] = {
        **attributes(checkpoint, "url", "origin", "remarks"),
        **attributes(manifest, "step", "run_id", "attempt", "created"),
        **health_document(checkpoint),
        "metrics": {name: json_number(value) for name, value in manifest.metrics.items()},
        "digest": manifest.digest,
        "parent": None if parent is None else attributes(parent, "run_id", "step", "digest"),
        **attributes(manifest, "world_size", "layouts", "software"),
        "tensor_count": manifest.tensors,
        "tensor_bytes": manifest.tensor_bytes,
        "packs": [attributes(pack, "name", "bytes", "digest") for pack in manifest.packs],
        "log": None if checkpoint.log is None else log_document(checkpoint.log),
        "totals": _totals(checkpoint, names, _coded_forms(checkpoint, names)),
        "codings": codings_document(checkpoint.codings),
        "tensors": {fqn: _tensor_document(checkpoint, fqn) for fqn in names},
        "aliases": {alias: fqn for alias, fqn in sorted(checkpoint.aliases.items()) if fqn in chosen},
    }
    if glob is None:
        document["values"] = checkpoint.objects_document()
    return document


def _tensor_document(checkpoint: api.Checkpoint, fqn: str) -> dict[str, object]:
    info, form = checkpoint.tensors[fqn], checkpoint.stored_form(fqn)
    return {
        **attributes(info, "dtype", "shape", "bytes"),
        "stored_bytes": form.stored_bytes,
        "codecs": {name or "raw": count for name, count in form.chunks.items()},
        "pieces": [
            {**_region(piece.region), **attributes(piece, "pack", "offset", "bytes", "stored_bytes")}
            for piece in checkpoint.pieces(fqn)
        ],
        "pieces_by_rank": {str(rank): count for rank, count in sorted(checkpoint.written_by(fqn).items())},
    }


def _region(region: api.Region) -> dict[str, object]:
    """Return the region of a piece: corners of a box, or a range of the flattened tensor."""
    if isinstance(region, api.FlatRange):
        return {"flat_start": region.start, "flat_stop": region.stop}
    return attributes(region, "start", "stop")


def _show_plan(screen: Screen, checkpoint: api.Checkpoint, forecast: api.Forecast, limit: int | None) -> None:
    """Print the planned reads of each rank, for at most `limit` ranks."""
    mesh, ranks = forecast.mesh, forecast.ranks
    dimensions = zip(mesh.names, mesh.shape, mesh.placements, strict=True)
    screen.line(f"plan for {counted(len(ranks), 'rank')}; nothing was read", style="bold")
    screen.field("path", printable(checkpoint.url))
    screen.field("mesh", ", ".join(f"{name}={size} {placement}" for name, size, placement in dimensions))
    screen.field("tensors", f"{forecast.tensors:,} of {shown_bytes(forecast.stored_bytes)}")
    screen.field("reads", f"{shown_bytes(forecast.bytes)} over all ranks")
    screen.field("imbalance", f"{forecast.imbalance:.2f} (most over mean)")
    screen.line()
    rows = [
        [str(rank.rank), shown_bytes(rank.held_bytes), shown_bytes(rank.bytes), f"{rank.chunks:,}", f"{rank.reads:,}"]
        for rank in ranks[:limit]
    ]
    screen.table(_PLAN_COLUMNS, rows)
    screen.note_left_out(len(ranks), limit, " ranks: --all shows them")


def _plan_document(checkpoint: api.Checkpoint, forecast: api.Forecast) -> dict[str, object]:
    """Return the plan as a JSON document."""
    mesh = forecast.mesh
    dimensions = zip(mesh.names, mesh.shape, mesh.placements, strict=True)
    return {
        "url": checkpoint.url,
        "step": checkpoint.step,
        "mesh": [{"name": name, "size": size, "placement": str(placement)} for name, size, placement in dimensions],
        "tensor_count": forecast.tensors,
        "tensor_bytes": forecast.stored_bytes,
        "bytes": forecast.bytes,
        "imbalance": forecast.imbalance,
        "ranks": [attributes(rank, "rank", "held_bytes", "bytes", "chunks", "reads") for rank in forecast.ranks],
    }
