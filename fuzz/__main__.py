"""Fuzz all targets, or the named ones, for equal shares of FUZZ_SECONDS (600); fail if one finds an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.seeds import seeds_of, words_of
from fuzz.targets import TARGETS

CRASHES = Path(__file__).parent / "crashes"
INPUT_BYTES_MAX = 8192
MEMORY_MIB_MAX = 2048
ONE_INPUT_SECONDS_MAX = 10


def fuzzed(name: str, seconds: int) -> bool:
    """Fuzz one target; return whether it found no error. Inputs that cause errors are kept in `CRASHES`."""
    CRASHES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
        corpus, dictionary = Path(folder) / "corpus", Path(folder) / "words"
        corpus.mkdir()
        for number, seed in enumerate(seeds_of(name)):
            (corpus / f"seed-{number}").write_bytes(seed)
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-rss_limit_mb={MEMORY_MIB_MAX}",
            f"-timeout={ONE_INPUT_SECONDS_MAX}",
            f"-artifact_prefix={CRASHES}/{name}-",
            "-print_final_stats=1",
            "-verbosity=1",
        ]
        if words := words_of(name):
            dictionary.write_text("".join(f'"{word}"\n' for word in words))
            options.append(f"-dict={dictionary}")
        command = [sys.executable, "-m", "fuzz.one", name, *options, str(corpus)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = done.stdout + done.stderr
    runs, pace = _number(output, "number_of_executed_units"), _number(output, "average_exec_per_sec")
    verdict = "ok" if done.returncode == 0 else f"FOUND AN ERROR (exit {done.returncode})"
    print(f"{name:16} {runs:>12,} runs {pace:>8,} a second  {verdict}", flush=True)
    if done.returncode:
        lines = [line for line in output.splitlines() if not line.startswith("INFO: Instrumenting")]
        print("\n".join(lines)[-4000:], flush=True)
    return done.returncode == 0


def _number(output: str, stat: str) -> int:
    match = re.search(rf"stat::{stat}:\s*(\d+)", output)
    return int(match[1]) if match else 0


def main() -> int:
    """Fuzz the targets; return 1 if one of them found an error, else 0."""
    names = sys.argv[1:] or list(TARGETS)
    seconds = max(int(os.environ.get("FUZZ_SECONDS", "600")) // len(names), 1)
    print(f"{len(names)} targets, {seconds} s each; inputs that cause errors are kept in {CRASHES}", flush=True)
    failed = [name for name in names if not fuzzed(name, seconds)]
    print(f"found errors in: {', '.join(failed)}" if failed else "no errors found", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
