"""The pictures of the bench of activations: slowdown against peak, and predicted against measured."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from bench import report
from bench.activations.race import KEEP
from bench.activations.slowdowns import overhead
from bench.part import contenders
from bench.plots import LIMIT, OURS, Picture
from bench.report import Latest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = {
    "Holdfast, ε = 0": ("ours_", OURS, "o-"),
    "Holdfast, ε = 0.02": ("ours_e02", OURS, "s"),
    "Holdfast, ε = 0.25": ("ours_e25", OURS, "^"),
    "checkpoint": ("full", "#6b7280", "o-"),
    "selective checkpoint": ("selective", "#6b7280", "s"),
    "every second matmul": ("every_second_matmul", "#6b7280", "^"),
    "save_on_cpu": ("save_on_cpu", "#6b7280", "x"),
    "compiled, memory budget": ("compiled_", LIMIT, "o-"),
}
"""Label: how the names of the ways begin, colour, and form."""


def _slowdown(axes: Axes, latest: Latest) -> None:
    points: dict[str, tuple[float, float]] = {KEEP: (1.0, 1.0)}
    for part in ("bounded", "exact"):
        rounds = report.rounds_of(latest, part)
        for name in (each.removeprefix("peak_") for each in contenders(rounds, "peak_")):
            share = rounds[0][f"peak_{name}"] / rounds[0][f"peak_{KEEP}"]
            points[name] = share, 1 + median(overhead(each, name) for each in rounds)
    for label, (prefix, colour, form) in _LINES.items():
        own = [name for name in points if name.startswith(prefix)]
        if prefix == "ours_":
            own = [KEEP, *(name for name in own if not name.startswith("ours_e"))]
        if prefix == "full":
            own.append(KEEP)
        if found := sorted(points[name] for name in own):
            axes.plot(*zip(*found, strict=True), form, color=colour, label=label, markersize=4)
    axes.set_xlabel("peak of a step ÷ peak of plain training")
    axes.set_ylabel("time of a step ÷ plain training")
    axes.legend(frameon=False, fontsize=7)


def _predicted(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "peaks")
    for kind, colour in (("gpt", OURS), ("modern", LIMIT)):
        pairs = [
            (each[f"predicted_{kind}"] / 2**20, each[f"measured_{kind}"] / 2**20)
            for each in rounds
            if f"measured_{kind}" in each
        ]
        axes.plot(*zip(*pairs, strict=True), "o", color=colour, label=kind, markersize=4)
    axes.axline((0, 0), slope=1, color="#b9bec6", zorder=0)
    axes.set_xlabel("predicted peak of a step, MiB")
    axes.set_ylabel("measured")
    axes.legend(frameon=False)


PICTURES = (
    Picture("activations_slowdown", "How much longer does a step take in less memory?", "exact", _slowdown),
    Picture("activations_peaks", "How exact are predicted peaks?", "peaks", _predicted),
)
"""In the order in which they are shown."""
