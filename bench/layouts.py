"""Loads through a layout beside plain loads of the same bytes: `make bench-interop ONLY=layouts`.

Each round runs all contenders, one after the other, in turn. Ratios are lower is better; the limit of a cut or a
transposition is one more copy in memory, that of names alone is 1. Results go to `bench/results/interop.json`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from bench import report
from bench.conditions import forget_pages
from bench.job import ROOT
from bench.part import Round, Spread, in_turn, spread_of, times_as_fast
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.layout import views_of

RESULTS = report.RESULTS / "interop.json"
FOLLOW = 'layout = 1\nfollow = [["m.{}", "m.{}"]]\n'
NAMES = FOLLOW + '[[rule]]\nfrom = "{x:*}"\nto = "renamed.{x}"\n'
QKV = (
    FOLLOW
    + '[[rule]]\nfrom = "{layer:int}"\nsections = { dim = 0, repeat = 8, parts = [\n'
    + ",\n".join(
        f'{{ length = {rows}, to = "{{layer}}.{part}" }}' for part, rows in (("q", 512), ("k", 128), ("v", 128))
    )
    + "] }\n"
)
TRANSPOSED = FOLLOW + '[[rule]]\nfrom = "{x}"\ntranspose = true\nto = "{x}"\n'
EXPERTS = """
layout = 1
follow = [["optimizer.state.{}.{k:exp_avg|exp_avg_sq}", "optimizer.state.{}.{k}"], ["model.{}", "model.{}"]]
[[rule]]
from = "layers.{layer:int}.mlp.experts.{expert:int}.{what:gate_proj|up_proj}.weight"
join = { dim = 0, by = "what" }
stack = { dim = 0, by = "expert" }
to = "layers.{layer}.mlp.experts.gate_up_proj"
[[rule]]
from = "layers.{layer:int}.mlp.experts.{expert:int}.down_proj.weight"
stack = { dim = 0, by = "expert" }
to = "layers.{layer}.mlp.experts.down_proj"
"""
EXPORT_MIB = 512
EXPORT = """
import sys
from holdfast import api
from holdfast import Layout
source, target, rules, budget = sys.argv[1:]
api.export(source, target, to="safetensors", memory_bytes=int(budget) << 20, layout=Layout(rules))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

PYTHON_WITH_TRANSFORMERS = ROOT / ".venv-interop" / "bin" / "python"

State = dict[str, torch.Tensor]


def seconds(act: Callable[[], object]) -> float:
    """Return how long a call takes; the collector runs before, not in it."""
    gc.collect()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def loads(
    folder: Path, name: str, stored: State, made: State, rules: str, rounds: int, *, cold: bool = False
) -> list[Round]:
    """Measure a plain load of stored tensors, and a load of the same bytes through a layout."""
    path = folder / name
    holdfast.save(path, {"m": stored})
    layout = holdfast.Layout(rules)
    plain: State = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    contenders = {
        "plain": lambda: holdfast.load(path, {"m": plain}),
        "layout": lambda: holdfast.load(path, {"m": made}, layout=layout),
    }
    found = []
    for number in range(-1, rounds):  # The first round warms files and memory.
        this: Round = {}
        for each, act in in_turn([*contenders.items()], number):
            if cold:
                forget_pages(path)
            this[each] = seconds(act)
        if number >= 0:
            found.append(this)
    shutil.rmtree(path)
    return found


def lowering(rounds: int) -> list[Round]:
    """Measure lowering and proving 61 layers of 256 experts with moments, and reading their names as JSON."""
    specs = {}
    for layer in range(61):
        for expert in range(256):
            for what, shape in (("gate_proj", (2048, 7168)), ("up_proj", (2048, 7168)), ("down_proj", (7168, 2048))):
                name = f"layers.{layer}.mlp.experts.{expert}.{what}.weight"
                moments = (f"optimizer.state.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq"))
                specs |= {each: TensorSpec(each, "bfloat16", shape) for each in (f"model.{name}", *moments)}
    text = json.dumps({name: [spec.dtype, spec.global_shape] for name, spec in specs.items()})
    layout = holdfast.Layout(EXPERTS)
    found = []
    for number in range(rounds):
        contenders = {
            "json": lambda: json.loads(text),
            "lowered": lambda: views_of([layout], specs, {}, {}, lambda _: None),
        }
        found.append({name: seconds(act) for name, act in in_turn([*contenders.items()], number)})
    return found


