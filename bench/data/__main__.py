"""The cost of exact positions of data, and resumes on other ranks beside rivals: `python -m bench.data`.

Each part runs in a process of its own, and writes its keys to `bench/results/data.json` when it ends; after Ctrl-C,
`--only` runs the parts that are missing. Resumes beside rivals are rows of a table, in the notes of the part `rivals`.

Exit status: 0 if no key is below its floor, 1 if one is, 2 for a wrong call, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from bench import job, keyed, report
from bench.data.parts import DATA_PARTS
from bench.data.rivals import PACKAGES
from bench.part import Part

RESULTS = report.RESULTS / "data.json"

KEYS: dict[str, tuple[str, ...]] = {
    "loader_1k": ("loader_vs_plain_1k", "batches_vs_plain_1k"),
    "loader_100k": ("loader_vs_plain_100k", "batches_vs_plain_100k"),
    "first_batch": ("first_batch_large_vs_small",),
    "order": ("order_peak_mib",),
    "state": ("state_bytes",),
    "saves": ("save_with_data_vs_without",),
    "rivals": (),
}
"""The keys of each part."""


def main(
    arguments: Sequence[str] | None = None,
    parts: Mapping[str, Part] = DATA_PARTS,
    run: keyed.Run = job.run,
) -> int:
    """Measure the chosen keys; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keyed.add_arguments(parser, RESULTS)
    chosen = parser.parse_args(arguments)
    names = keyed.parts_of(parser, chosen.only, parts, KEYS)
    if not keyed.measure_each([parts[name] for name in names], run, chosen, packages=PACKAGES):
        return 130
    latest = report.read(chosen.json)
    print("\n".join(report.lines(latest)))
    print(f"written to {chosen.json}; python -m bench --readme brings the pages up to date")
    return int(report.is_any_missed(latest, [key for name in names for key in KEYS[name]]))


if __name__ == "__main__":
    sys.exit(main())
