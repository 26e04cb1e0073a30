"""Fuzz every target for an equal share of FUZZ_SECONDS (600), or the targets named; fail if one finds something."""

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
    """Fuzz one target; return whether nothing was found. What was found is kept."""
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
    said = done.stdout + done.stderr
    runs, pace = _number(said, "number_of_executed_units"), _number(said, "average_exec_per_sec")
    verdict = "ok" if done.returncode == 0 else f"FOUND SOMETHING (exit {done.returncode})"
    print(f"{name:16} {runs:>12,} runs {pace:>8,} a second  {verdict}", flush=True)
    if done.returncode:
        told = [line for line in said.splitlines() if not line.startswith("INFO: Instrumenting")]
        print("\n".join(told)[-4000:], flush=True)
    return done.returncode == 0


def _number(said: str, stat: str) -> int:
    found = re.search(rf"stat::{stat}:\s*(\d+)", said)
    return int(found[1]) if found else 0


def main() -> int:
    """Run; the exit status says whether something was found."""
    names = sys.argv[1:] or list(TARGETS)
    seconds = max(int(os.environ.get("FUZZ_SECONDS", "600")) // len(names), 1)
    print(f"{len(names)} targets, {seconds} s each; what is found is kept under {CRASHES}", flush=True)
    found = [name for name in names if not fuzzed(name, seconds)]
    print(f"found something in: {', '.join(found)}" if found else "nothing found", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
