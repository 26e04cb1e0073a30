"""What `holdfast inspect` shows of compression: codec and ratio by tensor, and the decisions of the save by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from holdfast import api
from holdfast.cli.screen import Screen
from holdfast.errors import printable, shown_bytes, shown_ranks
from holdfast.observers import KindCoding

_KIND_COLUMNS = ("KIND", "CODEC", ">BYTES", ">STORED", ">RATIO", "RANKS", "WHY")


def shown_codecs(form: api.StoredForm) -> str:
    """Return the codecs of a tensor, `raw` for chunks stored as they are: `residual, raw`."""
    return ", ".join((*form.codecs, *(["raw"] if "" in form.chunks else []))) or "-"


def shown_ratio(raw_bytes: int, stored_bytes: int) -> str:
    """Return a ratio for people: `1.42`; `-` for nothing."""
    return f"{raw_bytes / stored_bytes:.2f}" if stored_bytes else "-"


def show_codings(screen: Screen, codings: Mapping[int, Iterable[KindCoding]]) -> None:
    """Print how each kind of tensors was stored, by which ranks, and why on the lowest of them."""
    rows: dict[tuple[str, str], list[tuple[int, KindCoding]]] = {}
    for rank, of_rank in codings.items():
        for coding in of_rank:
            rows.setdefault((coding.kind, coding.codec), []).append((rank, coding))
    if not rows:
        return
    screen.heading("decisions of the save")
    table = []
    for (kind, codec), found in sorted(rows.items()):
        raw_bytes, stored_bytes = (
            sum(getattr(each, name) for _, each in found) for name in ("raw_bytes", "stored_bytes")
        )
        table.append(
            [
                printable(kind),
                printable(codec) or "raw",
                shown_bytes(raw_bytes),
                shown_bytes(stored_bytes),
                shown_ratio(raw_bytes, stored_bytes),
                shown_ranks([rank for rank, _ in found]),
                printable(found[0][1].why),
            ]
        )
    screen.table(_KIND_COLUMNS, table)


def codings_document(codings: Mapping[int, Iterable[KindCoding]]) -> list[dict[str, object]]:
    """Return the decisions of all ranks as JSON, one entry for each rank and kind."""
    return [{"rank": rank, **asdict(coding)} for rank, of_rank in codings.items() for coding in of_rank]
