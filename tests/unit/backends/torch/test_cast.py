"""A load that converts dtypes: state that an optimizer has not made yet, and floats that are never made integers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.errors import InvalidError

Parameters = Iterable[torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


class Training:
    """A layer for each optimizer of torch."""

    def __init__(self, dtype: torch.dtype, *, stepped: bool) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in OPTIMIZERS}).to(dtype)
        self.optimizers = {name: make(self.layers[name].parameters()) for name, make in OPTIMIZERS.items()}
        if stepped:
            self.step()
            self.step()

    @property
    def state(self) -> dict[str, object]:
        return {"layers": self.layers, "optimizers": self.optimizers}

    def step(self) -> None:
        for name, optimizer in self.optimizers.items():
            layer = self.layers[name]

            def loss(layer: nn.Module = layer, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                found: torch.Tensor = layer(torch.ones(1, 4, dtype=next(layer.parameters()).dtype)).square().sum()
                found.backward()
                return found

            loss()
            optimizer.step(loss)

    def dtypes(self) -> dict[str, list[torch.dtype]]:
        found = {}
        for name, optimizer in self.optimizers.items():
            for key, value in optimizer.state[next(self.layers[name].parameters())].items():
                tensors = value if isinstance(value, list) else [value]
                found[f"{name}.{key}"] = [each.dtype for each in tensors if isinstance(each, torch.Tensor)]
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    paths = {}
    for dtype in (torch.bfloat16, torch.float32):
        paths[dtype] = tmp_path_factory.mktemp("saved") / "c"
        holdfast.save(paths[dtype], Training(dtype, stepped=True).state, process_group=False)
    return paths


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float32, torch.float32),
    ],
)
def test_a_fresh_optimizer_gets_the_dtypes_of_a_stepped_one(
    saved: dict[torch.dtype, Path], before: torch.dtype, now: torch.dtype
) -> None:
    stepped, fresh = Training(now, stepped=True), Training(now, stepped=False)
    kept = stepped.dtypes()
    for training in (stepped, fresh):
        holdfast.load(saved[before], training.state, cast=True, process_group=False)
    found = fresh.dtypes()
    # The lengths of an LBFGS history are those of the checkpoint.
    assert {name: {*dtypes} for name, dtypes in found.items()} == {name: {*dtypes} for name, dtypes in kept.items()}
    assert {dtype for dtypes in found.values() for dtype in dtypes} == {now, torch.float32}
    for name in fresh.optimizers:
        ours, theirs = (each.optimizers[name].state[next(each.layers[name].parameters())] for each in (fresh, stepped))
        for key, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[key]), f"{name}.{key}"
    fresh.step()
    stepped.step()
    for ours, theirs in zip(fresh.layers.parameters(), stepped.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == now


class Averaging(torch.optim.Optimizer):
    """Keeps an average in float32, one in the dtype of the parameter, a list of them, and a count of no dimension."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["exact"] = torch.full(parameter.shape, 1 / 3)
                state["like"] = torch.full_like(parameter, 1 / 3)
                state["both"] = [torch.full_like(parameter, 1 / 3), torch.full(parameter.shape, 1 / 3)]
                state["seen"] = torch.zeros(())
            state["seen"] += 1.0


@pytest.mark.parametrize(("before", "now"), [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)])
def test_state_in_a_dtype_of_its_own_keeps_it(tmp_path: Path, before: torch.dtype, now: torch.dtype) -> None:
    def build(dtype: torch.dtype) -> tuple[torch.Tensor, Averaging]:
        parameter = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        return parameter, Averaging([parameter])

    parameter, optimizer = build(before)
    optimizer.step()
    holdfast.save(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, process_group=False)
    parameter, optimizer = build(now)
    holdfast.load(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, cast=True, process_group=False)
    state = optimizer.state[parameter]
    assert [state["exact"].dtype, state["like"].dtype, state["seen"].dtype] == [torch.float32, now, torch.float32]
    assert [each.dtype for each in state["both"]] == [now, torch.float32]
    assert state["exact"][0, 0] == torch.tensor(1 / 3)
    assert state["like"][0, 0] == torch.tensor(1 / 3, dtype=before).to(now)


