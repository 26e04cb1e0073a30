"""Other systems' checkpoints, read in place and written, beside those systems' own tools: `make bench-interop`.

Everything is a process of its own, timed from its start, imports included, until it has loaded, or has ended and what
it wrote is durable, on files that the page cache has forgotten. Each contender runs in every round, in turn. What is
written goes to `bench/results/interop.json`.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import holdfast
from bench import conditions, report
from bench.foreign import SHAPES, Parameters
from bench.job import ROOT
from bench.part import Round, Spread, in_turn, spread_of, times_as_fast

RESULTS = report.RESULTS / "interop.json"
EXPORT_MEMORY_MIB = 512
"""The byte budget that our exports are given."""

EXPORT_OURS = """
import json, sys
from holdfast import api
source, target, budget_mib, depth = sys.argv[1:]

def exported(depth):
    if depth:
        return exported(depth - 1)
    api.export(source, target, to="safetensors", memory_bytes=int(budget_mib) << 20)

exported(int(depth))
# Not ru_maxrss, which counts what the process was before it became this program.
peak_kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"bench": 1, "peak_mib": int(peak_kib) / 1024}))
"""
"""A program of its own: our exports need no torch, which this module imports."""

STACK_DEPTHS = (0, 7, 14)
"""How many frames lie under each export. Python maps its stack in pieces of 16 KiB, and unmaps a piece that it leaves.
Code that calls back and forth at the end of a piece pays for that each time. Where the pieces end is chance: it
changes with each frame of the package. So a comparison takes the median over several depths."""

RANKS = {"zero1": 4, "zero1_tiny": 4, "dcp": 2, "dcp_hf": 2}
MASTER_PORT = "29517"
ME = [sys.executable, "-m", "bench.interop"]


def made(kind: str, folder: Path) -> Path:
    """Return a checkpoint of a kind; its own system writes it unless it exists already."""
    there = folder / kind
    if (there / "whole").exists():
        return there
    shutil.rmtree(there, ignore_errors=True)
    ranks = RANKS[kind]
    command = [sys.executable, "-m", "bench.foreign", kind, str(there)]
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **job, "MASTER_PORT": MASTER_PORT, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit(f"bench: {kind} could not be written; its error is above")
    (there / "whole").touch()
    return there


def environment() -> dict[str, str]:
    """Return the environment variables of every contender: DeepSpeed builds with tools beside this interpreter.

    Every package has its byte code, as after an installation: without write permission a source tree has none.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": ""}


class Contender:
    """A command, or several in sequence, and the folder that they write."""

    def __init__(self, *commands: Sequence[str | Path], writes: Path | None = None) -> None:
        self._commands, self._writes = commands, writes
        self.said: dict[str, float] = {}
        """What the last of them printed as JSON."""
        self.peak_mib = 0.0
        """The largest resident memory of any of their processes, in the last run."""

    def seconds(self, source: Path) -> float:
        """Run a contender on cold files; return the seconds until its load or its end, and until its output is durable.

        After a load a user trains, so the time of torch's exit does not count.
        """
        if self._writes is not None:
            shutil.rmtree(self._writes, ignore_errors=True)
            self._writes.parent.mkdir(parents=True, exist_ok=True)
        os.sync()
        conditions.forget_pages(source)
        self.peak_mib = 0.0
        start = time.perf_counter()
        for command in self._commands:
            self._run([str(each) for each in command])
        end = time.perf_counter()
        if self._writes is not None:
            _make_durable(self._writes)
        # The clock is the same in every process of a machine.
        return time.perf_counter() - end + self.said.get("loaded_at", end) - start

    def _run(self, command: list[str]) -> None:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        said, complaint = process.communicate()
        if process.returncode:
            raise SystemExit(f"bench: {' '.join(command)} failed:\n{complaint[-4000:]}")
        last = said.strip().splitlines()[-1:] or [""]
        self.said = json.loads(last[0]) if last[0].startswith('{"bench"') else {}
        self.peak_mib = max(self.peak_mib, self.said.get("peak_mib", 0.0))


