"""Tensor subclasses are saved as their inner tensors, filled in place, and refused by name where they cannot be."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError
from tests.support.tensor_subclasses import BLOCK, Blocks, Momentum, Options, Pair, Rounding, blocks_of


def save(path: Path, state: dict[str, object], **options: Any) -> None:
    holdfast.save(path, state, process_group=False, **options)


def load(path: Path, state: dict[str, object], **options: Any) -> Any:
    return holdfast.load(path, state, process_group=False, **options)


def quantised(seed: int, **context: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    model[0].weight = nn.Parameter(blocks_of(model[0].weight, **context), requires_grad=False)
    model[1].register_buffer("mask", blocks_of(torch.randn(4, 4), **context))
    return model


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(
        torch.equal(a.dequantized(), b.dequantized()) if isinstance(a, Blocks) else torch.equal(a, b) for a, b in pairs
    )


def test_parameters_and_buffers_are_filled_in_place(tmp_path: Path) -> None:
    model, other = quantised(0), quantised(1)
    weight, codes = other[0].weight, other[0].weight.codes
    save(tmp_path / "c", {"model": model})
    names = set(holdfast.open_checkpoint(tmp_path / "c").tensors)
    assert {"model.0.weight.codes", "model.0.weight.scale", "model.0.weight.qmap", "model.1.mask.codes"} <= names
    assert "model.0.weight" not in names
    load(tmp_path / "c", {"model": other})
    assert same(model, other) and other[0].weight is weight and weight.codes is codes


def test_one_in_a_dict_a_list_and_an_objects_state(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            self.kept = blocks_of(torch.full((2, 4), value))

        def state_dict(self) -> dict[str, object]:
            return {"kept": self.kept}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.kept = state["kept"]

    def state(value: float) -> dict[str, Any]:
        loose, listed = blocks_of(torch.full((4,), value)), [blocks_of(torch.full((8,), value)), 3]
        return {"loose": {"a": loose}, "listed": listed, "object": Holder(value)}

    first, second = state(2.0), state(5.0)
    save(tmp_path / "c", first)
    load(tmp_path / "c", second)
    for made in (second["loose"]["a"], second["listed"][0], second["object"].kept):
        assert torch.allclose(made.dequantized(), torch.tensor(2.0))
    with pytest.raises(
        InvalidError, match=r"listed\.0: is a tensor subclass in the checkpoint, and the state has none"
    ):
        load(tmp_path / "c", {"listed": [None, 0]})


def test_nested_subclasses(tmp_path: Path) -> None:
    first, second = (Pair(blocks_of(torch.full((4,), value)), torch.full((4,), value)) for value in (1.0, 2.0))
    save(tmp_path / "c", {"pair": first})
    assert "pair.coarse.codes" in holdfast.open_checkpoint(tmp_path / "c").tensors
    load(tmp_path / "c", {"pair": second})
    assert torch.equal(second.coarse.dequantized(), first.coarse.dequantized()) and second.rest[0] == 1


def trained(steps: int) -> tuple[nn.Module, Momentum]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = Momentum(model.parameters())
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: Momentum, steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.ones(1, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_optimizer_state_resumes_to_the_same_loss(tmp_path: Path, steps_before: int) -> None:
    model, optimizer = trained(3)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    expected = step(model, optimizer, 3)
    model, optimizer = trained(steps_before)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert isinstance(optimizer.state[model.weight]["momentum"], Blocks)
    assert step(model, optimizer, 3) == expected


def test_a_fresh_optimizer_makes_only_classes_that_its_own_module_has(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh = nn.Linear(8, 4)
    with pytest.raises(
        InvalidError, match=r"momentum: is a tests\.support\.tensor_subclasses\.Blocks .*, which SGD does not make"
    ):
        load(tmp_path / "c", {"model": fresh, "optimizer": torch.optim.SGD(fresh.parameters())}, strict=False)
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign.state = optimizer.state
    with pytest.raises(InvalidError, match="SGD does not make"):
        save(tmp_path / "refused", {"model": model, "optimizer": foreign})


def test_optimizer_state_with_a_context_that_cannot_be_built_is_refused_by_the_save(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for state in optimizer.state.values():
        state["momentum"].context["options"] = Options()
    with pytest.raises(InvalidError, match="could not make this"):
        save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not (tmp_path / "c").exists()


def test_a_context_of_enums_named_tuples_and_dtypes_is_compared(tmp_path: Path) -> None:
    options = Options()
    save(tmp_path / "c", {"model": quantised(0, options=options, device=torch.device("cpu"))})
    other = quantised(1, options=options, device=torch.device("meta"))
    load(tmp_path / "c", {"model": other})  # Another device is no difference.
    with pytest.raises(
        InvalidError, match=r"model\.0\.weight: the context of this tests\.support\.tensor_subclasses\.Blocks differs"
    ):
        load(tmp_path / "c", {"model": quantised(1, options=options._replace(rounding=Rounding.DOWN))})
    with pytest.raises(InvalidError, match="context"):
        load(tmp_path / "c", {"model": quantised(1, options=options, more=True)})


def test_a_context_of_other_objects_is_refused_by_name_and_type(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"model\.0\.weight: the tensor subclass keeps a builtins\.object") as caught:
        save(tmp_path / "c", {"model": quantised(0, handle=object())})
    assert "model.1.mask" in str(caught.value)  # All at once.
    assert not (tmp_path / "c").exists()


def test_a_plain_tensor_and_a_subclass_do_not_fill_each_other(tmp_path: Path) -> None:
    plain, blocks = torch.ones(2, 4), blocks_of(torch.ones(2, 4))
    save(tmp_path / "plain", {"w": plain})
    save(tmp_path / "blocks", {"w": blocks})
    with pytest.raises(
        InvalidError, match=r"w: is a plain tensor in the checkpoint and a tests\.support\.tensor_subclasses\.Blocks"
    ):
        load(tmp_path / "plain", {"w": blocks})
    with pytest.raises(
        InvalidError, match=r"w is a tests\.support\.tensor_subclasses\.Blocks in the checkpoint and a tensor here"
    ):
        load(tmp_path / "blocks", {"w": plain})
    model = nn.Sequential(nn.Linear(8, 4))
    save(tmp_path / "model", {"model": quantised(0)[:1]})
    with pytest.raises(
        InvalidError, match=r"model\.0\.weight is a tests\.support\.tensor_subclasses\.Blocks in the checkpoint"
    ):
        load(tmp_path / "model", {"model": model})


def test_another_shape_names_both(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": blocks_of(torch.ones(2, 4))})
    with pytest.raises(
        InvalidError, match=r"w: the shape of this .* differs: \(2, 4\) in the checkpoint, \(4, 4\) here"
    ):
        load(tmp_path / "c", {"w": blocks_of(torch.ones(4, 4))})


def test_patterns_take_all_of_it_or_nothing(tmp_path: Path) -> None:
    model, other = quantised(0), quantised(1)
    save(tmp_path / "part", {"model": model}, only="*.0.*")
    assert "model.1.mask.codes" not in holdfast.open_checkpoint(tmp_path / "part").tensors
    before = other[0].weight.dequantized()
    save(tmp_path / "c", {"model": model})
    load(tmp_path / "c", {"model": other}, skip="model.0.weight")
    assert torch.equal(other[0].weight.dequantized(), before)
    assert torch.equal(other[1].mask.dequantized(), model[1].mask.dequantized())
    with pytest.raises(InvalidError, match=r"model\.0\.weight: only= and skip= leave out some of its inner tensors"):
        save(tmp_path / "torn", {"model": model}, skip="model.0.weight.scale")
    with pytest.raises(InvalidError, match=r"model\.0\.weight: only= and skip= select"):
        load(tmp_path / "c", {"model": other}, skip="model.0.weight.scale")


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"w\.codes: two leaves of the state have this name"):
        save(tmp_path / "c", {"w": blocks_of(torch.ones(4)), "w.codes": torch.ones(1)})


def test_a_part_that_is_declared_by_hand_is_refused(tmp_path: Path) -> None:
    part = holdfast.Sharded(blocks_of(torch.ones(4)), global_shape=(8,), start=(0,))
    with pytest.raises(InvalidError, match="w: Blocks is a tensor subclass, of which a part is declared"):
        save(tmp_path / "c", {"w": part})


def test_inner_tensors_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    weight = blocks_of(torch.ones(4))
    weight.scale = weight.scale.to("meta")
    with pytest.raises(InvalidError, match=r"w\.scale: is a meta tensor"):
        save(tmp_path / "c", {"w": weight})


def test_tied_subclasses_are_stored_once(tmp_path: Path) -> None:
    def tied(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[0].weight = model[1].weight = nn.Parameter(blocks_of(torch.full((4, 4), value)), requires_grad=False)
        return model

    model, other = tied(1.0), tied(2.0)
    save(tmp_path / "c", {"model": model})
    assert len(holdfast.open_checkpoint(tmp_path / "c").manifest.aliases) == 3
    load(tmp_path / "c", {"model": other})
    assert same(model, other)


def test_reading_without_a_template_gives_the_inner_tensors(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save(tmp_path / "c", {"model": quantised(0), "optimizer": optimizer, "stepped": model})
    state: Any = holdfast.read(tmp_path / "c")
    assert set(state["model"]["0.weight"]) == {"codes", "scale", "qmap"}
    assert state["model"]["0.weight"]["codes"].shape == (4, 8)
    assert state["optimizer"]["state"]["weight"]["momentum"]["scale"].numel() == 32 // BLOCK


@pytest.mark.parametrize("staging", ["copy", "lazy"])
def test_training_goes_on_while_it_is_saved(tmp_path: Path, staging: Literal["copy", "lazy"]) -> None:
    model, optimizer = trained(2)
    expected = optimizer.state[model.weight]["momentum"].dequantized()
    handle = holdfast.async_save(
        tmp_path / "c",
        {"model": model, "optimizer": optimizer},
        process_group=False,
        settings=holdfast.Settings(staging=staging),
    )
    step(model, optimizer, 1)
    handle.wait()
    model, optimizer = trained(0)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert torch.equal(optimizer.state[model.weight]["momentum"].dequantized(), expected)


def test_state_dicts_with_numbers_load_into_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    save(tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = step(model, optimizer, 2)
    model, optimizer = trained(0)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert step(model, optimizer, 2) == expected


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_rename_moves_inner_tensors_and_optimizer_state(tmp_path: Path, steps_before: int) -> None:
    def state(name: str, steps: int) -> dict[str, Any]:
        torch.manual_seed(steps)
        model = nn.ModuleDict({name: nn.Linear(8, 4), "frozen": quantised(steps)})
        optimizer = Momentum(model[name].parameters())
        step(model[name], optimizer, steps)
        whole = Momentum([model["frozen"][0].weight])
        whole.state[model["frozen"][0].weight]["momentum"] = blocks_of(torch.full((4, 8), float(steps)))
        return {"model": model, "optimizer": optimizer, "whole": whole, "listed": [blocks_of(torch.full((4,), steps))]}

    first, second = state("a", 3), state("b", steps_before)
    second["model"]["still"], second["other"] = second["model"].pop("frozen"), second.pop("listed")
    save(tmp_path / "c", first)
    load(tmp_path / "c", second, rename={"a": "b", "frozen": "still", "listed": "other"})
    assert same(first["model"]["frozen"], second["model"]["still"])
    made = second["whole"].state[second["model"]["still"][0].weight]["momentum"]
    assert torch.allclose(made.dequantized(), torch.tensor(3.0))
    assert torch.allclose(second["other"][0].dequantized(), torch.tensor(3.0))
    expected = step(first["model"]["a"], first["optimizer"], 2)
    assert step(second["model"]["b"], second["optimizer"], 2) == expected


def test_a_rename_that_swaps_two_names_compares_the_context_that_goes_with_the_elements(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": blocks_of(torch.ones(4), tag="a"), "b": blocks_of(torch.ones(4), tag="b")})
    swap, zeros = {"a": "kept", "b": "a", "kept": "b"}, torch.zeros(4)
    load(tmp_path / "c", {"a": blocks_of(zeros, tag="b"), "b": blocks_of(zeros, tag="a")}, rename=swap)
    with pytest.raises(InvalidError, match=r"a: the context of this .* differs"):
        load(tmp_path / "c", {"a": blocks_of(zeros, tag="a"), "b": blocks_of(zeros, tag="b")}, rename=swap)


@pytest.mark.parametrize("options", [{}, {"partial": "*", "cast": True}])
def test_inner_tensors_of_another_shape_or_dtype_are_never_filled(tmp_path: Path, options: dict[str, Any]) -> None:
    def coded(codes: torch.dtype, blocks: int) -> Blocks:
        return Blocks(torch.ones(8, dtype=codes), torch.ones(blocks), torch.zeros(2), {})

    save(tmp_path / "c", {"w": coded(torch.int8, 2)})
    for other, message in (
        (coded(torch.uint8, 2), r"w\.codes: .* is int8 \(8,\) in the checkpoint and uint8 \(8,\) here"),
        (coded(torch.int8, 4), r"w\.scale: .* is float32 \(2,\) in the checkpoint and float32 \(4,\) here"),
    ):
        with pytest.raises(InvalidError, match=message):
            load(tmp_path / "c", {"w": other}, **options)


def test_a_load_of_plain_tensors_keeps_none_of_them(tmp_path: Path) -> None:
    state: dict[str, object] = {"w": torch.ones(4)}
    save(tmp_path / "c", state)
    kept = weakref.ref(state["w"])
    gc.disable()
    try:
        load(tmp_path / "c", state)
        state.clear()
        assert kept() is None
    finally:
        gc.enable()


def test_an_inner_tensor_that_is_made_anew_is_refused(tmp_path: Path) -> None:
    class Halved(Blocks):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return value / 2 if name == "scale" else value

    with pytest.raises(InvalidError, match=r"w\.scale: .*Halved makes this inner tensor anew"):
        save(tmp_path / "c", {"w": Halved(torch.ones(4, dtype=torch.int8), torch.ones(1), torch.zeros(2), {})})


def test_the_rename_that_an_error_proposes_counts_them(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model": nn.ModuleDict({"backbone": quantised(0)})})
    with pytest.raises(InvalidError, match=r"pass rename=\{'backbone': 'encoder'\}, which finds all"):
        load(tmp_path / "c", {"model": nn.ModuleDict({"encoder": quantised(1)})})
