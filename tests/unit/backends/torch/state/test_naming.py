"""Names: the same under every wrapper, unique, and never confused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import holdfast
from holdfast.errors import InvalidError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))


PLAIN = sorted(f"model.{name}" for name in net().state_dict())


def compiled_whole() -> nn.Module:
    return torch.compile(net())  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    model = net()
    model[1] = torch.compile(model[1])  # type: ignore[assignment]
    return model


def compiled_in_place() -> nn.Module:
    model = net()
    model.compile()
    return model


def activations_checkpointed() -> nn.Module:
    model = net()
    model[1] = checkpoint_wrapper(model[1])
    return model


def all_at_once() -> nn.Module:
    model = net()
    model[1] = torch.compile(checkpoint_wrapper(model[1]))  # type: ignore[arg-type, assignment]
    return torch.compile(model)  # type: ignore[return-value]


WRAPPERS = [compiled_whole, compiled_inside, compiled_in_place, activations_checkpointed, all_at_once]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", WRAPPERS)
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    assert sorted(checkpoint.tensors) == PLAIN
    bare = net()
    holdfast.load(tmp_path / "c", {"model": bare, "optimizer": torch.optim.SGD(bare.parameters(), momentum=0.9)})
    for saved, loaded in zip(model.state_dict().values(), bare.state_dict().values(), strict=True):
        assert torch.equal(saved, loaded)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", WRAPPERS)
def test_a_bare_models_checkpoint_fills_a_wrapped_one(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    bare = net()
    holdfast.save(tmp_path / "c", {"model": bare})
    model = make()
    holdfast.load(tmp_path / "c", {"model": model})
    for saved, loaded in zip(bare.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(saved, loaded)


def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    holdfast.save(tmp_path / "c", {"model": model})
    assert sorted(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["model.module.bias", "model.module.weight"]


def test_a_child_whose_name_ends_like_a_wrapper_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.my_orig_mod = nn.Linear(2, 2)  # type: ignore[assignment]
    holdfast.save(tmp_path / "c", {"model": model})
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    assert sorted(checkpoint.tensors) == ["model.my_orig_mod.bias", "model.my_orig_mod.weight"]


def test_colliding_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"a\.b"):
        holdfast.save(tmp_path / "c", {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    assert not (tmp_path / "c").exists()


def test_colliding_names_of_module_and_dict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"layer\.weight"):
        holdfast.save(tmp_path / "c", {"layer": nn.Linear(1, 1), "layer.weight": torch.zeros(1)})


def test_colliding_names_of_a_target_are_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"a": {"b": torch.zeros(1)}})
    first, second = torch.ones(1), torch.ones(1)
    with pytest.raises(InvalidError, match=r"a\.b"):
        holdfast.load(tmp_path / "c", {"a.b": first, "a": {"b": second}})
    assert first.item() == second.item() == 1.0


def test_colliding_names_of_values_are_refused_or_kept_apart(tmp_path: Path) -> None:
    state: dict[str, object] = {"a.b": 1, "a": {"b": 2, "c": torch.zeros(1)}}
    try:
        holdfast.save(tmp_path / "c", state)
    except InvalidError as error:
        assert "a.b" in str(error)
        return
    state["a.b"] = 0
    state["a"]["b"] = 0  # type: ignore[index]
    holdfast.load(tmp_path / "c", state)
    assert (state["a.b"], state["a"]["b"]) == (1, 2)  # type: ignore[index]


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0b", "\ud800"])
def test_names_no_pack_can_carry_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidError):
        holdfast.save(tmp_path / "c", {name: torch.ones(1)})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["../../up", "/root", "name with blanks", "ключ", "a/b", "step-000000000001", "."])
def test_any_other_name_is_data_never_a_path(tmp_path: Path, name: str) -> None:
    holdfast.save(tmp_path / "c", {name: torch.ones(2)})
    target = torch.zeros(2)
    holdfast.load(tmp_path / "c", {name: target})
    assert target.tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    assert "model.head.weight" not in checkpoint.tensors
    assert checkpoint.aliases["model.head.weight"] == "model.embed.weight"
    fresh = Tied()
    second = torch.optim.AdamW(fresh.parameters())
    report = holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": second})
    assert fresh.head.weight is fresh.embed.weight
    assert torch.equal(fresh.embed.weight, model.embed.weight)
    assert torch.equal(second.state[fresh.embed.weight]["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])
    assert report.missing == report.unexpected == ()


def test_tied_weights_fill_an_untied_model(tmp_path: Path) -> None:
    model = Tied()
    holdfast.save(tmp_path / "c", {"model": model})
    fresh = Untied()
    holdfast.load(tmp_path / "c", {"model": fresh})
    assert torch.equal(fresh.embed.weight, model.embed.weight)
    assert torch.equal(fresh.head.weight, model.embed.weight)
    assert fresh.head.weight is not fresh.embed.weight


def test_an_untied_checkpoint_of_different_values_does_not_fill_a_tied_model(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": Untied()})
    model = Tied()
    before = model.embed.weight.detach().clone()
    with pytest.raises(InvalidError, match=r"model\.head\.weight: shares its memory with model\.embed\.weight"):
        holdfast.load(tmp_path / "c", {"model": model})
    assert torch.equal(model.embed.weight, before)


def test_an_untied_checkpoint_of_equal_values_fills_a_tied_model(tmp_path: Path) -> None:
    untied = Untied()
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    holdfast.save(tmp_path / "c", {"model": untied})
    model = Tied()
    holdfast.load(tmp_path / "c", {"model": model})
    assert torch.equal(model.embed.weight, untied.embed.weight)


def test_leaving_out_the_first_of_tied_names_keeps_the_other(tmp_path: Path) -> None:
    model = Tied()
    report = holdfast.save(tmp_path / "c", {"model": model}, skip="model.embed.*")
    assert report.skipped == ("model.embed.weight",)
    assert list(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["model.head.weight"]


def test_buffers_that_are_not_persistent_are_not_saved(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("derived", torch.ones(2), persistent=False)
    holdfast.save(tmp_path / "c", {"model": model})
    assert list(holdfast.open_checkpoint(tmp_path / "c").tensors) == ["model.kept"]


class Extra(nn.Module):
    def __init__(self, content: object) -> None:
        super().__init__()
        self.content = content

    def get_extra_state(self) -> object:
        return self.content

    def set_extra_state(self, state: object) -> None:
        self.content = state


def test_extra_state_of_values_and_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(Extra({"seen": 3, "mean": torch.arange(3.0)}), Extra([1, "two"]))
    holdfast.save(tmp_path / "c", {"model": model})
    fresh = nn.Sequential(Extra(None), Extra(None))
    holdfast.load(tmp_path / "c", {"model": fresh})
    content = fresh[0].content
    assert isinstance(content, dict)
    assert content["seen"] == 3
    assert torch.equal(content["mean"], torch.arange(3.0))
    assert fresh[1].content == [1, "two"]


EXTRA_STATES = {
    "none": None,
    "value": {"seen": 3},
    "empty": torch.empty(0, dtype=torch.uint8),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "floats": torch.arange(5.0),
    "inside": {"scale": torch.arange(2.0)},
}


@pytest.mark.parametrize("present", EXTRA_STATES)
@pytest.mark.parametrize("saved", EXTRA_STATES)
def test_extra_state_may_change_its_kind_and_size(tmp_path: Path, saved: str, present: str) -> None:
    # That of an FP8 module is empty, or None, until its first step.
    holdfast.save(tmp_path / "c", {"model": nn.Sequential(Extra(EXTRA_STATES[saved]))})
    fresh = nn.Sequential(Extra(copy.deepcopy(EXTRA_STATES[present])))
    report = holdfast.load(tmp_path / "c", {"model": fresh})
    assert report.missing == report.unexpected == ()
    content, expected = fresh[0].content, EXTRA_STATES[saved]
    if isinstance(expected, torch.Tensor):
        assert isinstance(content, torch.Tensor)
        assert content.dtype == expected.dtype and torch.equal(content, expected)
    else:
        assert repr(content) == repr(expected)


def test_extra_state_that_the_checkpoint_lacks_or_that_is_left_out(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": nn.Sequential(Extra(torch.arange(5.0)), nn.Linear(2, 2))}, skip="*_extra*")
    fresh = nn.Sequential(Extra(torch.arange(3.0)), nn.Linear(2, 2))
    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: model\.0\._extra_state"):
        holdfast.load(tmp_path / "c", {"model": fresh})
    holdfast.load(tmp_path / "c", {"model": fresh}, skip="model.0._extra_state")
    content = fresh[0].content
    assert isinstance(content, torch.Tensor) and torch.equal(content, torch.arange(3.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, lambda m: torch.compile(checkpoint_wrapper(m))])
def test_extra_state_of_a_wrapped_module_inside_another(tmp_path: Path, wrap) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(2, 2), wrap(nn.Sequential(Extra("inner"))))
    holdfast.save(tmp_path / "c", {"model": model})
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Extra(None)))
    inner, wrapped_inner = plain[1][0], Extra(None)
    holdfast.load(tmp_path / "c", {"model": plain})
    holdfast.load(tmp_path / "c", {"model": nn.Sequential(nn.Linear(2, 2), wrap(nn.Sequential(wrapped_inner)))})
    assert (inner.content, wrapped_inner.content) == ("inner", "inner")


class Own(nn.Module):
    """Keeps a count by methods of its own instead of extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), count

    def state_dict(self, *args: object, prefix: str = "", **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        entries = super().state_dict(*args, prefix=prefix, **kwargs)  # type: ignore[call-overload]
        entries[f"{prefix}count"] = self.count
        return entries  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, object], *args: object, **kwargs: object) -> object:  # type: ignore[override]
        rest = dict(state_dict)
        self.count = rest.pop("count")  # type: ignore[assignment]
        return super().load_state_dict(rest, *args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile])
