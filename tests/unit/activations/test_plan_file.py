"""Plan files: the same plan comes back, and no crafted or damaged file does anything but raise."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.activations.plan_file import (
    FILE_BYTES_MAX,
    decode_plan,
    plan_digest,
    read_plan,
    write_plan,
)
from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.solve.solve import all_columns, solve, solve_again
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, UnavailableError
from tests.unit.activations.solve.traces import MIB, drawn_unit, model


@pytest.fixture(scope="module")
def plan() -> SolvedPlan:
    rng = random.Random(7)
    profile = model(drawn_unit(rng, 8), drawn_unit(rng, 6), units=4)
    return solve(profile, all_columns(profile, 0.02), 120 * MIB, error_bound=0.02)


@pytest.fixture
def path(plan: SolvedPlan, tmp_path: Path) -> Path:
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def crafted(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the file with a changed plan and the right digest."""
    document = json.loads(path.read_bytes())
    change(document["plan"])
    return sealed(document, json.dumps(document["plan"]))


def sealed(document: dict[str, Any], text: str) -> bytes:
    head = {**document, "digest": hashlib.sha256(text.encode()).hexdigest()}
    del head["plan"]
    return (json.dumps(head)[:-1] + f', "plan": {text}}}').encode()


def test_a_plan_comes_back(plan: SolvedPlan, path: Path) -> None:
    read = read_plan(path)
    assert read == plan
    assert plan_digest(read) == plan_digest(plan)
    assert solve_again(read, plan.budget_bytes * 2) == solve_again(plan, plan.budget_bytes * 2)
    assert plan_digest(solve_again(read, plan.budget_bytes * 2)) != plan_digest(plan)


def test_a_file_is_replaced_whole(plan: SolvedPlan, path: Path) -> None:
    other = solve_again(plan, plan.budget_bytes * 2)
    write_plan(other, str(path))
    assert read_plan(str(path)) == other
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(plan: SolvedPlan, path: Path) -> None:
    (path.parent / "folder").mkdir()
    (path.parent / "folder" / "file").touch()
    with pytest.raises(UnavailableError, match="the plan cannot be written"):
        write_plan(plan, path.parent / "folder")
    with pytest.raises(UnavailableError, match="the plan cannot be written"):
        write_plan(plan, path.parent / "absent" / "plan.json")
    assert sorted(each.name for each in path.parent.iterdir()) == ["folder", "plan.json"]


def test_a_plan_is_read_without_torch_and_scipy(path: Path) -> None:
    code = (
        "import sys; from holdfast.activations.plan_file import read_plan; read_plan(sys.argv[1]); "
        "assert not {'torch', 'scipy', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


def test_an_absent_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such plan file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UnavailableError, match="cannot be read"):
        read_plan(tmp_path)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(InvalidError, match="expected a plan file"):
        read_plan(tmp_path / "plan.json")


def test_a_newer_version_asks_for_an_upgrade(path: Path) -> None:
    data = path.read_bytes()
    with pytest.raises(InvalidError, match="version is 2; expected 1; upgrade Holdfast"):
        decode_plan(data.replace(b'"version":1', b'"version":2'), "plan.json")
    with pytest.raises(InvalidError, match="version is 0; expected 1; fit again"):
        decode_plan(data.replace(b'"version":1', b'"version":0'), "plan.json")


def test_each_truncation_is_found(path: Path) -> None:
    data = path.read_bytes().rstrip()
    for end in {0, 1, 20, len(data) - 1, *range(0, len(data), 997)}:
        with pytest.raises(CorruptError, match=r"plan\.json: damaged"):
            decode_plan(data[:end], "plan.json")


def test_each_changed_byte_is_found(path: Path) -> None:
    data, rng = path.read_bytes().rstrip(), random.Random(1)
    for _ in range(300):
        at = rng.randrange(len(data))
        changed = bytes((*data[:at], data[at] ^ (1 << rng.randrange(8)), *data[at + 1 :]))
        with pytest.raises((CorruptError, InvalidError)):
            decode_plan(changed, "plan.json")


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b"[]",
        b"{}",
        b'{"holdfast": "manifest", "version": 1, "digest": "", "plan": {}}',
        b'{"holdfast": 1, "version": 1, "digest": "", "plan": {}}',
    ],
)
def test_another_document_is_no_plan(data: bytes) -> None:
    with pytest.raises(InvalidError, match=r"x\.json: (not a plan file|kind is)"):
        decode_plan(data, "x.json")


def first_op(plan: dict[str, Any]) -> dict[str, Any]:
    return plan["profile"]["classes"][0]["ops"][1]


