"""One rank of a training or of a measurement, in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from tests.integrations.kills import kill_in
from tests.integrations.run import Run
from tests.support.forked_processes import write_whole


def train(framework: str, spec: str) -> None:
    """Train as a spec says; leave an error as a file, for the table."""
    told = json.loads(Path(spec).read_text())
    results, rank = Path(told["results"]), os.environ["RANK"]
    kill = told["kill"]
    if kill is not None and int(rank) in kill["ranks"]:
        kill_in(kill["phase"], kill["save"], results / f"killed-{rank}")
    run = Run(Path(told["folder"]), told["keeper"], told["steps"], told["every"], told["resume"], results)
    _or_leave_error(results, lambda: importlib.import_module(f"tests.integrations.{framework}.training").train(run))


def measure(framework: str, spec: str) -> None:
    """Measure round after round; each is a line of the rank's file."""
    told = json.loads(Path(spec).read_text())
    results, rank = Path(told["results"]), os.environ["RANK"]

    def rounds() -> None:
        module = importlib.import_module(f"bench.integrations.{framework}")
        for number in range(told["rounds"]):
            times = module.round(Path(told["folder"]), number)
            with (results / f"rounds-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(times) + "\n")

    _or_leave_error(results, rounds)


def _or_leave_error(results: Path, call: object) -> None:
    assert callable(call)
    try:
        call()
    except BaseException as error:
        traceback.print_exc()
        said = {"error": type(error).__name__, "message": str(error)[:2000]}
        write_whole(results / f"error-{os.environ['RANK']}.json", json.dumps(said))
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of a broken process group keep the interpreter from its end.
        os._exit(1)
