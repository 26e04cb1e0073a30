"""Real ranks go on with the very next sample: killed, on meshes, and by their losses."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.jobs.data_cases import EPOCHS, LOSS_STEPS, MESHES, STEPS, N, losses, weights_of
from tests.support.gloo_worlds import Case, Launch, Results, run_world

pytestmark = pytest.mark.long

CASES = "tests.distributed.jobs.data_cases"
LIVES = int(os.environ.get("DATA_RANK_LIVES", "3"))
IS_FULL = LIVES > 3
KINDS = ("plain", "stateful", "loader", "datasets")
WORKERS = (0, 1, 3)


# ------------------------------------------------------------------------------------------------- lives


@pytest.mark.parametrize("life", range(LIVES))
def test_a_killed_run_trains_every_sample_once_along_its_lineage(life: int, tmp_path: Path) -> None:
    """1, 4, 3, 2 ranks, one of them or a worker killed at a random time, until both epochs are trained."""
    drawn = random.Random(life)
    kind, workers, differential = KINDS[(life + life // 4) % 4], WORKERS[life % 3], life % 2 == 1
    if kind in ("plain", "stateful") and life < 3:
        workers = 1
    log, sizes, kills = tmp_path / "log", [1, 4, 3, 2], 0
    for launch in range(40):
        size = sizes[launch % 4]
        arguments = {"root": str(tmp_path / "run"), "kind": kind, "workers": workers, "log": str(log), "launch": launch}
        case = Case(f"{CASES}:trained", arguments | {"differential": differential}, "trained")
        with Launch(size, [case], tmp_path / f"launch-{launch}", deadline_seconds=120) as world:
            goal = len(lines_in(log)) + drawn.randint(1, 3) * size
            while len(lines_in(log)) < goal and any(each.poll() is None for each in world.processes):
                time.sleep(0.01)
            time.sleep(drawn.random() * 0.05)
            victim = drawn.choice(world.processes)
            children = children_of(victim.pid) if workers and drawn.random() < 0.3 else []
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(children or [victim.pid]), signal.SIGKILL)
                kills += 1
            if children:  # The rank meets its worker's death itself, and ends.
                deadline = time.monotonic() + 20
                while victim.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
        lineage = lineage_of(log)
        if len(lineage) == STEPS:
            break
    assert sorted(lineage) == list(range(1, STEPS + 1)), f"life {life}: {kind}, {workers} workers, after {kills} kills"
    per_epoch = STEPS // EPOCHS
    for epoch in range(EPOCHS):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        assert sorted(each for step in steps for each in lineage[step]) == list(range(N)), f"life {life}, epoch {epoch}"


def lines_in(log: Path) -> list[tuple[int, int, int, list[int]]]:
    """Return launch, step at which the launch began, step and samples of each line, in the order of the launches."""
    found = []
    for path in log.parent.glob(f"{log.name}.*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # A rank was killed while it wrote this line.
                found.append(tuple(json.loads(line)))
    return sorted(found)


def lineage_of(log: Path) -> dict[int, list[int]]:
    """Return the samples of each step, of the last launch that trained the step.

    Records are redone on as many ranks as wrote them: a launch on other ranks begins at the base, and a later one on as
    many ranks again goes on from the records of before.
    """
    lineage: dict[int, list[int]] = {}
    recorded: dict[int, list[int]] = {}
    for _, launch in itertools.groupby(lines_in(log), key=lambda line: line[0]):
        steps: dict[int, list[int]] = {}
        begun = 0
        for line in launch:
            begun, step, samples = line[1:]
            steps.setdefault(step, []).extend(samples)
        lineage = {step: lineage.get(step, recorded.get(step, [])) for step in range(1, begun + 1)} | steps
        recorded |= {step: each for step, each in steps.items() if len(each) >= len(recorded.get(step, []))}
    return lineage


def children_of(process: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


# ------------------------------------------------------------------------------------------------- meshes


def test_ranks_of_one_data_coordinate_have_equal_batches_on_any_mesh(tmp_path: Path) -> None:
    """TP 2 × FSDP2 2, then 4 data ranks, then TP 4, HSDP, PP 2 × DP 2: one epoch of 37 samples and more."""
    path = [("tp2-dp2", 0, 1), ("dp4", 1, 2), ("tp4", 2, 3), ("hsdp", 3, 4), ("pp2-dp2", 4, 6)]
    root = str(tmp_path / "run")
    cases = [
        Case(f"{CASES}:on_mesh", {"name": name, "root": root, "begin": begin, "end": end}, name)
        for name, begin, end in path
    ]
    results = run_world(4, cases, tmp_path / "world")
    trained: list[int] = []
    for name, begin, end in path:
        ranks: list[Any] = results.values(name)
        by_place = {tuple(each["place"]): each["had"] for each in ranks}
        assert all(by_place[tuple(each["place"])] == each["had"] for each in ranks), name
        _, _, of_data = MESHES[name]
        if name != "dp4":
            assert all("all ranks are data ranks, but weight is on a mesh" in each["refused"] for each in ranks)
        assert len(by_place) == {"tp4": 1, "dp4": 4, "hsdp": 4}.get(name, 2), (name, of_data)
        for step in range(begin + 1, end + 1):
            trained += [sample for had in by_place.values() for sample in had[str(step)]]
    assert len(trained) == 57
    assert sorted(trained[:37]) == list(range(37))
    assert len(set(trained[37:])) == 20


# ------------------------------------------------------------------------------------------------- losses

DTYPES = {"float64": 1e-12, "float32": 1e-5}
SEGMENTS = [(1, 0, 50), (4, 50, 100), (3, 100, 150), (2, 150, 200)]
"""Ranks, and the steps that they train."""


def loss_case(wrapper: str, dtype: str, root: Path, begin: int, end: int, way: str = "right") -> Case:
    arguments = {"wrapper": wrapper, "dtype_name": dtype, "root": str(root), "begin": begin, "end": end, "way": way}
    return Case(f"{CASES}:losses", arguments, f"{wrapper} {dtype} {way} {begin}-{end}")


def test_losses_on_changing_ranks_equal_those_of_one_uninterrupted_rank(tmp_path: Path) -> None:
    """13 samples a step, which none of 4, 3, 2 ranks divides; rows of unlike length; accumulation."""
    kinds = [(wrapper, dtype) for wrapper in ("ddp", "fsdp2") for dtype in DTYPES]
    found: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    wrong: dict[str, list[float]] = {}
    for size, begin, end in SEGMENTS:
        cases = [loss_case(*kind, tmp_path / "-".join(kind), begin, end) for kind in kinds]
        if size == 4:
            cases += [loss_case("ddp", "float64", tmp_path / way, 0, 50, way) for way in ("unweighted", "samples")]
        if size == 2:  # The same ranks, resumed once more, end with the same bits.
            cases += [loss_case(*kind, tmp_path / "-".join(kind), 150, 175) for kind in kinds]
            cases += [loss_case(*kind, tmp_path / "-".join(kind), 175, 201) for kind in kinds]
        results = run_world(size, cases, tmp_path / f"world-{size}", deadline_seconds=200)
        for kind in kinds:
            values: list[Any] = results.values(f"{kind[0]} {kind[1]} right {begin}-{end}")
            assert all(each == values[0] for each in values)
            found[kind] += values[0]
        if size == 4:
            wrong = {way: results.values(f"ddp float64 {way} 0-50")[0] for way in ("unweighted", "samples")}  # type: ignore[misc]
        if size == 2:
            for kind in kinds:
                resumed: list[Any] = [
                    results.values(f"{kind[0]} {kind[1]} right {steps}")[0] for steps in ("150-175", "175-201")
                ]
                assert resumed[0] + resumed[1][:25] == found[kind][150:200], f"{kind}: other bits after a resume"
    for dtype, bound in DTYPES.items():
        alone = losses(None, "", dtype, str(tmp_path / f"alone-{dtype}"), 0, LOSS_STEPS)
        for wrapper in ("ddp", "fsdp2"):
            assert found[wrapper, dtype] == pytest.approx(alone, rel=bound, abs=0), (wrapper, dtype)
            last = zip(
                weights_of(f"{tmp_path}/{wrapper}-{dtype}/200", dtype),
                weights_of(f"{tmp_path}/alone-{dtype}/200", dtype),
                strict=True,
            )
            assert all(torch.allclose(one, other, rtol=100 * bound, atol=100 * bound) for one, other in last)
        if dtype == "float64":
            for way, values in wrong.items():
                assert values != pytest.approx(alone[:50], rel=1e-6), f"{way}: the test would not find wrong weights"


# ------------------------------------------------------------------------------------------------- beside


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = ("unsplit_by_accelerate", "unlike_positions", "outside_of_mesh")
    return run_world(2, [Case(f"{CASES}:{name}") for name in names], tmp_path_factory.mktemp("beside"))


def test_accelerate_does_not_split_batches_again(beside: Results) -> None:
    first, second = beside.values("unsplit_by_accelerate")
    assert len(set(first) | set(second)) == 60  # type: ignore[call-overload]
    assert not set(first) & set(second)  # type: ignore[call-overload]


def test_unlike_positions_are_found_by_the_save(beside: Results) -> None:
    for message in beside.values("unlike_positions"):
        assert "data (ranks [0] ≠ ranks [1])" in str(message), message


def test_a_mesh_without_this_rank_is_refused(beside: Results) -> None:
    assert "rank 1 is not in DeviceMesh" in str(beside.values("outside_of_mesh")[1])
