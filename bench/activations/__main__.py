"""Training within a budget of memory, beside plain training and its rivals: `python -m bench.activations`.

Each part runs in a process of its own, and writes its keys to `bench/results/activations.json` when it ends; after
Ctrl-C, `--only` runs the parts that are missing.

Exit status: 0 if no key is below its floor, 1 if one is or is missing, 2 for a wrong call, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence

from bench import job, keyed, plots, report
from bench.activations.parts import ACTIVATION_PARTS
from bench.activations.pictures import PICTURES
from bench.part import Part

RESULTS = report.RESULTS / "activations.json"

_EXACT = (
    "overhead_e0_at_62",
    "overhead_e0_at_42",
    "overhead_e0_at_full_peak",
    "slowdown_vs_sac",
    "slowdown_error_p95",
    "slowdown_error_of_plain",
    "fit_steps",
)

KEYS: dict[str, tuple[str, ...]] = {
    "peaks": ("peak_error_worst", "over_budget"),
    "exact": _EXACT,
    "exact_modern": tuple(f"{key}_modern" for key in _EXACT),
    "bounded": ("overhead_e02_at_42", "overhead_e25_at_38", "gradient_error_per_bound"),
    "packs": ("q8_ratio", "q4_ratio", "bound_worst"),
    "solver": ("solve_seconds_256",),
    "hooks": ("hook_overhead",),
    "loss": ("loss_change_e02", "loss_change_e25"),
}
"""The keys of each part."""

MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""The C library keeps freed memory: page faults would be a cost of whichever way frees most."""


def main(
    arguments: Sequence[str] | None = None,
    parts: Mapping[str, Part] = ACTIVATION_PARTS,
    run: keyed.Run = job.run,
) -> int:
    """Measure the chosen keys; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.activations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keyed.add_arguments(parser, RESULTS)
    chosen = parser.parse_args(arguments)
    names = keyed.parts_of(parser, chosen.only, parts, KEYS)
    if not keyed.measure_each([parts[name] for name in names], run, chosen, lambda: MEMORY, ["scipy"]):
        return 130
    latest = report.read(chosen.json)
    if not chosen.quick:
        plots.draw_all(latest, PICTURES)
    print("\n".join(report.lines(latest)))
    print(f"written to {chosen.json}; python -m bench --readme brings the pages up to date")
    return int(is_any_missed(latest, [key for name in names for key in KEYS[name]]))


def is_any_missed(latest: report.Latest, keys: Collection[str]) -> bool:
    """Return whether one of some keys is missing or below its floor.

    A prediction may be wrong by as much as two measurements of plain training differ, too.
    """
    if missing := [key for key in keys if key not in latest]:
        print(f"no plan for {', '.join(missing)}; the notes say why")
        return True
    forgiven = dict(latest)
    for key in ("slowdown_error_p95", "slowdown_error_p95_modern"):
        if key in keys:
            forgiven[key] = float(latest[key]) - float(latest[key.replace("p95", "of_plain")])  # type: ignore[arg-type]
    return report.is_any_missed(forgiven, keys)


if __name__ == "__main__":
    sys.exit(main())