def measured(folder: Path, rounds: int) -> dict[str, list[Round]]:
    """Measure everything; return the rounds by part."""

    def rows(count: int, *shape: int) -> State:
        return {str(n): torch.rand(*shape) for n in range(count)}

    large, tiny = rows(16, 4096, 4096), rows(5000, 64)
    found = {
        "rename": loads(
            folder, "rename", large, {f"renamed.{n}": torch.zeros(4096, 4096) for n in large}, NAMES, rounds
        ),
        "tiny": loads(folder, "tiny", tiny, {f"renamed.{n}": torch.zeros(64) for n in tiny}, NAMES, rounds),
        "transpose": loads(folder, "transpose", large, {n: torch.zeros(4096, 4096) for n in large}, TRANSPOSED, rounds),
    }
    del large, tiny
    fused = rows(10, 6144, 4096)
    parts = {"q": 4096, "k": 1024, "v": 1024}
    made = {f"{n}.{part}": torch.zeros(count, 4096) for n in fused for part, count in parts.items()}
    found["qkv"] = loads(folder, "qkv", fused, made, QKV, rounds)
    found["qkv_cold"] = loads(folder, "qkv", fused, made, QKV, rounds, cold=True)
    holdfast.save(folder / "export", {"m": fused})
    del made, fused
    found["export"] = []
    for _ in range(3):
        command = [sys.executable, "-c", EXPORT, folder / "export", folder / "out", QKV, str(EXPORT_MIB)]
        peak_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found["export"].append({"over_budget_mib": peak_kib / 1024 - EXPORT_MIB})
        shutil.rmtree(folder / "out")
    found["lower"] = lowering(rounds)
    if PYTHON_WITH_TRANSFORMERS.exists():
        from bench import megatron_script

        found["megatron_to_hf"] = megatron_script.measured(folder, rounds, str(PYTHON_WITH_TRANSFORMERS))
    else:
        print("megatron_to_hf_vs_script: not measured; `make interop` makes the environment with Transformers")
    return found


def keys_of(rounds: dict[str, list[Round]]) -> dict[str, Spread]:
    """Return the keys of all parts."""
    named = {
        "layout_rename_vs_plain": "rename",
        "layout_rename_vs_plain_tiny": "tiny",
        "layout_qkv_vs_plain": "qkv",
        "layout_transpose_vs_plain": "transpose",
        "layout_qkv_cold_vs_plain": "qkv_cold",
    }
    keys = {key: spread_of([each["layout"] / each["plain"] for each in rounds[part]]) for key, part in named.items()}
    keys["layout_lower_vs_json"] = spread_of([each["lowered"] / each["json"] for each in rounds["lower"]])
    keys["export_layout_peak_mib"] = spread_of([each["over_budget_mib"] for each in rounds["export"]])
    if "megatron_to_hf" in rounds:
        keys["megatron_to_hf_vs_script"] = times_as_fast(rounds["megatron_to_hf"], "ours", ["script"])
    return keys


def main() -> None:
    """Measure, and put the keys into the results of the other parts."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        rounds = measured(Path(folder), 3 if os.environ.get("QUICK") else 7)
    keys = keys_of(rounds)
    results = json.loads(RESULTS.read_text())
    flat = report.columns_of(keys)
    head = {name: value for name, value in results.items() if name not in ("with", "rounds")}
    both = {**results["rounds"], "layouts": rounds}
    RESULTS.write_text(json.dumps({**head, **flat, "with": results["with"], "rounds": both}, indent=1) + "\n")
    for key, spread in keys.items():
        print(f"{key}: {spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})")


if __name__ == "__main__":
    main()