def test_a_count_of_a_custom_class_is_not_rounded(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Averaging([parameter])
    optimizer.step()
    optimizer.state[parameter]["seen"].fill_(1001.0)  # bfloat16 has 1000 and 1004.
    holdfast.save(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, process_group=False)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Averaging([parameter])
    holdfast.load(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, cast=True, process_group=False)
    assert optimizer.state[parameter]["seen"] == 1001.0


def test_a_moment_of_no_dimension_follows_its_parameter(tmp_path: Path) -> None:
    def build(dtype: torch.dtype) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        return parameter, torch.optim.NAdam([parameter])

    parameter, optimizer = build(torch.float32)
    parameter.square().backward()
    optimizer.step()
    holdfast.save(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, process_group=False)
    parameter, optimizer = build(torch.bfloat16)
    holdfast.load(tmp_path / "c", {"w": parameter, "optimizer": optimizer}, cast=True, process_group=False)
    found = {key: value.dtype for key, value in optimizer.state[parameter].items()}
    counts = {"step": torch.float32, "mu_product": torch.float32}
    assert found == counts | {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


@pytest.mark.parametrize("system", ["torch", "dcp"])
def test_moments_of_another_system_are_converted(tmp_path: Path, system: str) -> None:
    def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2).to(dtype)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()

    model, optimizer = build(torch.bfloat16)
    step(model, optimizer)
    for entries in optimizer.state.values():
        entries["step"] = entries["step"].to(torch.int64)  # As older optimizers count.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if system == "torch":
        path = tmp_path / "c.pt"
        torch.save(state, path)  # noqa: TID251
    else:
        path = tmp_path / "c"
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=path, no_dist=True)
    for stepped in (False, True):
        other, fresh = build(torch.float32)
        if stepped:
            step(other, fresh)
        holdfast.load(path, {"model": other, "optimizer": fresh}, cast=True, process_group=False)
        for parameter, before in zip(other.parameters(), model.parameters(), strict=True):
            entries = fresh.state[parameter]
            assert {key: value.dtype for key, value in entries.items()} == dict.fromkeys(
                ("step", "exp_avg", "exp_avg_sq"), torch.float32
            )
            assert entries["step"] == 1 and torch.equal(entries["exp_avg"], optimizer.state[before]["exp_avg"].float())
        step(other, fresh)


def test_without_cast_new_state_is_as_saved(saved: dict[torch.dtype, Path]) -> None:
    training = Training(torch.bfloat16, stepped=False)
    holdfast.load(saved[torch.bfloat16], training.state, process_group=False)
    assert training.dtypes() == Training(torch.bfloat16, stepped=True).dtypes()


QUANTISED = {
    "codes into floats": (torch.int8, torch.bfloat16),
    "packed codes into floats": (torch.uint8, torch.float32),
    "packed words into floats": (torch.int32, torch.float16),
    "floats into codes": (torch.float32, torch.int8),
    "small floats into integers": (torch.float8_e4m3fn, torch.uint8),
    "complex into integers": (torch.complex64, torch.int64),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_floats_and_integers_never_fill_each_other(tmp_path: Path, name: str) -> None:
    def build(dtype: torch.dtype, value: float) -> tuple[list[torch.Tensor], dict[str, object]]:
        tensors = [torch.full((3, 2), value).to(dtype) for _ in range(4)]
        model, keeper = nn.Module(), nn.Parameter(torch.ones(3, 2))
        model.weight = nn.Parameter(tensors[0], requires_grad=False)
        model.register_buffer("codes", tensors[1])
        optimizer = torch.optim.SGD([keeper], lr=0.1, momentum=0.9)
        optimizer.state[keeper]["momentum_buffer"] = tensors[2]
        return tensors, {"model": model, "keeper": keeper, "optimizer": optimizer, "history": [tensors[3]]}

    before, now = QUANTISED[name]
    holdfast.save(tmp_path / "c", build(before, 2.0)[1], process_group=False)
    tensors, state = build(now, 1.0)
    for cast in (False, True):
        with pytest.raises(InvalidError, match="one side is quantised") as caught:
            holdfast.load(tmp_path / "c", state, cast=cast, strict=not cast, process_group=False)
        text = str(caught.value)
        assert "4 floats on one side and integers on the other: model.weight" in text and "cast=True" not in text
        assert f"({str(before).removeprefix('torch.')} saved, {str(now).removeprefix('torch.')} wanted)" in text
        assert all(bool((each.to(torch.complex64) == 1).all()) for each in tensors)


def test_what_cast_does_convert_beside_what_it_does_not(tmp_path: Path) -> None:
    saved = {
        "half": torch.full((2,), 0.5),
        "codes": torch.ones(2, dtype=torch.int8),
        "count": torch.tensor(7),
        "steps": torch.tensor([9.0]),
        "mask": torch.tensor([True, False]),
        "keep": torch.tensor([1.0, 0.0]),
        "index": torch.tensor([3, 4], dtype=torch.int32),
    }
    holdfast.save(tmp_path / "c", saved, process_group=False)

    def zeros() -> dict[str, torch.Tensor]:
        return {
            "half": torch.zeros(2, dtype=torch.bfloat16),
            "count": torch.zeros(()),
            "steps": torch.zeros(1, dtype=torch.int64),
            "mask": torch.zeros(2),
            "keep": torch.zeros(2, dtype=torch.bool),
            "index": torch.zeros(2, dtype=torch.int64),
        }

    state = zeros()
    holdfast.load(tmp_path / "c", state, cast=True, process_group=False)
    for name, tensor in state.items():
        assert torch.equal(tensor, saved[name].to(tensor.dtype)) and tensor.any(), name
    refused = {**zeros(), "codes": torch.zeros(2)}
    with pytest.raises(InvalidError) as caught:
        holdfast.load(tmp_path / "c", refused, process_group=False)
    text = str(caught.value)
    assert "1 floats on one side and integers on the other: codes (int8 saved, float32 wanted)" in text
    assert "6 of another dtype: half" in text and "pass cast=True to convert" in text
    holdfast.load(tmp_path / "c", refused, cast=True, skip="codes", process_group=False)
    assert refused["count"] == 7 and not refused["codes"].any()
