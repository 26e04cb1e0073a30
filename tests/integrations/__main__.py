"""`make integrations FRAMEWORK=NAME`: tests, kills and measurements of one integration with the real framework.

Leaves `bench/results/integrations/NAME.json`. The same command goes on after Ctrl-C with the part that was interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.integrations import table
from tests.integrations.kills import PHASES
from tests.integrations.measure import measure
from tests.support.forked_processes import environment, write_whole

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "integrations"
PACKAGES = {
    "accelerate": ("accelerate",),
    "dcp": (),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan", "torch_checkpointing"),
    "transformers": ("transformers", "accelerate", "peft"),
}
"""What a result names with its version, beside torch and Holdfast."""

IMPORTS = {
    "accelerate": "accelerate",
    "dcp": "",
    "lightning": "lightning",
    "torchtitan": "tests.integrations.torchtitan.on_cpu",
    "transformers": "transformers.trainer",
}
"""What a rank has imported when it begins: by a process that then forks, since it takes up to ten seconds."""

PARTS = ("tests", "examples", "kills", "ranks", "measure")


def main() -> int:
    """Do the parts that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.integrations", description=__doc__)
    parser.add_argument("framework", choices=sorted(PACKAGES))
    parser.add_argument("--only", default="", help=f"parts, by comma: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="two phases, small states: a trial that proves nothing")
    asked = parser.parse_args()
    parts = tuple(filter(None, asked.only.split(","))) or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    if asked.quick:
        os.environ["QUICK"] = "1"
    os.environ["FORKED_IMPORTS"] = IMPORTS[asked.framework]
    # A process that forks has one thread, and Arrow, which torchtitan imports, would start another.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    work = _Work(asked.framework, quick=asked.quick)
    try:
        well = [work.do(part) for part in parts]
    except KeyboardInterrupt:
        print(f"integrations: interrupted; the same command goes on with what is missing of {asked.framework}")
        return 130
    if not asked.quick and work.is_complete:
        work.publish()
    return 0 if all(well) else 1


class _Work:
    """The parts of one framework, each kept when it is done."""

    def __init__(self, framework: str, *, quick: bool) -> None:
        self._framework, self._quick = framework, quick
        self._folder = ROOT / "runs" / "integrations" / f"{framework}{'-quick' if quick else ''}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kept = self._folder / "done.json"
        self._done: dict[str, object] = json.loads(self._kept.read_text()) if self._kept.exists() else {}
        if self._done.get("with") != self._versions():
            self._done = {"with": self._versions()}

    def do(self, part: str) -> bool:
        """Do a part unless it is done; return whether all of it went as it must."""
        if part in self._done:
            print(f"{self._framework}: {part}: done before, at {self._done[part]['commit']}")  # type: ignore[index]
            return True
        began = time.monotonic()
        scratch = self._folder / part
        shutil.rmtree(scratch, ignore_errors=True)
        is_well, found = {
            "tests": self._tests,
            "examples": self._examples,
            "kills": self._kills,
            "ranks": self._ranks,
            "measure": self._measure,
        }[part](scratch)
        print(f"{self._framework}: {part}: {'passed' if is_well else 'FAILED'} in {time.monotonic() - began:.0f} s")
        sys.stdout.flush()
        if is_well:
            self._done[part] = {"commit": _commit(), "found": found}
            write_whole(self._kept, json.dumps(self._done))
            shutil.rmtree(scratch, ignore_errors=True)
        return is_well

    @property
    def is_complete(self) -> bool:
        """Whether all parts are done; each is kept with the commit at which it was."""
        return all(part in self._done for part in PARTS)

    def publish(self) -> None:
        """Write the result, and forget what was kept."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        document = {"framework": self._framework, "date": datetime.now(UTC).date().isoformat(), **self._done}
        path = RESULTS / f"{self._framework}.json"
        write_whole(path, json.dumps(document, indent=1) + "\n")
        path.chmod(0o644)
        shutil.rmtree(self._folder)
        print(f"{self._framework}: results in {path.relative_to(ROOT)}")

    def _versions(self) -> dict[str, str]:
        names = ("torch", *PACKAGES[self._framework])
        versions = {name: importlib.metadata.version(name) for name in names}
        return {**versions, "python": platform.python_version(), "cores": str(os.cpu_count())}

    def _tests(self, scratch: Path) -> tuple[bool, object]:
        folder = f"tests/integrations/{self._framework}"
        # As in `make test`, but nothing that a framework deprecates in itself fails a test of ours.
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-W", "default", folder]
        scratch.mkdir(parents=True)
        report = scratch / "report.xml"
        status = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment(), check=False).returncode
        passed = _counted(report) if status == 0 else 0
        return passed > 0, {"passed": passed}

    def _examples(self, scratch: Path) -> tuple[bool, object]:
        ran = []
        for path in sorted((ROOT / "examples").glob(f"{_PREFIX.get(self._framework, self._framework)}_*.py")):
            scratch.mkdir(parents=True, exist_ok=True)
            on_cpu = f"tests.integrations.{self._framework}.on_cpu"
            first = ["-c", f"import {on_cpu}; import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"]
            needs = (ROOT / "tests" / "integrations" / self._framework / "on_cpu.py").exists()
            command = [sys.executable, *_launcher(self._framework), *(first if needs else [str(path)])]
            for count in (1, 2):  # The second time it resumes.
                ended = subprocess.run(command, cwd=scratch, env=environment(), check=False, timeout=300)
                if ended.returncode:
                    print(f"{path.name}: run {count} ended with {ended.returncode}")
                    return False, {}
            ran.append(path.name)
        return bool(ran), {"ran": ran}

    def _kills(self, scratch: Path) -> tuple[bool, object]:
        rows = []
        phases = ("writing", "publishing") if self._quick else tuple(PHASES)
        kills = table.Table(self._framework, scratch)
        for keeper in ("holdfast", "own"):
            for row in kills.rows(keeper, phases):
                rows.append(table.to_json(row))
                print(f"{self._framework}: {table.as_markdown([table.to_json(row)]).splitlines()[-1]}", flush=True)
        return all(table.is_well(table.Row(**row)) for row in rows if row["keeper"] == "holdfast"), rows  # type: ignore[arg-type]

    def _ranks(self, scratch: Path) -> tuple[bool, object]:
        found = table.Table(self._framework, scratch).on_other_ranks()
        print(f"{self._framework}: {found}")
        return table.are_well(found), found

    def _measure(self, scratch: Path) -> tuple[bool, object]:
        found = measure(self._framework, scratch, rounds=2 if self._quick else 9)
        print(f"{self._framework}: {json.dumps(found['keys'], indent=1)}")
        return True, found


_PREFIX = {"transformers": "trainer"}
"""How the names of the examples of a framework begin, where it is not the name."""


def _launcher(framework: str) -> list[str]:
    """Return what starts the ranks of an example: that of DCP has no launcher of its own."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if framework == "dcp" else []


def _counted(report: Path) -> int:
    import xml.etree.ElementTree as tree

    suites = tree.parse(report).getroot().iter("testsuite")
    return sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
