"""`holdfast activations`: a plan of `holdfast.activations`, and other budgets for the same model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.activations import ActivationPlan, load_plan
from holdfast.cli.arguments import AsJson
from holdfast.cli.exit_status import ended_well
from holdfast.cli.plan_plot import draw_plan
from holdfast.cli.screen import Screen, print_result, stderr
from holdfast.errors import printable, shown_bytes


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
