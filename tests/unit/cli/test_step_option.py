"""Every command that takes a checkpoint takes the root of a run, and a name of the step."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as package
from tests.unit.cli.running import Ended, holdfast

NEWEST = "step-000000000020"


@pytest.fixture
def named(root: Path) -> Path:
    """The run with steps 10 and 20, and an unfinished 30; step 10 is the best."""
    package.api.tag(root, 10, "best")
    return root


def run(verb: str, root: Path, out: Path, *arguments: object) -> Ended:
    """Run a command on the run."""
    if verb == "export":
        return holdfast("export", root, out, "--to", "safetensors", *arguments)
    if verb == "import":
        renamed = ["--from-step" if argument == "--step" else argument for argument in arguments]
        return holdfast("import", root, out, "--copy", *renamed)
    if verb == "diff":
        return holdfast("diff", root, root / "step-000000000010", *arguments)
    return holdfast(verb, root, *arguments)


VERBS = ["inspect", "verify", "export", "import", "diff"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_root_stands_for_its_newest_valid_step_and_says_so(named: Path, tmp_path: Path, verb: str) -> None:
    ended = run(verb, named, tmp_path / "out")
    assert ended.status in (0, 1 if verb == "diff" else 0)
    said = f"{named}: step 20, the newest valid one; --step chooses another\n"
    assert ended.err == said
    (named / NEWEST / "manifest.json").write_bytes(b"damaged")
    ended = run(verb, named, tmp_path / "again")
    assert ended.status == 0 and f"{named}: step 10, the newest valid one" in ended.err


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("step", "said"), [("10", ""), ("best", "step 10, named best"), ("latest", "step 20, the")])
def test_a_step_by_number_tag_and_latest(named: Path, tmp_path: Path, verb: str, step: str, said: str) -> None:
    ended = run(verb, named, tmp_path / "out", "--step", step)
    assert ended.status == 0, ended
    assert said in ended.err and bool(said) == bool(ended.err)
    if verb == "import":
        assert package.open_checkpoint(tmp_path / "out", step=20 if step == "latest" else 10)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("step", "said"),
    [("30", "no committed step 30"), ("bets", "no tag 'bets'; there are: best"), ("a/b", "expected a whole number")],
)
def test_no_such_step(named: Path, tmp_path: Path, verb: str, step: str, said: str) -> None:
    ended = run(verb, named, tmp_path / "out", "--step", step)
    assert (ended.status, ended.out) == (2, "") and said in ended.err
    assert len(ended.err.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["inspect", "verify", "export", "import"])
def test_a_step_of_one_checkpoint_is_refused(named: Path, tmp_path: Path, verb: str) -> None:
    ended = run(verb, named / NEWEST, tmp_path / "out", "--step", 20)
    assert ended.status == 2 and "is one checkpoint" in ended.err and "not the root of a run" in ended.err


def test_a_root_without_steps(tmp_path: Path) -> None:
    package.CheckpointManager(tmp_path / "run", process_group=False).close()
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "step-000000000001").mkdir()
    ended = holdfast("verify", tmp_path / "run")
    assert ended.status == 2 and "no committed step yet" in ended.err


def test_both_sides_of_a_diff_may_be_runs(named: Path) -> None:
    document = holdfast("diff", named, named, "--step", "best", "--step-b", 20, "--json").json()
    assert [document["a"][-2:], document["b"][-2:]] == ["10", "20"]
    document = holdfast("diff", named, named, "--step", "best", "--json").json()
    assert [document["a"][-2:], document["b"][-2:]] == ["10", "10"], "one step of two runs"
    document = holdfast("diff", named, named, "--step-b", "best", "--json").json()
    assert [document["a"][-2:], document["b"][-2:]] == ["20", "10"]
    document = holdfast("diff", named / NEWEST, named, "--step", 10, "--json").json()
    assert [document["a"][-2:], document["b"][-2:]] == ["20", "10"]
    assert holdfast("diff", named / NEWEST, named / NEWEST, "--step", 10).status == 2
    assert holdfast("diff", named, named / NEWEST, "--step-b", 10).status == 2


def test_a_trace_of_one_step(named: Path, tmp_path: Path) -> None:
    for arguments, saves in (((named,), 2), ((named, "--step", "best"), 1), ((named / NEWEST,), 1)):
        out = tmp_path / "trace.json"
        assert f"{saves} save" in holdfast("trace", *arguments, "-o", out).out
    assert holdfast("trace", named, "--step", 11).status == 2


def test_a_superseded_step_by_its_digest(named: Path, tmp_path: Path) -> None:
    state: dict[str, object] = {"note": "again"}
    with package.CheckpointManager(named, process_group=False) as manager:
        manager.load({"note": ""}, 10)
        manager.save(20, state).wait()
    (left,) = (step for step in package.api.list_steps(named).steps if step.superseded)
    assert run("export", named, tmp_path / "old", "--step", left.name).status == 0
    assert run("verify", named, tmp_path, "--step", left.name).status == 0
    assert package.read(named, step=20) == state


def test_tags_move(named: Path) -> None:
    assert "--move" in holdfast("tag", named, 20, "best").err
    assert holdfast("tag", named, 20, "best", "--move").status == 0
    assert holdfast("tag", named, "latest", "last").status == 0
    listed = holdfast("tag", named, "--json").json()["tags"]
    assert [(each["tag"], each["step"]) for each in listed] == [("best", 20), ("last", 20)]
    for name in ("300", "latest", " 300", "latest ", "300@1f2e"):
        ended = holdfast("tag", named, 20, name)
        assert (ended.status, ended.out) == (2, ""), name
    assert holdfast("tag", named, "--remove", "best", "--move").status == 2


def test_a_number_that_became_a_tag_before_is_removed(named: Path) -> None:
    from holdfast.backends.stores.local import LocalStore
    from holdfast.stored.repository.tags import put_tag

    put_tag(LocalStore(named, settings=package.Settings()), 10, "300", "now")
    assert holdfast("tag", named).out.split()[3] == "300"
    assert holdfast("tag", named, "--remove", "300").status == 0


def test_verify_says_which_step_it_read_and_where_the_damage_is(named: Path) -> None:
    assert holdfast("verify", named, "--json").json()["step"] == 20
    (named / NEWEST / "manifest.json").write_bytes(b"damaged")
    assert holdfast("verify", named, "--json").json()["step"] == 10
    ended = holdfast("verify", named, "--step", 20, "--json")
    (damage,) = ended.json()["damages"]
    assert (ended.status, ended.json()["step"], damage["file"]) == (1, 20, "manifest.json")
    (named / NEWEST.replace("20", "10") / "manifest.json").write_bytes(b"damaged")
    (damage,) = (ended := holdfast("verify", named, "--step", "best", "--json")).json()["damages"]
    assert (ended.status, ended.json()["step"], damage["file"]) == (1, 10, "manifest.json"), "by its tag"
    (damage,) = (ended := holdfast("verify", named, "--json")).json()["damages"]
    assert (ended.status, ended.json()["step"], damage["file"]) == (1, None, ""), "no step can be chosen"


def test_which_paths_are_runs(named: Path) -> None:
    assert package.api.is_run(named)
    assert [package.api.is_run(path) for path in (named / NEWEST, named.parent, named / "absent")] == [False] * 3


def test_the_steps_that_need_other_steps_are_marked(named: Path) -> None:
    records = [record for record in package.api.list_steps(named).steps if record.committed]
    steps = [package.open_checkpoint(named, step=record.step) for record in records]
    shares = [bool(checkpoint.packs_of_other_steps) for checkpoint in steps]
    assert [record.shares_packs for record in records] == shares == [False, True]
    stored = sum(steps[1].stored_form(fqn).stored_bytes for fqn in steps[1].tensors)
    assert stored == steps[1].manifest.tensor_bytes, "nothing is coded"


def test_the_latest_step_that_is_tagged_is_undamaged(named: Path) -> None:
    (named / NEWEST / "manifest.json").write_bytes(b"damaged")
    assert holdfast("tag", named, "latest", "good").status == 0
    assert package.open_checkpoint(named, step="good").step == 10
