"""Layouts stated by hand, over ranks as threads, with an optimizer whose state lies alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch

from holdfast.core.format.names import rank_of_pack, step_folder
from holdfast.stored.repository.catalog import read_index, read_manifest
from tests.unit.backends.rank_threads import State, declared, fresh_store, load_on, refused, save_on

SHAPE = (8, 4)
WHOLE = torch.arange(32.0).reshape(SHAPE)


def half(rank: int, **more: object) -> State:
    return {"w": declared(WHOLE[4 * rank : 4 * rank + 4].clone(), SHAPE, start=(4 * rank, 0), **more)}


def test_replicas_share_what_they_state_to_hold() -> None:
    store = fresh_store()
    whole = torch.arange(40_000.0)

    def state_of(rank: int) -> State:
        """Ranks 0 and 2 hold one half, 1 and 3 the other."""
        start = 20_000 * (rank % 2)
        return {
            "w": declared(
                whole[start : start + 20_000].clone(), (40_000,), flat_start=start, replicas=(rank, (rank + 2) % 4)
            )
        }

    reports = save_on(4, store, 1, state_of)
    assert [each.bytes for each in reports] == [40_000] * 4  # type: ignore[attr-defined]
    manifest = read_manifest(store, step_folder(1))
    pieces = read_index(store, step_folder(1), manifest).pieces_of("w")
    assert sorted((piece.region.start, rank_of_pack(piece.pack)) for piece in pieces) == [
        (0, 0),
        (10_000, 2),
        (20_000, 1),
        (30_000, 3),
    ]
    (state,) = load_on(1, store, 1, lambda _: {"w": torch.zeros(40_000)})
    assert isinstance(state["w"], torch.Tensor)
    assert torch.equal(state["w"], whole)


@pytest.mark.parametrize(
    ("state_of", "said"),
    [
        pytest.param(lambda rank: half(rank, replicas=[0, 1]), "w", id="halves called replicas"),
        pytest.param(
            lambda rank: half(0, replicas=[0, 1] if rank else None), "w", id="one says replicas, one does not"
        ),
        pytest.param(lambda rank: half(0), "w", id="replicas that nobody states"),
        pytest.param(lambda rank: half(rank, replicas=[rank, 7]), "w", id="a replica that is no rank"),
        pytest.param(lambda rank: half(rank) if rank else {"w": WHOLE.clone()}, "w", id="declared here, plain there"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused_on_every_rank(
    state_of: Callable[[int], State], said: str
) -> None:
    store = fresh_store()
    for message in refused(save_on(2, store, 1, state_of)):
        assert re.search(rf"\b{said}\b", message), message
    assert not [entry for entry in store.list() if "manifest" in entry.key]


def test_a_rank_whose_declaration_is_bad_refuses_for_all() -> None:
    def state_of(rank: int) -> State:
        return half(rank) if rank else {"w": declared(torch.zeros(4), SHAPE, flat_start=30)}

    for message in refused(save_on(2, fresh_store(), 1, state_of)):
        assert "w: flat_start=30" in message


def test_a_rank_that_holds_nothing_may_leave_the_name_out_or_hold_an_empty_tensor() -> None:
    for nothing in (
        {},
        {"w": declared(torch.zeros(0, 4), SHAPE, start=(8, 0))},
        {"w": declared(torch.zeros(0), SHAPE, flat_start=0)},
    ):
        store = fresh_store()
        save_on(
            2, store, 1, lambda rank, nothing=nothing: nothing if rank else {"w": declared(WHOLE, SHAPE, start=(0, 0))}
        )  # type: ignore[misc]
        (state,) = load_on(1, store, 1, lambda _: {"w": torch.zeros(SHAPE)})
        assert isinstance(state["w"], torch.Tensor)
        assert torch.equal(state["w"], WHOLE)


# ------------------------------------------------------------------------------------------------- with an optimizer

PARAMETERS = {"first.weight": (6, 4), "first.bias": (6,), "second.weight": (4, 6)}
SPLIT_DIM = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
"""A hand-written tensor-parallel pair: the first layer split by columns of its output, the second by its input."""

Locals = dict[str, tuple[torch.nn.Parameter, object]]
"""A parameter as a rank holds it, and its start: a tuple for a box, a number for a run, None for all of it."""


def whole_parameters(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in PARAMETERS.items()}


def all_of(_: int, seed: int) -> Locals:
    return {name: (torch.nn.Parameter(each), None) for name, each in whole_parameters(seed).items()}


def tensor_parallel(rank: int, seed: int) -> Locals:
    found: Locals = {}
    for name, each in whole_parameters(seed).items():
        dim = SPLIT_DIM[name]
        length = each.shape[dim] // 2
        start = tuple(length * rank if at == dim else 0 for at in range(each.ndim))
        found[name] = (torch.nn.Parameter(each.narrow(dim, length * rank, length).clone()), start)
    return found


def flat_thirds(rank: int, seed: int) -> Locals:
    """All parameters end to end, cut in three; a rank has no entry of what it holds nothing of."""
    whole = whole_parameters(seed)
    share = -(-sum(each.numel() for each in whole.values()) // 3)
    found: Locals = {}
    at = 0
    for name, each in whole.items():
        start, stop = max(share * rank - at, 0), min(share * (rank + 1) - at, each.numel())
        if start < stop:
            found[name] = (torch.nn.Parameter(each.reshape(-1)[start:stop].clone()), start)
        at += each.numel()
    return found


HOLDINGS: Mapping[str, tuple[int, Callable[[int, int], Locals]]] = {
    "whole": (1, all_of),
    "tensor parallel": (2, tensor_parallel),
    "flat thirds": (3, flat_thirds),
}


def part_of(whole: torch.Tensor, local: torch.Tensor, start: object) -> torch.Tensor:
    """Return what of a whole tensor a local one holds."""
    if start is None:
        return whole
    if isinstance(start, int):
        return whole.reshape(-1)[start : start + local.numel()]
    assert isinstance(start, tuple)
    return whole[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))]


def state_with_optimizer(
    parameters: Locals, gradients: Mapping[str, torch.Tensor] | None, *, nested: bool = True
) -> State:
    """A declared state and an AdamW that has stepped with given gradients, if there are any."""
    optimizer = torch.optim.AdamW([each for each, _ in parameters.values()], lr=0.25)
    if gradients is not None:
        for factor in (1.0, 2.0):
            for name, (each, start) in parameters.items():
                each.grad = factor * part_of(gradients[name], each, start).clone()
            optimizer.step()
    model: State = {}
    for name, (each, start) in parameters.items():
        layout: dict[str, object] = {"flat_start" if isinstance(start, int) else "start": start}
        model[name] = each if start is None else declared(each, PARAMETERS[name], **layout)
    return {"model": model, "optimizer": optimizer} if nested else {**model, "optimizer": optimizer}


def stepped_whole() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """What parameters and optimizer state are after the same steps in one process, without Holdfast."""
    parameters = all_of(0, 1)
    state = state_with_optimizer(parameters, whole_parameters(2))
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    return (
        {name: each.detach() for name, (each, _) in parameters.items()},
        {name: dict(optimizer.state[each]) for name, (each, _) in parameters.items()},
    )


@pytest.mark.parametrize("stepped", [True, False], ids=["stepped before", "never stepped"])
@pytest.mark.parametrize("loaded", HOLDINGS)
@pytest.mark.parametrize("saved", HOLDINGS)
def test_parameters_and_adamw_from_one_holding_to_the_other(saved: str, loaded: str, stepped: bool) -> None:
    """AdamW works element by element, so that each holding comes to the very same bits."""
    store = fresh_store()
    save_ranks, save_holding = HOLDINGS[saved]
    load_ranks, load_holding = HOLDINGS[loaded]
    outcomes = save_on(
        save_ranks, store, 3, lambda rank: state_with_optimizer(save_holding(rank, 1), whole_parameters(2))
    )
    assert not [each for each in outcomes if isinstance(each, BaseException)], outcomes
    index = read_index(store, step_folder(3), read_manifest(store, step_folder(3)))
    assert {fqn: each.global_shape for fqn, each in index.tensors.items() if fqn.endswith("exp_avg")} == {
        f"optimizer.state.{name}.exp_avg": shape for name, shape in PARAMETERS.items()
    }
    targets = [load_holding(rank, 5) for rank in range(load_ranks)]
    gradients = whole_parameters(7) if stepped else None
    states = load_on(load_ranks, store, 3, lambda rank: state_with_optimizer(targets[rank], gradients))
    parameters, moments = stepped_whole()
    for target, state in zip(targets, states, strict=True):
        optimizer = state["optimizer"]
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.param_groups[0]["lr"] == 0.25
        for name, (local, start) in target.items():
            assert torch.equal(local.detach(), part_of(parameters[name], local, start)), name
            found = optimizer.state[local]
            assert found["step"].item() == 2.0
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[key], part_of(moments[name][key], local, start)), (name, key)


@pytest.mark.parametrize("nested", [True, False], ids=["in a dict", "at the top"])
def test_ranks_that_hold_different_parameters_name_their_state_alike(nested: bool) -> None:
    """Rank 0 holds but one parameter, rank 1 all three: a name must not hang on the others beside it."""
    store = fresh_store()
    outcomes = save_on(
        3, store, 1, lambda rank: state_with_optimizer(flat_thirds(rank, 1), whole_parameters(2), nested=nested)
    )
    assert not [each for each in outcomes if isinstance(each, BaseException)], outcomes
    names = set(read_index(store, step_folder(1), read_manifest(store, step_folder(1))).tensors)
    assert names == {
        name
        for parameter in PARAMETERS
        for name in (
            f"model.{parameter}" if nested else parameter,
            *(f"optimizer.state.{parameter}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
        )
    }


def test_optimizer_state_that_is_shaped_otherwise_is_not_taken_to_lie_alike() -> None:
    """A factor of each half differs by rank and nobody said how it lies: refused, never mixed."""

    def state_of(rank: int) -> State:
        state = state_with_optimizer(tensor_parallel(rank, 1), whole_parameters(2))
        optimizer = state["optimizer"]
        assert isinstance(optimizer, torch.optim.AdamW)
        parameter = optimizer.param_groups[0]["params"][0]
        optimizer.state[parameter]["row"] = torch.full((5,), float(rank))
        return state

    for message in refused(save_on(2, fresh_store(), 1, state_of)):
        assert "optimizer.state.first.weight.row" in message


def test_optimizer_state_of_a_parameter_declared_as_a_list_is_refused() -> None:
    """No single tensor of its state could be told to lie as several do."""
    parts = [torch.nn.Parameter(torch.zeros(16)), torch.nn.Parameter(torch.zeros(16))]
    optimizer = torch.optim.AdamW(parts, lr=0.1)
    for part in parts:
        part.grad = torch.ones(16)
    optimizer.step()
    state: State = {"w": declared(parts, SHAPE, flat_start=[0, 16]), "optimizer": optimizer}
    (message,) = refused(save_on(1, fresh_store(), 1, lambda _: state))
    assert re.search(r"\bw\b.*list", message), message
