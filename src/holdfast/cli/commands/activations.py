"""`holdfast activations`: a plan of `holdfast.activations`, and other budgets for the same model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.activations import ActivationPlan, PlanSummary, load_plan
from holdfast.cli.arguments import AsJson
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, print_result, stderr
from holdfast.errors import InvalidError, UnavailableError, printable, shown_bytes

_MIB = 2**20


def activations(
    path: Annotated[str, typer.Argument(metavar="PLAN", help="A file that plan.save() wrote.")],
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="BUDGET", help="Solve for another budget: 8GiB, 40% or bytes. Needs scipy."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw slowdown and memory: .png, .svg, .pdf. Needs matplotlib."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the ops that a plan keeps, packs, runs again and skips, their price, and the curve of other budgets."""
    with ended_well():
        plan = load_plan(path)
        if budget is not None:
            plan = plan.resolve(budget=f"{budget}B" if budget.isdecimal() else budget)
        if plot is not None:
            draw_plan(plan.summary(), plot)
            stderr().line(f"{printable(plot)}: written", style="dim")
        print_result(plan, _show, lambda each: asdict(each.summary()), as_json=as_json)


def _show(screen: Screen, plan: ActivationPlan) -> None:
    summary = plan.summary()
    for line in plan.explain().splitlines():
        screen.line(line)
    screen.heading("other budgets")
    rows = []
    for point in summary.curve:
        share = f"{100 * point.peak_bytes / max(summary.keep_all_peak_bytes, 1):.0f} %"
        fits = "within the budget" if point.peak_bytes <= summary.budget_bytes else ""
        rows.append((shown_bytes(point.peak_bytes), share, f"× {point.slowdown:.3f}", fits))
    screen.table((">PEAK", ">SHARE", ">STEP TIME", ""), rows)


def draw_plan(summary: PlanSummary, path: str) -> None:
    """Write the plot of a plan to a file.

    Args:
        summary: The plan.
        path: The file. The end of the name chooses the format.
    Raises:
        InvalidError: matplotlib is missing, or has no such format.
        UnavailableError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidError("--plot needs matplotlib; run: pip install 'holdfast[activations]'") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curve, step = figure.subplots(1, 2)
    peaks, slowdowns = [each.peak_bytes / _MIB for each in summary.curve], [each.slowdown for each in summary.curve]
    curve.plot(peaks, slowdowns, "o-", markersize=4, label="other budgets, predicted")
    curve.plot(summary.predicted_peak_bytes / _MIB, summary.predicted_slowdown, "s", label="this plan, predicted")
    if summary.measured_peak_bytes:
        curve.plot(summary.measured_peak_bytes / _MIB, summary.measured_slowdown, "x", label="this plan, measured")
    curve.axvline(summary.budget_bytes / _MIB, color="gray", linestyle="--", label="budget")
    curve.set(xlabel="peak, MiB", ylabel="step time ÷ keeping everything", title="Slowdown against peak")
    curve.legend()
    step.plot([each.bytes / _MIB for each in summary.moments], drawstyle="steps-mid", label="predicted memory")
    step.axvline(len(summary.moments) / 2 - 0.5, color="gray", linewidth=0.5)
    step.axhline(summary.budget_bytes / _MIB, color="gray", linestyle="--", label="budget")
    step.set(xlabel="units: forward, then backward", ylabel="MiB", title="Memory of a step", ylim=(0, None))
    step.legend()
    try:
        figure.savefig(path, dpi=100)
    except ValueError as error:
        raise InvalidError(
            f"--plot {path[:200]!r}: {error}; expected a name that ends in .png, .svg or .pdf"
        ) from error
    except OSError as error:
        raise UnavailableError(f"{path}: the plot cannot be written: {error}") from error