def test_entries_of_a_modules_own_methods_come_back_or_are_missed(tmp_path: Path, wrap) -> None:  # type: ignore[no-untyped-def]
    holdfast.save(tmp_path / "c", {"model": wrap(Own(7))})
    loaded = Own(0)
    holdfast.load(tmp_path / "c", {"model": wrap(loaded)})
    assert loaded.count == 7


def nested() -> nn.Module:
    """Return a module around one that has methods of its own; torch calls only those of the outermost on a load."""
    outer = nn.Module()
    outer.layer = Own(7)
    return outer


def test_entries_that_nothing_loads_are_refused_at_the_save(tmp_path: Path) -> None:
    model = nested()
    model.register_state_dict_post_hook(lambda module, entries, prefix, _: entries.update({f"{prefix}lost": 1}))
    with pytest.raises(InvalidError, match=r"model: state_dict\(\) of Module makes layer\.count, lost, .*load"):
        holdfast.save(tmp_path / "c", {"model": model})
    assert not (tmp_path / "c").exists()
    holdfast.save(tmp_path / "c", {"model": model}, skip=["model.layer.count", "model.lost"])
    holdfast.load(tmp_path / "c", {"model": model}, skip=["model.layer.count", "model.lost"])


class Quantised(nn.Linear):
    """As bitsandbytes' 4-bit layers: beside the weight it saves tensors that it does not load."""

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


