"""`holdfast activations`: a plan file is shown without torch, scipy and matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.activations import ActivationPlan, load_plan
from holdfast.activations.profile.unit_profile import Packing
from holdfast.activations.solve.solve import all_columns, solve
from tests.unit.activations.solve.traces import MIB, model, op, unit
from tests.unit.cli.conftest import ESCAPE
from tests.unit.cli.running import holdfast, separately

NAME = f"gelu{ESCAPE}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a plan that packs, runs again and skips; one op has a name that would steer a terminal."""
    ops = [
        op(0, is_needed=True),
        op(1, [0], is_needed=True, packings=(Packing("bits", MIB // 32, 1e-5),)),
        op(2, [1], overload=NAME),
        op(3, [2], is_needed=True),
    ]
    profile = model(unit(ops), units=2, keep_all_peak_bytes=10 * MIB)
    found = tmp_path_factory.mktemp("plans") / "plan.json"
    ActivationPlan(solve(profile, all_columns(profile, 0.0), 9 * MIB)).save(found)
    return found


def test_a_plan_is_shown_without_torch_scipy_and_matplotlib(path: Path) -> None:
    ended = separately("activations", path, absent=("torch", "scipy", "matplotlib"))
    assert (ended.status, ended.err) == (0, "")
    assert load_plan(path).explain() in ended.out
    assert "within the budget" in ended.out
    assert len(ended.out.partition("other budgets")[2].splitlines()) - 2 == len(load_plan(path).solved.curve)
    assert all(line.isprintable() for line in ended.out.splitlines())


def test_json_is_the_summary(path: Path) -> None:
    document, summary = holdfast("activations", path, "--json").json(), load_plan(path).summary()
    assert set(document) == set(summary.__slots__)
    assert document["predicted_peak_bytes"] == summary.predicted_peak_bytes
    assert [each["units"] for each in document["uses"]] == [list(each.units) for each in summary.uses]
    assert [each["slowdown"] for each in document["curve"]] == [each.slowdown for each in summary.curve]


@pytest.mark.parametrize("budget", ["9.2MiB", str(95 * MIB // 10), "94%"])
def test_another_budget_is_solved_and_keeps_the_curve(path: Path, budget: str) -> None:
    document = holdfast("activations", path, "--budget", budget, "--json").json()
    plan = load_plan(path).resolve(budget=int(budget) if budget.isdecimal() else budget)
    assert document["predicted_peak_bytes"] == plan.solved.predicted_peak_bytes <= plan.solved.budget_bytes
    assert document["curve"] == holdfast("activations", path, "--json").json()["curve"] != []


@pytest.mark.parametrize("budget", ["0", "1KiB", "much", "²", "9" * 5000])
def test_a_budget_that_cannot_be_solved_is_one_line(path: Path, budget: str) -> None:
    ended = holdfast("activations", path, "--budget", budget)
    if budget == "9" * 5000:
        assert ended.status == 0, "a budget above every peak keeps everything"
        return
    assert (ended.status, ended.out, len(ended.err.splitlines())) == (2, "", 1)
    assert "expected" in ended.err


@pytest.mark.parametrize(("option", "module"), [("--budget", "scipy.optimize"), ("--plot", "matplotlib.figure")])
def test_a_missing_package_is_named_with_its_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    ended = holdfast("activations", path, option, "95%")
    assert (ended.status, ended.out) == (2, "")
    assert f"{module.partition('.')[0]}; run: pip install 'holdfast[activations]'" in ended.err


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_a_plot_is_drawn(path: Path, tmp_path: Path, name: str, start: bytes) -> None:
    ended = holdfast("activations", path, "--plot", tmp_path / name)
    assert ended.status == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    if name.endswith("svg"):
        assert "budget" in (tmp_path / name).read_text()


def test_a_plot_that_cannot_be_written_is_one_line(path: Path, tmp_path: Path) -> None:
    for name, expected in (
        ("plan.docx", "expected a name that ends in .png"),
        ("absent/plan.png", "cannot be written"),
    ):
        ended = holdfast("activations", path, "--plot", tmp_path / name)
        assert (ended.status, ended.out, len(ended.err.splitlines())) == (2, "", 1)
        assert expected in ended.err


def test_a_damaged_plan_has_its_status(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_bytes(path.read_bytes()[:-100])
    (tmp_path / "other.json").write_text("{}")
    for name, status in (("cut.json", 1), ("other.json", 2), ("absent.json", 2), (".", 2)):
        ended = holdfast("activations", tmp_path / name)
        assert (ended.status, ended.out, len(ended.err.splitlines())) == (status, "", 1)
