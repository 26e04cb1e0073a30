"""What compression saves, how fast it is and what it costs, beside its rivals: `python -m bench.compression`.

`make bench-compression` installs the rivals and runs it. The first run trains the state: a small GPT, kept at three
steps under the folder. Then each part runs in processes of its own, and writes its keys to
`bench/results/compression.json` when it ends; after Ctrl-C, `--only` runs the parts that are missing. `--table`
measures the ratios by type and kind of tensor instead, and brings docs/compression.md up to date.

Exit status: 0 if no key is below its floor, 1 if one is, 2 for a wrong call, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import compression_table, job, keyed, report
from bench.compression_parts import COMPRESSION_PARTS
from bench.compression_rivals import PACKAGES, missing
from bench.compression_state import FULL, QUICK, VARIABLE, Schedule, made
from bench.part import Part

RESULTS = report.RESULTS / "compression.json"

KEYS: dict[str, tuple[str, ...]] = {
    "ratios": ("ratio_state", "ratio_state_plain_weights", "ratio_vs_zipnn", "ratio_vs_dcp_zstd"),
    "ddp2": ("ratio_ddp2",),
    "hsdp": ("ratio_hsdp",),
    "fp32_fsdp2": ("ratio_fp32_fsdp2",),
    "codecs": ("encode_vs_zipnn", "encode_vs_zstd3", "decode_vs_zipnn"),
    "speed": ("save_on_vs_dcp_zstd", "load_on_vs_dcp_zstd"),
    "auto": ("auto_vs_raw_worst", "auto_vs_raw_slow"),
    "slowdown": ("coding_slowdown",),
    "reads": ("weights_only_read", "masters_only_read"),
    "reshard": ("coded_read_amplification",),
    "peak": ("compression_peak_extra_mib",),
    "paper": ("index_bytes_per_chunk_coded",),
}
"""What each part measures."""


def main(
    arguments: Sequence[str] | None = None,
    parts: Mapping[str, Part] = COMPRESSION_PARTS,
    run: keyed.Run = job.run,
    train: Callable[..., Path] = made,
    lacks: Callable[[], list[str]] = missing,
) -> int:
    """Measure the chosen keys; return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if lacking := lacks():
        parser.error(f"{', '.join(lacking)}: not installed; make bench-compression installs it, in its own environment")
    schedule = QUICK if chosen.quick else FULL
    if chosen.table:
        return _table(chosen.folder, schedule, chosen.json)
    names = keyed.parts_of(parser, chosen.only, parts, KEYS)

    def variables() -> dict[str, str]:
        return {VARIABLE: str(train(chosen.folder / "state", schedule).resolve())}

    if not keyed.measure_each([parts[name] for name in names], run, chosen, variables, PACKAGES):
        return 130
    latest = report.read(chosen.json)
    print("\n".join(report.lines(latest)))
    print(f"written to {chosen.json}; python -m bench --readme brings the pages up to date")
    return int(report.is_any_missed(latest, [key for name in names for key in KEYS[name]]))


def _table(folder: Path, schedule: Schedule, results: Path) -> int:
    """Measure the table of ratios, write and print it, and bring the page up to date."""
    rows = compression_table.measured(folder, schedule)
    report.write({"parts": {}, **report.read(results), "table": [list(row) for row in rows]}, results)
    print("\n".join(compression_table.lines(rows)))
    if schedule == FULL:
        compression_table.put_block(compression_table.PAGE, rows)
        print(f"written to {results} and {compression_table.PAGE}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compression", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keyed.add_arguments(parser, RESULTS)
    parser.add_argument("--table", action="store_true", help="measure ratios by type and kind of tensor")
    return parser


if __name__ == "__main__":
    sys.exit(main())
