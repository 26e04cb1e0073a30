"""Where a layout could change values silently, it refuses; and hostile rule files end in typed errors, soon."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CheckpointError, InvalidError

FOLLOW = 'follow = [["optimizer.state.{}.{key:exp_avg|step}", "optimizer.state.{}.{key}"], ["model.{}", "model.{}"]]'


def rules(*texts: str, head: str = "") -> str:
    return f"layout = 1\n{head}\n" + "\n".join(f"[[rule]]\n{text}" for text in texts) + "\n"


def saved(path: Path, state: dict[str, Any]) -> Path:
    holdfast.save(path, state)
    return path


def test_a_log_is_not_redone_on_what_a_layout_made(tmp_path: Path) -> None:
    def training() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 4, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = training()
    with holdfast.CheckpointManager(tmp_path / "run", every=100, differential=True) as manager:
        for step in range(1, 6):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            if step == 1:
                base = model.weight.detach().clone()
                manager.save(1, {"model": model, "opt": optimizer}).wait()
            else:
                manager.maybe_save(step, {"model": model, "opt": optimizer})
    other, of_other = training()
    turned = rules('from = "weight"\ntranspose = true\nto = "weight"', head='follow = [["model.{}", "model.{}"]]')
    with holdfast.CheckpointManager(tmp_path / "run", every=100, differential=True) as manager:
        assert manager.load({"model": other, "opt": of_other}, layout=turned) == 1
        report = manager.load_report
        assert report is not None and "converts the state" in report.why_not_further
    assert torch.equal(other.weight, base.T)


def test_rules_have_names_of_their_own(tmp_path: Path) -> None:
    two = [f'name = "t"\nfrom = "{key}.{{k}}"\nto = "{key}2.{{k}}"\ntranspose = true' for key in ("a", "b")]
    with pytest.raises(InvalidError, match="rule t: comes twice"):
        holdfast.Layout(rules(*two))
    with pytest.raises(InvalidError, match="rule a: comes twice"):
        holdfast.Layout(rules('from = "a"\nto = "x"', 'from = "a"\nto = "y"'))


def test_shared_memory_takes_no_unlike_values(tmp_path: Path) -> None:
    path = saved(tmp_path / "f", {"f": torch.arange(8.0).view(4, 2)})
    module = torch.nn.Module()
    module.e = torch.nn.Parameter(torch.zeros(2, 2))
    module.h = module.e
    halves = rules(
        'from = "f"\nsections = { dim = 0, parts = [{ length = 2, to = "m.e" }, { length = 2, to = "m.h" }] }'
    )
    with pytest.raises(InvalidError, match="different values"):
        holdfast.load(path, {"m": module}, layout=halves)
    assert not module.e.any()


def test_a_stored_tie_that_other_steps_take_is_no_tie(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.emb = torch.nn.Parameter(torch.arange(9.0).view(3, 3))
    module.head = module.emb
    path = saved(tmp_path / "t", {"model": module})
    embedding = 'from = "model.emb"\nto = "E"'
    same = rules(embedding, 'from = "model.head"\nto = "H"\noptional = true')
    assert holdfast.open_checkpoint(path, layout=same).aliases == {"H": "E"}
    turned = rules(embedding, 'from = "model.head"\nto = "H"\ntranspose = true\noptional = true')
    assert holdfast.open_checkpoint(path, layout=turned).aliases == {}


@pytest.mark.parametrize("shape", [(3, 4), (8, 2), (8, 9)])
def test_padding_is_rows_and_nothing_else(tmp_path: Path, shape: tuple[int, int]) -> None:
    back = holdfast.Layout(rules('from = "emb"\npad = { dim = 0, content = 5 }\nto = "E"')).reversed()
    path = saved(tmp_path / "p", {"E": torch.arange(20.0).view(5, 4)})
    state = {"emb": torch.full(shape, -1.0)}
    with pytest.raises(InvalidError, match=r"emb: \(\d, \d\) here and \(5, 4\) .*longer along dimension 0 alone"):
        holdfast.load(path, state, layout=back)
    assert (state["emb"] == -1).all()
    with_rename = {"emb[0]": torch.full((8, 4), -1.0)}
    holdfast.load(path, with_rename, layout=back, rename={"emb": "emb[0]"})
    assert torch.equal(with_rename["emb[0]"][:5], torch.arange(20.0).view(5, 4))
    assert (with_rename["emb[0]"][5:] == -1).all()


def test_unlike_counts_of_steps_are_refused_by_every_verb(tmp_path: Path) -> None:
    def state(*steps: float) -> dict[str, Any]:
        names = ("g", "u")
        counts = {name: {"step": torch.tensor(step)} for name, step in zip(names, steps, strict=False)}
        return {"model": {name: torch.zeros(2, 2) for name in names}, "optimizer.state": counts}

    joined = rules('from = "{w:g|u}"\njoin = { dim = 0, by = "w" }\nto = "gu"', head=FOLLOW)
    unlike = saved(tmp_path / "unlike", state(3.0, 7.0))
    verbs = {
        "read": lambda: holdfast.read(unlike, layout=joined),
        "tensors": lambda: holdfast.open_checkpoint(unlike, layout=joined).tensors,
        "export": lambda: holdfast.export(unlike, tmp_path / "out", to="holdfast", layout=joined),
        "diff": lambda: holdfast.diff(unlike, unlike, layout=joined),
        "load": lambda: holdfast.load(unlike, {"model": {"gu": torch.ones(4, 2)}}, layout=joined),
    }
    for verb in verbs.values():
        with pytest.raises(InvalidError, match="expected equal counts of steps"):
            verb()
    like = saved(tmp_path / "like", state(3.0, 3.0))
    assert holdfast.open_checkpoint(like, layout=joined).read("optimizer.state.gu.step") == 3
    lacks = saved(tmp_path / "lacks", state(3.0))
    with pytest.raises(InvalidError, match="1 of 2 parameters"):
        _ = holdfast.open_checkpoint(lacks, layout=joined).tensors


def test_the_identity_changes_with_a_size_in_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "cfg", {"w": torch.arange(12.0)})
    parts = '{ length = "6 // heads", to = "a" }, { length = "6 // heads", to = "b" }'
    cut = f'from = "w"\nsections = {{ dim = 0, repeat = "heads", parts = [{parts}] }}'
    layout = rules(cut, head='[sizes]\nheads = [{ json = "config.json", key = "h" }]')
    seen = set()
    for heads in (2, 3):
        (path / "config.json").write_text(json.dumps({"h": heads}))
        seen.add(holdfast.open_checkpoint(path, layout=layout).identity)
    assert len(seen) == 2


def test_values_stay_where_the_key_of_the_model_changes(tmp_path: Path) -> None:
    path = saved(tmp_path / "va", {"net": {"w": torch.zeros(2), "note": "n"}, "model": {"cfg": 7}, "step": 4})
    other = rules('from = "{x:*}"\nto = "{x}"', head='follow = [["net.{}", "model.{}"]]')
    assert holdfast.open_checkpoint(path, layout=other).objects == {"model": {"cfg": 7, "note": "n"}, "step": 4}


def test_dicts_that_a_layout_empties_are_gone(tmp_path: Path) -> None:
    path = saved(tmp_path / "nd", {"model": {"e": {"0": torch.ones(2), "1": torch.ones(2)}}, "empty": {}})
    state = {"model": {"es": torch.zeros(2, 2)}}
    stack = rules('from = "model.e.{i:int}"\nstack = { dim = 0, by = "i" }\nto = "model.es"')
    holdfast.load(path, state, layout=stack)
    assert state["model"]["es"].all()
    assert holdfast.open_checkpoint(path, layout=stack).objects == {"model": {}, "empty": {}}


def test_a_parameter_of_one_element_and_its_count(tmp_path: Path) -> None:
    names = ("0", "1")
    state = {
        "model": {"e": {name: torch.full((1,), float(name)) for name in names}},
        "optimizer.state": {f"e.{name}": {"step": torch.tensor(3.0)} for name in names},
    }
    path = saved(tmp_path / "one", state)
    joined = rules('from = "e.{i:int}"\njoin = { dim = 0, by = "i", count = 2 }\nto = "e"', head=FOLLOW)
    viewed = holdfast.open_checkpoint(path, layout=joined)
    assert viewed.tensors["optimizer.state.e.step"].shape == ()
    assert np.array_equal(np.asarray(viewed.read("model.e")), [0, 1])


SMALL = {"p.u": torch.zeros(3, 2), "p.v": torch.ones(3, 2)}
HOSTILE = {
    "read and spread": rules('from = "p.{l:int}"\nunstack = { dim = 0, as = "l" }\nto = "x.{l}"'),
    "too few values": rules('from = "p.u"\nunstack = { dim = 0, as = "w" }\nto = "x.{w:a|b}"'),
    "no follow": "layout = 1\nfollow = []\n",
    "many digits": "layout = 1\nabout = " + "9" * 5000 + "\n",
    "surrogate": "layout = 1\nabout = '\udc80'\n",
    "dotted keys": "layout = 1\n" + "a." * 100_000 + "b = 1\n",
    "spaced keys": "layout = 1\n" + "a . " * 100_000 + "b = 1\n",
    "kinds": rules('from = "p.{x}"\nto = "x.{x:03}"'),
    "kinds of values": rules('from = "p.{x:int}"\nto = "x.{x:u|v}"'),
    "repeat": rules('from = "p.{w:u|v}"\nsections = { dim = 0, repeat = 4611686018427387904, parts = ['
                    '{ length = 0, to = "a.{w}" }, { length = 0, to = "b.{w}" }] }\npad = { dim = 0, content = 0 }'),
    "terms": rules('from = "p.{w:u|v}"\nto = "x.{w}"\nunstack = { dim = 0, as = "i", block = 3 }'
                   '\ninterleave = { dim = 0, block = 1, by = 100000 }'.replace("x.{w}", "x.{w}.{i:int}")),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_rule_files_end_soon_in_typed_errors(tmp_path: Path, case: str) -> None:
    path = saved(tmp_path / "small", SMALL)
    start = time.monotonic()
    with pytest.raises(CheckpointError):
        checkpoint = holdfast.open_checkpoint(path, layout=HOSTILE[case])
        for name in checkpoint.tensors:
            checkpoint.read(name)
    assert time.monotonic() - start < 30


def test_values_that_a_field_does_not_list(tmp_path: Path) -> None:
    path = saved(tmp_path / "three", {"x": torch.zeros(3, 2)})
    back = holdfast.Layout(rules('from = "p.{w:a|b}"\nstack = { dim = 0, by = "w" }\nto = "x"')).reversed()
    with pytest.raises(InvalidError, match="3 tensors along dimension 0; expected 2, the values of w"):
        _ = holdfast.open_checkpoint(path, layout=back).tensors


@pytest.mark.parametrize("argument", ["a\0b", "\udc80.toml", "missing.toml"])
def test_a_name_that_is_no_file(argument: str) -> None:
    with pytest.raises(CheckpointError):
        holdfast.Layout(argument)
    with pytest.raises(InvalidError, match="expected a dict"):
        holdfast.Layout("nanogpt", sizes=["x"])  # type: ignore[arg-type]


def test_a_transposed_tensor_is_copied_in_large_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.offline.imports import viewed_source

    tensor = torch.arange(1 << 22, dtype=torch.float32).view(2048, 2048)
    path = saved(tmp_path / "amp", {"w": tensor})
    read: list[int] = []
    execute = viewed_source.execute

    def counted(plan: Any, *arguments: Any) -> None:
        read.append(plan.bytes)
        execute(plan, *arguments)

    monkeypatch.setattr(viewed_source, "execute", counted)
    holdfast.export(path, tmp_path / "out", to="holdfast", layout=rules('from = "w"\ntranspose = true\nto = "v"'))
    assert sum(read) == tensor.nbytes
    assert torch.equal(holdfast.open_checkpoint(tmp_path / "out").read("v", framework="torch"), tensor.T)  # type: ignore[arg-type]