def first_column(plan: dict[str, Any]) -> dict[str, Any]:
    return plan["columns"][0][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("reserve"), "missing required field"),
        (lambda plan: plan["choice"].append(0), "expected one each"),
        (lambda plan: plan["choice"].__setitem__(0, -1), "column is -1"),
        (lambda plan: plan["choice"].__setitem__(0, 10**6), "column is 1000000"),
        (lambda plan: plan["choice"].__setitem__(0, 1.5), "Expected `int`"),
        (lambda plan: plan["profile"]["order"].__setitem__(0, ["layers.0", 9]), "not in class 9"),
        (lambda plan: plan["profile"]["order"].__setitem__(0, ["layers.1", 0]), "not in class 0"),
        (lambda plan: plan["profile"].update(order=[], gradient_bytes=[]), "0 units"),
        (lambda plan: plan["columns"].pop(), "lists of columns"),
        (lambda plan: plan["profile"].update(step_seconds=0), r"> 1e-12 - at .*step_seconds"),
        (lambda plan: plan["profile"].update(outside_bytes=-1), r">= 0 - at .*outside_bytes"),
        (lambda plan: plan["profile"].update(outside_bytes=1 << 62), r"<= 1152921504606846975 - at"),
        (lambda plan: plan["profile"]["classes"][0]["ops"].pop(0), "expected the input"),
        (lambda plan: first_op(plan).update(number=5), "with number 5"),
        (lambda plan: first_op(plan).update(reads=[10**9]), "expected earlier ops with storage"),
        (lambda plan: first_op(plan).update(reads=[-1]), "expected earlier ops with storage"),
        (lambda plan: first_op(plan).update(base=1), "expected earlier ops with storage"),
        (lambda plan: first_op(plan).update(bytes=-5), "Expected `(int|float)` (>=|<)"),
        (lambda plan: first_op(plan).update(seconds="soon"), "Expected `float`"),
        (lambda plan: first_column(plan).update(store=[[99, "keep"]]), "names an op outside"),
        (lambda plan: first_column(plan).update(store=[[0, "shred"]]), "no packing 'shred'"),
        (lambda plan: first_column(plan).update(store=[[0, "keep"], [0, "keep"]]), "stores an op twice"),
        (lambda plan: first_column(plan).update(run=[-1]), "names an op outside"),
        (lambda plan: first_column(plan).update(device_bytes=-1), "Expected `(int|float)` (>=|<)"),
        (lambda plan: plan.update(reserve=1.0), r"< 1.0 - at .*reserve"),
        (lambda plan: plan.update(error_bound=-0.5), r">= 0.0 - at .*error_bound"),
        (lambda plan: plan.update(measured_peak_bytes=-1), "Expected `int` >= 0"),
        (lambda plan: plan.update(gradient_errors=[["weight", 0.1]]), "all gradients as one"),
        (lambda plan: plan.update(gradient_errors=[["", 0.1]]), "all gradients as one"),
        (lambda plan: plan.update(measured_slowdown=-1.0), "Expected `float` (>=|<)"),
        (lambda plan: plan.update(predicted_slowdown=1e300), "Expected `float` (>=|<)"),
        (lambda plan: first_column(plan).update(seconds=1e300), "Expected `(int|float)` (>=|<)"),
        (lambda plan: plan.update(curve=[{"peak_bytes": -1, "slowdown": 1.0}]), "Expected `int` >= 0"),
        (lambda plan: plan.update(curve=[{"peak_bytes": 1, "slowdown": -1.0}]), "Expected `float` (>=|<)"),
    ],
)
def test_a_crafted_plan_is_refused(path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        decode_plan(crafted(path, change), "plan.json")


@pytest.mark.parametrize("text", ["NaN", "[" * 100_000, '{"profile": ' * 50_000, "1e999", '"\\ud800"'])
def test_hostile_text_is_refused(path: Path, text: str) -> None:
    with pytest.raises((CorruptError, InvalidError)):
        decode_plan(sealed(json.loads(path.read_bytes()), text), "plan.json")


def test_random_changes_of_values_only_raise_our_errors(path: Path) -> None:
    """A value anywhere in the plan is replaced, and the file sealed again: our error, or a plan that solves."""
    rng = random.Random(3)
    for _ in range(200):

        def change(value: Any) -> None:
            while isinstance(value, dict | list) and value:
                key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
                if not isinstance(value[key], dict | list) or rng.random() < 0.1:
                    value[key] = rng.choice([-1, 0, 3, 1 << 40, 0.5, -0.0, "keep", "", [], None, True, {}])
                    return
                value = value[key]

        try:
            found = decode_plan(crafted(path, change), "plan.json")
            solve_again(found, found.budget_bytes)
        except CheckpointError:
            pass