def _make_durable(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def say(**found: float) -> None:
    """Print the result of a contender for the measuring process."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"bench": 1, "peak_mib": peak_mib, **found}), flush=True)


def load_ours(kind: str, source: str) -> None:
    """Fill a model and its optimizer from a DeepSpeed checkpoint, in place."""
    import torch

    start = time.perf_counter()
    model = Parameters(SHAPES[kind]())
    optimizer = torch.optim.AdamW(model.parameters())
    built = time.perf_counter() - start
    before = _bytes_read()
    loaded = holdfast.load(source, {"model": model, "optimizer": optimizer}, process_group=False)
    loaded_at = time.perf_counter()
    amplification = (_bytes_read() - before) / loaded.loaded_bytes
    say(
        loaded_at=loaded_at,
        read_amplification=amplification,
        loaded_bytes=loaded.loaded_bytes,
        built_seconds=built,
    )


def load_theirs(kind: str, source: str) -> None:
    """Fill a model and its moments from a universal folder, as `load_hp_checkpoint_state` does for one rank.

    This is less work than DeepSpeed's engine does: it makes no engine and looks for no partition.
    """
    import deepspeed  # noqa: F401 - nobody loads a universal checkpoint without it
    import torch

    start = time.perf_counter()
    model = Parameters(SHAPES[kind]())
    optimizer = torch.optim.AdamW(model.parameters())
    built = time.perf_counter() - start
    atoms = next(Path(source).glob("global_step*")) / "zero"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = {
                key: torch.load(atoms / name / f"{key}.pt", weights_only=False)["param"]  # noqa: TID251 - as DeepSpeed reads it
                for key in ("fp32", "exp_avg", "exp_avg_sq")
            }
            parameter.copy_(found.pop("fp32").view_as(parameter))
            optimizer.state[parameter] = {key: each.view_as(parameter).clone() for key, each in found.items()}
    say(loaded_at=time.perf_counter(), built_seconds=built)


def consolidate(source: str, target: str) -> None:
    """Merge the files of DCP's Hugging Face writer with torch's own function."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names: set[str] = set()
    for path in Path(source).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    Path(target).mkdir(parents=True, exist_ok=True)
    consolidate_safetensors_files(source, target, dict.fromkeys(names, 1), num_threads=os.cpu_count() or 1)
    say()


def _bytes_read() -> int:
    """Return the bytes that this process has read from the kernel so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, count = line.partition(": ")
        if name == "rchar":
            return int(count)
    raise AssertionError("the kernel counts no reads")


def our_load(kind: str, source: Path) -> Contender:
    """Return Holdfast's load of a DeepSpeed checkpoint in place."""
    return Contender([*ME, "--work", "load_ours", kind, source])


def our_export(source: Path, target: Path, depth: int = 0) -> Contender:
    """Return Holdfast's export to safetensors, called under `depth` frames."""
    arguments = [source, target, str(EXPORT_MEMORY_MIB), str(depth)]
    return Contender([sys.executable, "-c", EXPORT_OURS, *arguments], writes=target)


def measure_ours(folder: Path, times: int) -> dict[str, float]:
    """Measure Holdfast alone; return the median of each key."""
    found: list[Round] = []
    for turn in range(times):
        this: Round = {}
        for kind in SHAPES:
            load = our_load(kind, made(kind, folder))
            this[f"load_{kind}_seconds"] = load.seconds(folder / kind) - load.said["built_seconds"]
            this[f"load_{kind}_read_amplification"] = load.said["read_amplification"]
        for kind in ("zero1", "dcp"):
            depth = STACK_DEPTHS[turn % len(STACK_DEPTHS)]
            export = our_export(made(kind, folder), folder / "exported", depth)
            this[f"export_{kind}_seconds"] = export.seconds(folder / kind)
            this[f"export_{kind}_peak_mib"] = export.peak_mib
        found.append(this)
    shutil.rmtree(folder / "exported", ignore_errors=True)
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def measure_loads(kind: str, folder: Path, rounds: int) -> list[Round]:
    """Measure the time to the first usable load of a DeepSpeed checkpoint."""
    source, converted = made(kind, folder), folder / "universal"
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    tag = next(source.glob("global_step*"))
    theirs = Contender(
        [*convert, "--input_folder", tag, "--output_folder", converted / tag.name],
        [*ME, "--work", "load_theirs", kind, converted],
        writes=converted,
    )
    ours = our_load(kind, source)
    found = []
    for number in range(rounds):
        this: Round = {}
        for name, each in in_turn([("ours", ours), ("ds_to_universal", theirs)], number):
            # Whoever trains has built model and optimizer anyhow, whatever they are filled from.
            this[name] = each.seconds(source) - each.said["built_seconds"]
        this["read_amplification"] = ours.said["read_amplification"]
        found.append(this)
        print(f"    {kind}: loaded in place {this['ours']:.1f} s, converted and loaded {this['ds_to_universal']:.1f} s")
    shutil.rmtree(converted, ignore_errors=True)
    return found


def measure_exports(
    kind: str, folder: Path, rounds: int, rivals: Callable[[Path], dict[str, Contender]]
) -> list[Round]:
    """Measure exports to safetensors beside the rivals'."""
    source, target = made(kind, folder), folder / "exported"
    ours = our_export(source, target)
    found = []
    for number in range(rounds):
        this: Round = {}
        for name, each in in_turn([("ours", ours), *rivals(target).items()], number):
            this[name] = each.seconds(folder)
        this["peak_over_budget_mib"] = ours.peak_mib - EXPORT_MEMORY_MIB
        found.append(this)
        said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in this.items() if name.isidentifier())
        print(f"    export of {kind}: {said}")
    shutil.rmtree(target, ignore_errors=True)
    return found


