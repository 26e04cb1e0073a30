"""The plot of a plan: slowdown against peak, and the memory of one step."""

from __future__ import annotations

from holdfast.activations import PlanSummary
from holdfast.errors import InvalidError, UnavailableError

_MIB = 2**20


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
