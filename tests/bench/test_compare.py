"""Two checkouts are compared in turn, rounds survive an interruption, and no checkout is written to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import job
from bench.compare import main
from bench.measurements import (
    Measurement,
    Side,
    large_amounts,
    memory_amounts,
    of_part,
    printed,
    tiny_amounts,
    training_amounts,
)
from bench.paired import Amounts


def checkout(folder: Path, seconds: float, index_bytes: int = 100) -> Path:
    """Return a checkout whose package says how fast it is."""
    (folder / "src" / "holdfast").mkdir(parents=True)
    (folder / "src" / "holdfast" / "__init__.py").write_text(f"SECONDS = {seconds}\nINDEX_BYTES = {index_bytes}\n")
    (folder / "bench").mkdir()
    return folder


class Fake:
    """A measurement that asks the package, and keeps the order of its runs."""

    def __init__(self, name: str = "fake", *, interrupt_at: int | None = None) -> None:
        self.order: list[str] = []
        self.name, self.interrupt_at = name, interrupt_at

    def measure(self, side: Side, folder: Path, is_quick: bool) -> Amounts:
        if len(self.order) == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.order.append(side.name)
        program = "import holdfast, json; print(json.dumps({'s': holdfast.SECONDS, 'b': holdfast.INDEX_BYTES}))"
        values = printed(["-c", program], side, side.root)
        return Amounts({f"{self.name}_seconds": values["s"]}, {f"{self.name}_index_bytes": values["b"]})

    def table(self) -> dict[str, Measurement]:
        return {self.name: Measurement(name=self.name, measure=self.measure)}


class Scene:
    """Two checkouts and a folder."""

    def __init__(self, root: Path, before: float, after: float, **after_too: int) -> None:
        self.before = checkout(root / "one", before)
        self.after = checkout(root / "two", after, **after_too)
        self.folder = root / "work"

    def run(self, fake: Fake, *options: str) -> int:
        return main([str(self.before), str(self.after), "--folder", str(self.folder), *options], fake.table())


def test_the_checkouts_take_turns_at_going_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene, fake = Scene(tmp_path, 2.0, 1.0), Fake()
    assert scene.run(fake) == 0
    assert fake.order == ["before", "after", "after", "before"] * 3 + ["before", "after"]
    shown = capsys.readouterr().out
    assert "round 7 of 7, fake" in shown
    assert "fake_seconds 2.00" in shown
    assert "2.000–2.000" in shown
    kept = json.loads((scene.folder / "rounds.json").read_text())
    assert kept["keys"]["fake_seconds"]["ratio"] == 2.0
    assert len(kept["rounds"]["fake"]) == 7


@pytest.mark.parametrize(
    ("seconds", "index_bytes", "rounds", "status", "failed"),
    [
        (1.02, 100, "7", 0, None),
        (1.1, 100, "7", 1, "fake_seconds"),
        (1.1, 100, "5", 1, "fake_seconds"),
        (1.0, 101, "1", 1, "fake_index_bytes"),
    ],
)
def test_the_exit_status_says_whether_a_key_fell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    index_bytes: int,
    rounds: str,
    status: int,
    failed: str | None,
) -> None:
    scene = Scene(tmp_path, 1.0, seconds, index_bytes=index_bytes)
    assert scene.run(Fake(), "--rounds", rounds, "--markdown", str(tmp_path / "table.md")) == status
    shown = capsys.readouterr().out
    assert ("Did not pass" in shown) == (failed is not None)
    table = (tmp_path / "table.md").read_text()
    assert "| key | rounds | before | after | before ÷ after | 95 % interval | verdict |" in table
    if failed:
        assert f"Did not pass: {failed}." in shown
        assert f"Did not pass: {failed}." in table


def test_an_interrupted_comparison_continues_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene, fake = Scene(tmp_path, 2.0, 1.0), Fake(interrupt_at=5)
    assert scene.run(fake, "--rounds", "4") == 130
    assert "the same command continues" in capsys.readouterr().out
    assert len(json.loads((scene.folder / "rounds.json").read_text())["rounds"]["fake"]) == 2
    assert scene.run(fake, "--rounds", "4") == 0
    # The side that the interrupted round had measured is measured again, beside the other one.
    assert fake.order == ["before", "after", "after", "before", "before", "before", "after", "after", "before"]
    assert scene.run(fake, "--rounds", "5") == 0
    assert fake.order[9:] == ["before", "after"], "more rounds continue the same file"


def test_another_measurement_joins_the_same_file(tmp_path: Path) -> None:
    scene, one, two = Scene(tmp_path, 2.0, 1.0), Fake("one"), Fake("two")
    both = one.table() | two.table()
    call = [str(scene.before), str(scene.after), "--folder", str(scene.folder), "--rounds", "2"]
    assert main([*call, "--only", "one"], both) == 0
    assert not two.order
    assert main(call, both) == 0
    assert (len(one.order), len(two.order)) == (4, 4)


@pytest.mark.parametrize("changed", ["before", "after", "quick"])
def test_rounds_of_something_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str) -> None:
    scene, fake = Scene(tmp_path, 2.0, 1.0), Fake()
    assert scene.run(fake, "--rounds", "1") == 0
    if changed != "quick":
        (getattr(scene, changed) / "src" / "holdfast" / "more.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        scene.run(fake, "--rounds", "2", *(["--quick"] if changed == "quick" else []))
    assert ended.value.code == 2
    assert f"has rounds of another {changed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nothing"], "--only nothing: unknown; expected some of fake"),
        (["--rounds", "0"], "--rounds 0; expected at least 1"),
    ],
)
def test_a_wrong_call_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        Scene(tmp_path, 2.0, 1.0).run(Fake(), *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene(tmp_path, 2.0, 1.0)
    scene.before = tmp_path
    with pytest.raises(SystemExit) as ended:
        scene.run(Fake())
    assert ended.value.code == 2
    assert "no checkout of Holdfast" in capsys.readouterr().err


def test_a_checkout_is_never_overwritten_by_its_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene(tmp_path, 2.0, 1.0)
    scene.before = checkout(scene.folder / "copy-before", 2.0)
    with pytest.raises(SystemExit) as ended:
        scene.run(Fake())
    assert ended.value.code == 2
    assert "would overwrite the checkout" in capsys.readouterr().err
    assert (scene.before / "src" / "holdfast" / "__init__.py").exists()


def test_a_measurement_that_fails_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(side: Side, folder: Path, is_quick: bool) -> Amounts:
        return Amounts(printed(["-c", "raise ValueError('so bad')"], side, side.root), {})

    scene = Scene(tmp_path, 2.0, 1.0)
    call = [str(scene.before), str(scene.after), "--folder", str(scene.folder)]
    assert main(call, {"fake": Measurement(name="fake", measure=measure)}) == 3
    assert "so bad" in capsys.readouterr().err


def test_checkouts_are_only_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2.0, 1.0)
    there = sorted(tmp_path.rglob("*"))
    assert scene.run(Fake(), "--rounds", "1") == 0
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(scene.folder)) == there


def test_what_cannot_run_here_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene, fake = Scene(tmp_path, 2.0, 1.0), Fake()
    lacking = Measurement(name="lacking", measure=fake.measure, unmet=lambda folder: "lacking needs a tool")
    call = [str(scene.before), str(scene.after), "--folder", str(scene.folder)]
    with pytest.raises(SystemExit) as ended:
        main(call, {**fake.table(), "lacking": lacking})
    assert ended.value.code == 2
    assert "lacking needs a tool" in capsys.readouterr().err
    assert not fake.order


@pytest.mark.long
def test_a_real_part_runs_with_the_package_of_each_side(tmp_path: Path) -> None:
    sizes = {"tensors": 20, "rounds": 1}
    part = of_part("tiny", sizes, sizes, tiny_amounts)
    # The package of this side cannot save.
    broken = checkout(tmp_path / "broken", 1.0)
    call = [str(job.ROOT), str(job.ROOT), "--folder", str(tmp_path / "work"), "--rounds", "1"]
    assert main(call, {part.name: part}) in (0, 1)
    keys = json.loads((tmp_path / "work" / "rounds.json").read_text())["keys"]
    assert {"tiny_save_seconds", "tiny_load_seconds"} <= keys.keys()
    call = [str(broken), str(job.ROOT), "--folder", str(tmp_path / "other"), "--rounds", "1"]
    assert main(call, {part.name: part}) == 3, "its ranks import the package of their side"


def test_amounts_of_the_parts() -> None:
    rounds = [{"save": float(n), "load_cold": 2.0, "load_warm": 3.0} for n in range(1, 6)]
    assert large_amounts(rounds) == {
        "save_seconds": 3.0,
        "save_p90_seconds": pytest.approx(4.6),
        "load_cold_seconds": 2.0,
        "load_warm_seconds": 3.0,
    }
    assert memory_amounts([{"blocking": 0.1, "copy": 0.2, "lazy": 0.0}]) == {"save_peak_extra_mib": 1.0}
    assert memory_amounts([{"blocking": 9.0, "copy": 12.0, "lazy": 0.0}]) == {"save_peak_extra_mib": 12.0}
    slowdown = training_amounts([{"with": 6.0, "without": 5.0}, {"with": 5.0, "without": 5.0}])
    assert slowdown == {"train_slowdown": pytest.approx(1.1)}
