"""The cost of the redo log in training, and the cost of a kill with the log: `python -m bench.differential`.

Each part runs in processes of its own, and writes its keys to `bench/results/differential.json` when it ends; after
Ctrl-C, `--only` runs the parts that are missing.

Exit status: 0 if no key is below its floor, 1 if one is, 2 for a wrong call, 130 after Ctrl-C. For `redo_overhead` and
`redo_overhead_coded` the upper end of the 95 % interval counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence

from bench import job, keyed, report
from bench.differential_parts import DIFFERENTIAL_PARTS
from bench.part import Part

RESULTS = report.RESULTS / "differential.json"

KEYS: dict[str, tuple[str, ...]] = {
    "overhead": ("redo_overhead", "base_stall_with_log"),
    "overhead_coded": ("redo_overhead_coded",),
    "boundary": ("boundary_ms_1000_parameters",),
    "records": ("record_ratio_fp32", "record_ratio_fp32_coded", "record_ratio_bf16_clipped_coded"),
    "kills": ("rpo_steps_worst",),
    "kills_short": ("rpo_seconds_p95",),
    "redo": ("redo_vs_step", "redo_peak_extra_mib"),
}
"""The keys of each part."""


def main(
    arguments: Sequence[str] | None = None,
    parts: Mapping[str, Part] = DIFFERENTIAL_PARTS,
    run: keyed.Run = job.run,
) -> int:
    """Measure the chosen keys; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.differential", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keyed.add_arguments(parser, RESULTS)
    chosen = parser.parse_args(arguments)
    names = keyed.parts_of(parser, chosen.only, parts, KEYS)
    if not keyed.measure_each([parts[name] for name in names], run, chosen):
        return 130
    latest = report.read(chosen.json)
    print("\n".join(report.lines(latest)))
    print(f"written to {chosen.json}; python -m bench --readme brings the pages up to date")
    return int(is_any_missed(latest, [key for name in names for key in KEYS[name]]))


def is_any_missed(latest: report.Latest, keys: Collection[str]) -> bool:
    """Return whether one of some keys is below its floor: processor times by the upper ends of their intervals."""
    parts: dict[str, dict[str, dict[str, list[float]]]] = latest["parts"]  # type: ignore[assignment]
    upper = dict(latest)
    for name, key in (("overhead", "redo_overhead"), ("overhead_coded", "redo_overhead_coded")):
        if interval := parts.get(name, {}).get("intervals", {}).get(key):
            upper[key] = interval[1]
    return report.is_any_missed(upper, keys)


if __name__ == "__main__":
    sys.exit(main())
