"""Draws one picture per question from `latest.json` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench import report
from bench.job import ROOT
from bench.part import Round, contenders
from bench.report import Latest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = ROOT / "docs" / "plots"

OURS, THEIRS, LIMIT = "#1b7f5c", "#b9bec6", "#d08a1d"

LABELS = {
    "save": "Holdfast",
    "save_dcp_1": "DCP, 1 thread",
    "save_dcp_2": "DCP, 2 threads",
    "save_meta_1": "torch_checkpointing, 1 thread",
    "save_meta_2": "torch_checkpointing, 2 threads",
    "save_torch_save": "torch.save + fsync",
    "save_safetensors": "safetensors + fsync",
    "load_cold": "Holdfast, cold",
    "load_warm": "Holdfast, warm",
    "memcpy": "one memcpy",
    "stall_copy": "Holdfast, copy",
    "lazy_blocked": "Holdfast, lazy",
    "dcp_async_thread": "DCP async, no stager passed",
    "dcp_async_thread_kept": "DCP async, stager kept",
    "dcp_async_background_kept": "DCP async, stager kept, thread",
    "dcp_async_process_kept": "DCP async, stager kept, process",
    "tiny_save": "save: Holdfast",
    "tiny_save_dcp": "save: DCP",
    "tiny_save_meta": "save: torch_checkpointing",
    "tiny_load": "load: Holdfast",
    "tiny_load_dcp": "load: DCP",
    "load_cold_dcp_1": "DCP, cold, 1 file a rank",
    "load_cold_dcp_2": "DCP, cold, 2 files a rank",
    "load_warm_dcp_1": "DCP, warm, 1 file a rank",
    "load_warm_dcp_2": "DCP, warm, 2 files a rank",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One question, and how to draw its answer."""

    name: str
    """Its file, without the ending."""

    question: str
    """Its title."""

    part: str
    """The part of the bench that it needs."""

    draw: Callable[[Axes, Latest], None]
    """Draws it."""

    def can_be_drawn(self, latest: Latest) -> bool:
        """Return whether its part was measured."""
        return bool(report.rounds_of(latest, self.part))


def draw_all(latest: Latest, pictures: Sequence[Picture] | None = None) -> None:
    """Draw every picture whose part was measured.

    Args:
        latest: The results.
        pictures: What to draw; None: the pictures of `latest.json`.
    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("bench: the plots need matplotlib: pip install -e '.[bench]'") from error
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES if pictures is None else pictures:
        if picture.can_be_drawn(latest):
            figure = Figure(figsize=(7.5, 3.4), layout="constrained")
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(picture.question)
            picture.draw(axes, latest)
            # Without the version, drawing the same results again gives the same file.
            figure.savefig(FOLDER / f"{picture.name}.png", dpi=120, metadata={"Software": None})


def _save(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "large")
    names = ["save", *sorted(contenders(rounds, "save_"))]
    _speeds(axes, latest, rounds, names, "limit_write")


def _load(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "large")
    names = sorted(contenders(rounds, "load_cold")) + sorted(contenders(rounds, "load_warm"))
    _speeds(axes, latest, rounds, names, "limit_read")


def _speeds(axes: Axes, latest: Latest, rounds: Sequence[Round], names: Sequence[str], limit: str) -> None:
    gib = latest["parts"]["large"]["params"]["mib"] / 1024  # type: ignore[index]
    speeds = {LABELS[name]: [gib / each[name] for each in rounds if name in each] for name in names}
    raw = contenders(rounds, limit)
    best = median(gib / min(each[name] for name in raw) for each in rounds if raw[0] in each)
    _bars(axes, speeds)
    axes.axvline(best, color=LIMIT, linewidth=2)
    axes.set_xlim(0, 1.15 * max(best, *(max(each) for each in speeds.values())))
    axes.annotate(
        "raw direct I/O",
        (best, 0),
        (4, 4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=LIMIT,
    )
    axes.set_xlabel("GiB/s, all ranks together; bars are medians, dots are rounds")


def _predictable(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "large")
    for name in ("save", "save_dcp_1", "save_dcp_2"):
        seconds = sorted(each[name] for each in rounds if name in each)
        shares = [number / len(seconds) for number in range(len(seconds) + 1)]
        dashes = "--" if name.endswith("2") else "-"
        axes.step(
            [seconds[0], *seconds],
            shares,
            dashes,
            where="post",
            label=LABELS[name],
            color=_colour(LABELS[name], dark=True),
        )
    axes.axhline(0.9, color=LIMIT, linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds of one save")
    axes.set_ylabel("share of saves done")
    axes.legend(frameon=False)


def _stall(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "stall")
    gib = latest["parts"]["stall"]["params"]["mib_per_rank"] / 1024  # type: ignore[index]
    names = ["stall_copy", "memcpy", *sorted(contenders(rounds, "dcp_async"))]
    seconds = {LABELS[name]: [each[name] / gib for each in rounds] for name in names}
    lazy = report.rounds_of(latest, "lazy")
    if lazy:
        gib = latest["parts"]["lazy"]["params"]["mib_per_rank"] / 1024  # type: ignore[index]
        seconds = {LABELS["lazy_blocked"]: [each["lazy_blocked"] / gib for each in lazy], **seconds}
    _bars(axes, seconds)
    axes.set_xlabel("seconds that training is blocked, per GiB and rank")


def _training(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "training")
    steps = range(1, len(rounds) + 1)
    axes.plot(steps, [each["without"] for each in rounds], "o-", color=THEIRS, label="without a save")
    axes.plot(steps, [each["with"] for each in rounds], "o-", color=OURS, label="with a lazy save")
    axes.set_ylim(bottom=0)
    axes.set_xticks(steps)
    axes.set_xlabel("turn")
    axes.set_ylabel("seconds of ten steps")
    axes.legend(frameon=False, loc="lower right")


def _tiny(axes: Axes, latest: Latest) -> None:
    rounds = report.rounds_of(latest, "tiny")
    names = ["tiny_save", "tiny_save_meta", "tiny_save_dcp", "tiny_load", "tiny_load_dcp"]
    _bars(axes, {LABELS[name]: [each[name] for each in rounds if name in each] for name in names})
    axes.set_xlabel("seconds")


def _bars(axes: Axes, values: dict[str, list[float]]) -> None:
    """Draw a bar at each median and a dot for each round; the first contender is at the top."""
    values = {label: each for label, each in values.items() if each}
    for place, (label, each) in enumerate(values.items()):
        axes.barh(place, median(each), color=_colour(label), height=0.62)
        axes.plot(each, [place] * len(each), "o", color="#333333", markersize=2.5, alpha=0.6)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlim(left=0)


def _colour(label: str, dark: bool = False) -> str:
    if "Holdfast" in label:
        return OURS
    return "#6b7280" if dark else THEIRS


PICTURES = (
    Picture("save", "How fast is a durable save?", "large", _save),
    Picture("predictable", "How predictable is a save?", "large", _predictable),
    Picture("load", "How fast is a load? (Holdfast checks every byte.)", "large", _load),
    Picture("stall", "How long does a background save block training?", "stall", _stall),
    Picture("training", "How much does a save every ten steps slow training down?", "training", _training),
    Picture("tiny", "How long do 20,000 tensors of 16 bytes take?", "tiny", _tiny),
)
"""In the order in which they are shown."""
