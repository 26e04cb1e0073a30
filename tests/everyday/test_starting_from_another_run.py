"""Somebody starts from another run: wrapped, renamed or resized, of any format, with new hyperparameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import holdfast
from holdfast.base.types.reports import PartlyFilled
from holdfast.errors import InvalidError

State = dict[str, object]


def net(vocabulary: int = 10, *, body: str = "backbone", seed: int = 0, tied: bool = False) -> nn.ModuleDict:
    torch.manual_seed(seed)
    layers = {"embed": nn.Embedding(vocabulary, 8), body: nn.Linear(8, 8), "head": nn.Linear(8, vocabulary, bias=False)}
    model = nn.ModuleDict(layers)
    if tied:
        model["head"].weight = model["embed"].weight
    return model


def stepped(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def as_holdfast(path: Path, state: State) -> None:
    holdfast.save(path, state, process_group=False)


def as_torch(path: Path, state: State) -> None:
    torch.save({key: value.state_dict() for key, value in state.items()}, path)  # noqa: TID251


def as_torch_by_name(path: Path, state: State) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    named = get_optimizer_state_dict(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": named}, path)  # noqa: TID251


def as_dcp(path: Path, state: State) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path
        )


FORMATS = [as_holdfast, as_torch]
NAMED_FORMATS = [*FORMATS, as_torch_by_name, as_dcp]


def load(path: Path, state: State, **arguments: object) -> holdfast.LoadReport:
    return holdfast.load(path, state, process_group=False, **arguments)  # type: ignore[arg-type]


def refusal(path: Path, state: State, **arguments: object) -> str:
    with pytest.raises(InvalidError) as caught:
        load(path, state, **arguments)
    return str(caught.value)


def require_continued(
    model: nn.Module, optimizer: torch.optim.Optimizer, old: nn.Module, old_optimizer: torch.optim.Optimizer
) -> None:
    """Parameters and state are those of another model, whose parameters have the same order."""
    for mine, theirs in zip(model.parameters(), old.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in old_optimizer.state[theirs].items():
            assert torch.equal(optimizer.state[mine][key], value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_a_prefix_of_a_wrapper_is_proposed_and_removed(tmp_path: Path, prefix: str) -> None:
    old = net()
    torch.save({"model": {f"{prefix}{name}": each for name, each in old.state_dict().items()}}, tmp_path / "c.pt")  # noqa: TID251
    torch.save({f"{prefix}{name}": each for name, each in old.state_dict().items()}, tmp_path / "bare.pt")  # noqa: TID251
    for path in (tmp_path / "c.pt", tmp_path / "bare.pt"):
        model = net(seed=1)
        for strict in (True, False):
            said = refusal(path, {"model": model}, strict=strict)
            assert "nothing of the state is in the checkpoint: 4 missing" in said
            assert f"pass rename={{{prefix!r}: ''}}, which finds all" in said
        load(path, {"model": model}, rename={prefix: ""})
        assert all(map(torch.equal, model.parameters(), old.parameters()))


def test_weights_of_a_trained_wrapper_go_on_with_their_moments(tmp_path: Path) -> None:
    """The model's dict has the prefix; Holdfast's own optimizer state goes by the names of that dict."""
    old = net()
    optimizer = stepped(old)
    wrapped = {f"module.{name}": each for name, each in old.named_parameters()}
    as_holdfast(tmp_path / "c", {"model": wrapped, "optimizer": optimizer})
    model = net(seed=1)
    new = torch.optim.AdamW(model.parameters())
    assert "pass rename={'module.': ''}" in refusal(tmp_path / "c", {"model": model, "optimizer": new})
    load(tmp_path / "c", {"model": model, "optimizer": new}, rename={"module.": ""})
    require_continued(model, new, old, optimizer)
    assert new.param_groups[0]["weight_decay"] == 0.2


@pytest.mark.parametrize("save", NAMED_FORMATS)
@pytest.mark.parametrize(
    "rule", [{"backbone": "trunk"}, {"model.backbone": "model.trunk"}, {"back*": "trunk*", "trunkbone": "trunk"}]
)
def test_a_renamed_backbone(tmp_path: Path, save: Callable[[Path, State], None], rule: dict[str, str]) -> None:
    old = net()
    optimizer = stepped(old)
    save(tmp_path / "c", {"model": old, "optimizer": optimizer})
    model = net(body="trunk", seed=1)
    new = torch.optim.AdamW(model.parameters())
    load(tmp_path / "c", {"model": model, "optimizer": new}, rename=rule)
    require_continued(model, new, old, optimizer)


def test_another_key_for_the_model(tmp_path: Path) -> None:
    old = net()
    optimizer = stepped(old)
    as_holdfast(tmp_path / "c", {"net": old, "optimizer": optimizer, "step": 3})
    model = net(seed=1)
    new = torch.optim.AdamW(model.parameters())
    said = refusal(tmp_path / "c", {"model": model})
    assert "At its top the checkpoint has net, optimizer, step. " in said and "pass rename={'net': 'model'}" in said
    load(tmp_path / "c", {"model": model, "optimizer": new}, rename={"net": "model"})
    require_continued(model, new, old, optimizer)


def test_several_modules_of_one_optimizer(tmp_path: Path) -> None:
    """The names of parameters in the optimizer then begin with the key of the module."""
    old = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    optimizer = stepped(nn.ModuleDict(old))
    as_holdfast(tmp_path / "c", {**old, "optimizer": optimizer})
    model = {"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)}
    new = torch.optim.AdamW(nn.ModuleDict(model).parameters())
    load(tmp_path / "c", {**model, "optimizer": new}, rename={"b": "c"})
    require_continued(nn.ModuleDict(model), new, nn.ModuleDict(old), optimizer)


def test_a_new_head_beside_the_old_rest(tmp_path: Path) -> None:
    old = net()
    as_holdfast(tmp_path / "c", {"model": old})
    model = net(seed=1)
    model["classes"] = nn.Linear(8, 3)
    report = load(tmp_path / "c", {"model": model}, strict=False)
    assert report.missing == ("model.classes.bias", "model.classes.weight")
    assert torch.equal(model["backbone"].weight, old["backbone"].weight)


@pytest.mark.parametrize("save", FORMATS)
@pytest.mark.parametrize("vocabulary", [13, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_another_vocabulary_with_its_moments(
    tmp_path: Path, save: Callable[[Path, State], None], vocabulary: int, tied: bool
) -> None:
    old = net(tied=tied)
    optimizer = stepped(old)
    save(tmp_path / "c", {"model": old, "optimizer": optimizer})
    model = net(vocabulary, seed=1, tied=tied)
    before = model["embed"].weight.detach().clone()
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    said = refusal(tmp_path / "c", {"model": model, "optimizer": new}, strict=False)
    assert f"of another shape: model.embed.weight: ({vocabulary}, 8) here and (10, 8) in the checkpoint" in said
    partial = {"model.embed.weight"} if tied else {"model.embed.*", "model.head"}
    report = load(tmp_path / "c", {"model": model, "optimizer": new}, partial=partial, hyperparameters=False)
    both = min(vocabulary, 10)
    weights = [model["embed"].weight] if tied else [model["embed"].weight, model["head"].weight]
    for weight, saved in zip(weights, (old["embed"].weight, old["head"].weight), strict=False):
        assert torch.equal(weight[:both], saved[:both])
        for key in ("exp_avg", "exp_avg_sq"):
            moment = new.state[weight][key]
            assert torch.equal(moment[:both], optimizer.state[saved][key][:both])
            assert moment.shape == weight.shape and not moment[both:].any()
        assert new.state[weight]["step"] == 1
    assert torch.equal(model["embed"].weight[both:], before[both:])
    assert report.partial[0] == PartlyFilled("model.embed.weight", (both, 8), (vocabulary, 8), (10, 8))
    assert len(report.partial) == 3 * len(weights)
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (0.5, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    new.step()


def test_what_an_optimizer_has_beyond_the_overlap_stays(tmp_path: Path) -> None:
    old = net()
    as_holdfast(tmp_path / "c", {"model": old, "optimizer": stepped(old)})
    model = net(13, seed=1)
    new = stepped(model)
    before = new.state[model["embed"].weight]["exp_avg"].clone()
    load(tmp_path / "c", {"model": model, "optimizer": new}, partial="model.*")
    assert torch.equal(new.state[model["embed"].weight]["exp_avg"][10:], before[10:])


def test_weights_of_hugging_face(tmp_path: Path) -> None:
    old = net()
    save_file({f"transformer.{name}": each for name, each in old.state_dict().items()}, tmp_path / "model.safetensors")
    model = net(12, body="trunk", seed=1)
    rename = {"transformer.": "", "backbone": "trunk"}
    partial = ["model.embed.weight", "model.head.weight"]
    report = load(tmp_path, {"model": model}, rename=rename, partial=partial)
    assert torch.equal(model["trunk"].weight, old["backbone"].weight)
    assert torch.equal(model["embed"].weight[:10], old["embed"].weight)
    assert [each.filled for each in report.partial] == [(10, 8), (10, 8)]


@pytest.mark.parametrize("save", NAMED_FORMATS)
def test_the_model_alone_of_a_training(tmp_path: Path, save: Callable[[Path, State], None]) -> None:
    old = net()
    save(tmp_path / "c", {"model": old, "optimizer": stepped(old)})
    model = net(seed=1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(tmp_path / "c", {"model": model, "optimizer": new}, only="model.*")
    assert torch.equal(model["head"].weight, old["head"].weight)
    assert new.param_groups[0]["lr"] == 0.5 and not new.state


def test_the_model_alone_of_hugging_face(tmp_path: Path) -> None:
    old = net()
    save_file(dict(old.state_dict()), tmp_path / "model.safetensors")
    model = net(seed=1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5)
    report = load(tmp_path, {"model": model, "optimizer": new, "step": 3}, only="model.*")
    assert all(map(torch.equal, model.parameters(), old.parameters()))
    assert not report.missing and not report.unexpected
    assert new.param_groups[0]["lr"] == 0.5 and not new.state


def test_new_hyperparameters_in_other_groups(tmp_path: Path) -> None:
    old = net()
    groups = [
        {"params": old["embed"].parameters(), "lr": 0.1},
        {"params": [*old["backbone"].parameters(), *old["head"].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    as_holdfast(tmp_path / "c", {"model": old, "optimizer": optimizer})
    model = net(seed=1)
    new = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    assert "expected one value per group" in refusal(tmp_path / "c", {"model": model, "optimizer": new})
    load(tmp_path / "c", {"model": model, "optimizer": new}, hyperparameters=False)
    assert new.param_groups[0]["betas"] == (0.8, 0.9) and new.param_groups[0]["lr"] == 0.5
    require_continued(model, new, old, optimizer)


def test_wrong_rules_and_regions_are_refused(tmp_path: Path) -> None:
    as_holdfast(tmp_path / "c", {"model": net(), "more": {"embed": torch.ones(3)}})
    state: State = {"model": net(seed=1)}
    said = refusal(tmp_path / "c", state, rename={"backbone": "x", "head": "x"})
    assert "makes model.x.weight of both model.backbone.weight and model.head.weight" in said
    assert "rename={'bone': 'x'} matches no name" in refusal(tmp_path / "c", state, rename={"bone": "x"})
    assert "partial='model.embde': matches no name on any rank" in refusal(tmp_path / "c", state, partial="model.embde")
    flat: State = {"more": {"embed": torch.ones(3, 1)}}
    said = refusal(tmp_path / "c", flat, partial="more.embed")
    assert "more.embed: (3, 1) here and (3,) in the checkpoint, which partial cannot fill" in said


def test_moments_of_a_skipped_resized_parameter_are_refused(tmp_path: Path) -> None:
    old = net()
    as_holdfast(tmp_path / "c", {"model": old, "optimizer": stepped(old)})
    model = net(12, seed=1)
    state: State = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    said = refusal(tmp_path / "c", state, skip=["model.embed", "model.head"])
    assert "4 of another shape: optimizer.state.embed.weight.exp_avg: (12, 8) here and (10, 8)" in said


def test_all_differences_at_once(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "gone": torch.ones(2), "loss": torch.ones(())}
    as_holdfast(tmp_path / "c", {"t": tensors})
    state: State = {"t": {"a": torch.ones(3), "b": torch.ones(2).double(), "new": torch.ones(2), "loss": 0.5}}
    said = refusal(tmp_path / "c", state)
    for part in (
        "1 of another shape: t.a: (3,) here and (2,) in the checkpoint",
        "1 of another dtype: t.b (float32 saved, float64 wanted)",
        "1 missing from the checkpoint: t.new",
        "1 unexpected in the checkpoint: t.gone",
        "t.loss is a tensor in the checkpoint and a float here: pass a tensor",
    ):
        assert part in said
    lenient = refusal(tmp_path / "c", state, strict=False)
    assert "1 of another shape: t.a" in lenient and "1 of another dtype: t.b" in lenient
    many: State = {"t": {name: torch.ones(5) for name in tensors}}
    assert "4 of another shape: t.a: (5,) here and (2,) in the checkpoint, t.b" in refusal(tmp_path / "c", many)
    assert "and 1 more" in refusal(tmp_path / "c", many)


def test_values_follow_and_settings_do_not(tmp_path: Path) -> None:
    saved = {"trainer": {"backbone": torch.ones(2), "epoch": 4}, "args": {"backbone": "resnet"}, "step": 2}
    as_holdfast(tmp_path / "c", saved)
    state: State = {"trainer": {"encoder": torch.zeros(2), "age": 0}, "args": {}, "step": 0}
    load(tmp_path / "c", state, rename={"backbone": "encoder", "epoch": "age"})
    assert state == {
        "trainer": {"encoder": state["trainer"]["encoder"], "age": 4},
        "args": {"backbone": "resnet"},
        "step": 2,
    }  # type: ignore[index]
    assert state["trainer"]["encoder"].eq(1).all()  # type: ignore[index]


@pytest.mark.parametrize("rule", [{"": "encoder."}, {"*": "encoder.*"}])
@pytest.mark.parametrize("save", NAMED_FORMATS)
def test_an_optimizer_follows_a_new_prefix(
    tmp_path: Path, save: Callable[[Path, State], None], rule: dict[str, str]
) -> None:
    """Also one that has numbers in place of names, as `torch.save` writes it, and a tensor in its groups."""
    old = net()
    optimizer = stepped(old)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    save(tmp_path / "c", {"model": old, "optimizer": optimizer})
    model = nn.ModuleDict({"encoder": net(seed=1)})
    new = torch.optim.AdamW(model.parameters())
    assert "pass rename={'': 'encoder.'}" in refusal(tmp_path / "c", {"model": model, "optimizer": new})
    load(tmp_path / "c", {"model": model, "optimizer": new}, rename=rule)
    require_continued(model, new, old, optimizer)
    assert new.param_groups[0]["lr"] == 0.25


def test_numbers_of_parameters_are_no_names(tmp_path: Path) -> None:
    old = nn.ParameterList([torch.full((2,), 1.0), torch.full((2,), 2.0)])
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(old):
        parameter.grad = torch.full((2,), float(number))
    optimizer.step()
    as_torch(tmp_path / "c", {"model": old, "optimizer": optimizer})
    model = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    new = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The places of two weights change; the moments belong to places, as in torch.
    load(tmp_path / "c", {"model": model, "optimizer": new}, rename={"0": "t", "1": "0", "t": "1"})
    assert torch.equal(model[0], old[1])
    assert torch.equal(new.state[model[0]]["momentum_buffer"], optimizer.state[old[0]]["momentum_buffer"])


def test_rules_may_name_a_model_beside_its_average(tmp_path: Path) -> None:
    """An optimizer has the names of the model and of its average; it follows the one that rules name."""
    old, average = net(), net(seed=5)
    optimizer = stepped(old)
    as_holdfast(tmp_path / "c", {"model": old, "average": average, "optimizer": optimizer})
    model, other = net(body="trunk", seed=1), net(seed=2)
    new = torch.optim.AdamW(model.parameters())
    state: State = {"model": model, "average": other, "optimizer": new}
    load(tmp_path / "c", state, rename={"model.backbone": "model.trunk"})
    require_continued(model, new, old, optimizer)
    assert all(map(torch.equal, other.parameters(), average.parameters()))


def test_a_resized_tensor_keeps_nothing_of_a_damaged_step(tmp_path: Path) -> None:
    """The newest step has the new vocabulary and is damaged; the one before it has the old one."""
    big = 300_000
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(1, {"m": {"w": torch.ones(10, 4), "z": torch.ones(big)}}).wait()
        manager.save(2, {"m": {"w": torch.full((13, 4), 2.0), "z": torch.full((big,), 2.0)}}).wait()
    pack = max((tmp_path / "run" / "step-000000000002").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[-5000] ^= 1
    pack.write_bytes(content)
    state: State = {"m": {"w": torch.zeros(13, 4), "z": torch.zeros(big)}}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        with pytest.raises(InvalidError, match=r"that a newer, damaged step had begun to fill: m\.w\."):
            manager.load(state, partial="m.w")
        weight = torch.zeros(13, 4)
        assert manager.load({"m": {"w": weight, "z": torch.zeros(big)}}, partial="m.w") == 1
        assert weight[:10].eq(1).all() and not weight[10:].any()


def test_a_manager_starts_from_another_run(tmp_path: Path) -> None:
    old = net()
    optimizer = stepped(old)
    with holdfast.CheckpointManager(tmp_path / "old", process_group=False) as manager:
        manager.save(5, {"model": old, "optimizer": optimizer}).wait()
        model = net(12, body="trunk", seed=1)
        new = torch.optim.AdamW(model.parameters(), lr=0.5)
        state: State = {"model": model, "optimizer": new}
        arguments = {
            "rename": {"backbone": "trunk"},
            "partial": {"model.embed", "model.head"},
            "hyperparameters": False,
        }
        assert manager.load(state, **arguments) == 5  # type: ignore[arg-type]
        # The next step refers to nothing that it did not load.
        manager.save(6, state).wait()
        again = net(12, body="trunk", seed=2)
        assert manager.load({"model": again}, 6) == 6
        assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert manager.load_report is not None