class Loading(Quantised):
    """Loads them, too."""

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        state_dict.pop(f"{prefix}weight.absmax", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked() -> nn.Module:
    """Return a module whose hook loads what the method of its layer saves."""
    model = nn.Sequential(Quantised(2, 2))
    model.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: state.pop(f"{prefix}0.weight.absmax", None))
    return model


def test_tensors_that_a_layer_saves_and_does_not_load_are_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"model: state_dict\(\) of Sequential makes 0\.weight\.absmax, which no"):
        holdfast.save(tmp_path / "c", {"model": nn.Sequential(Quantised(2, 2))})
    for number, model in enumerate([nn.Sequential(Loading(2, 2)), hooked()]):
        holdfast.save(tmp_path / f"{number}", {"model": model})
        holdfast.load(tmp_path / f"{number}", {"model": model})


def test_a_tensor_that_nothing_loads_is_left_out_of_both(tmp_path: Path) -> None:
    # As the error of the save says: the way to train an adapter over a quantised model.
    model = nn.Sequential(Quantised(2, 2))
    holdfast.save(tmp_path / "c", {"model": model}, skip="*.absmax")
    expected = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    report = holdfast.load(tmp_path / "c", {"model": model}, skip="*.absmax")
    assert torch.equal(model[0].weight, expected)
    assert report.skipped == ("model.0.weight.absmax",)


def test_a_lazy_saves_hooks_load_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(Quantised(2, 2))
    settings = holdfast.Settings(staging="lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.CheckpointManager(tmp_path / "r", process_group=False, settings=settings) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer}, skip="*.absmax").wait()
        with pytest.raises(InvalidError, match=r"0\.weight\.absmax"):
            holdfast.save(tmp_path / "c", {"model": model}, process_group=False)


def test_entries_that_the_loading_module_does_not_take_are_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": Own(7)})
    loading = nn.Module()
    loading.linear = nn.Linear(2, 2)
    loading.register_state_dict_post_hook(lambda module, entries, prefix, _: entries.update({f"{prefix}count": 1}))
    with pytest.raises(InvalidError, match=r"model: Module took nothing of .*count"):
        holdfast.load(tmp_path / "c", {"model": loading})


def test_extra_state_that_nothing_sets_is_refused_at_the_save(tmp_path: Path) -> None:
    class Getting(nn.Module):
        def get_extra_state(self) -> object:
            return 3

    with pytest.raises(InvalidError, match=r"model: state_dict\(\) of Sequential makes 0\._extra_state, which no"):
        holdfast.save(tmp_path / "c", {"model": nn.Sequential(Getting())})


def test_an_expanded_buffer_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(InvalidError, match=r"model\.mask: a load could not fill it: it is expanded.*contiguous\(\)"):
        holdfast.save(tmp_path / "c", {"model": model})
    assert not (tmp_path / "c").exists()