def main() -> None:
    """Measure everything and write the results; with `--work`, run as one contender."""
    parser = argparse.ArgumentParser(prog="python -m bench.interop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "interop")
    parser.add_argument("--ours", type=int, metavar="TIMES", help="measure only Holdfast; print the medians as JSON")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        name, *arguments = chosen.work
        WORKS[name](*arguments)
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    compileall.compile_dir(Path(holdfast.__file__).parent, quiet=1)
    if chosen.ours:
        print(json.dumps(measure_ours(chosen.folder, chosen.ours)))
        return
    zero, dcp_hf = made("zero1", chosen.folder), made("dcp_hf", chosen.folder)
    dcp = made("dcp", chosen.folder)
    python = sys.executable

    def zero_to_fp32(target: Path) -> dict[str, Contender]:
        script = [python, zero / "zero_to_fp32.py", zero, target, "--safe_serialization"]
        return {"zero_to_fp32": Contender(script, writes=target)}

    def dcp_consolidate(target: Path) -> dict[str, Contender]:
        to_torch = [python, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", dcp, target / "all.pt"]
        merge = [*ME, "--work", "consolidate", dcp_hf, target]
        return {
            "dcp_to_torch": Contender(["mkdir", target], to_torch, writes=target),
            "dcp_consolidate": Contender(merge, writes=target),
        }

    loads = measure_loads("zero1", chosen.folder, chosen.rounds)
    tiny = measure_loads("zero1_tiny", chosen.folder, chosen.rounds)
    from_zero = measure_exports("zero1", chosen.folder, chosen.rounds, zero_to_fp32)
    from_dcp = measure_exports("dcp", chosen.folder, chosen.rounds, dcp_consolidate)
    keys = {
        "index_vs_ds_to_universal": times_as_fast(loads, "ours", ["ds_to_universal"]),
        "index_vs_ds_to_universal_tiny": times_as_fast(tiny, "ours", ["ds_to_universal"]),
        "export_vs_zero_to_fp32": times_as_fast(from_zero, "ours", ["zero_to_fp32"]),
        "export_vs_dcp_consolidate": times_as_fast(from_dcp, "ours", ["dcp_to_torch", "dcp_consolidate"]),
        "export_peak_over_budget_mib": _spread(from_zero + from_dcp, "peak_over_budget_mib"),
        "read_amplification": _spread(loads, "read_amplification"),
    }
    write(keys, {"loads": loads, "tiny": tiny, "from_zero": from_zero, "from_dcp": from_dcp})


def _spread(rounds: Sequence[Round], name: str) -> Spread:
    return spread_of([each[name] for each in rounds])


def write(keys: dict[str, Spread], rounds: dict[str, list[Round]]) -> None:
    """Write the results and show them."""
    flat: dict[str, object] = {}
    for key, spread in keys.items():
        values = (round(value, 4) for value in asdict(spread).values())
        flat |= dict(zip(report.names_of(key), values, strict=True))
    versions = {"deepspeed": report.version_of("deepspeed"), **report.software()}
    RESULTS.write_text(json.dumps({**flat, "with": versions, "rounds": rounds}, indent=1) + "\n")
    print("\n".join(line for line in report.lines(flat)))
    print(f"written to {RESULTS.relative_to(ROOT)}; python -m bench --readme brings the pages up to date")


WORKS: dict[str, Callable[..., None]] = {
    "load_ours": load_ours,
    "load_theirs": load_theirs,
    "consolidate": consolidate,
}
"""What a contender's process does, by the name that `--work` takes."""

if __name__ == "__main__":
    main()
