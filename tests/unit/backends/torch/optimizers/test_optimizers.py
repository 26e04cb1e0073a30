"""Optimizers: by FQN, nothing invented, nothing lost, groups in any order."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.backends.torch.optimizers.names import StateNames, named_parameters_of, ties_of
from holdfast.backends.torch.optimizers.state import new_state_tensor
from holdfast.errors import InvalidError

RATES = {"0.weight": 0.5, "0.bias": 0.25, "1.weight": 0.125, "1.bias": 0.0625}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(lambda: model(torch.ones(1, 3)).sum()) if isinstance(
            optimizer, torch.optim.LBFGS
        ) else optimizer.step()


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }


def assert_same_state(first: dict[str, dict[str, object]], second: dict[str, dict[str, object]]) -> None:
    assert first.keys() == second.keys()
    for name, state in first.items():
        assert state.keys() == second[name].keys(), name
        for key, value in state.items():
            other = second[name][key]
            if isinstance(value, torch.Tensor):
                assert isinstance(other, torch.Tensor)
                assert value.dtype == other.dtype and torch.equal(value, other), f"{name}.{key}"
            else:
                assert value == other and type(value) is type(other), f"{name}.{key}"


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW capturable off, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_stock_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    first = net()
    one = OPTIMIZERS[name](first.parameters())
    step(first, one)
    holdfast.save(tmp_path / "c", {"model": first, "optimizer": one})
    torch.manual_seed(1)
    second = net()
    two = OPTIMIZERS[name](second.parameters())
    report = holdfast.load(tmp_path / "c", {"model": second, "optimizer": two})
    assert report.missing == report.unexpected == ()
    assert_same_hyperparameters(one, two)
    if not isinstance(one, torch.optim.LBFGS):
        assert_same_state(state_by_name(first, one), state_by_name(second, two))
    step(first, one)
    step(second, two)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("saves_names", [False, True])
def test_names_that_an_optimizer_lists_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_names: bool
) -> None:
    # As two pipeline stages would save them, each with its own names; then one rank has all, without the wrapper.
    model = net()
    named = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
    first = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}])
    step(model, first)
    with monkeypatch.context() as patched:
        if saves_names:  # As in checkpoints of older versions.
            patched.setattr("holdfast.backends.torch.optimizers.state.LISTS_OF_MEMBERS", ("params",))
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": first})
    second = torch.optim.AdamW(model.named_parameters())
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": second})
    assert second.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert_same_state(state_by_name(model, first), state_by_name(model, second))


def test_one_optimizer_for_each_parameter_searches_the_modules_once(tmp_path: Path) -> None:
    # As optimizers that step in backward. The search of each went over all tensors of the state.
    class Watched(dict[str, torch.Tensor]):
        passes = 0

        def items(self) -> ItemsView[str, torch.Tensor]:
            self.passes += 1
            return super().items()

    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(20)])
    model[1].weight = model[0].weight
    tensors = Watched(model.state_dict(keep_vars=True))
    state = StateNames({"model": model}, {"model": tensors}, {}, {})
    found: dict[str, str] = {}
    ties: dict[str, str] = {}
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        names, _, _ = named_parameters_of(optimizer, "optimizer", state)
        found |= dict.fromkeys(names.values(), "")
        ties |= ties_of(names, state)
    assert [*found] == [f"{number}.weight" for number in range(20) if number != 1]
    assert ties == {"1.weight": "0.weight"}
    assert tensors.passes == 2


class Preconditioned(torch.optim.Optimizer):
    """Keeps lists of tensors for each parameter, as SOAP and Shampoo do."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            averages = self.state[parameter].setdefault("averages", [torch.zeros_like(parameter)] * 2)
            averages[0].lerp_(parameter.grad, 0.5)
            parameter.sub_(averages[1])


@pytest.mark.parametrize("as_dtensor", [False, True])
def test_tensors_in_containers_of_the_state_are_made_for_their_parameter(tmp_path: Path, as_dtensor: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.arange(6.0).view(3, 2)
        models = [nn.Parameter(distribute_tensor(local, mesh, [Shard(0)]) if as_dtensor else +local) for _ in range(2)]
        for each in models:
            each.grad = torch.ones_like(each)
        one, two = map(Preconditioned, ([each] for each in models))
        states = [{"model": {"w": models[0]}, "optimizer": one}, {"model": {"w": models[1]}, "optimizer": two}]
        one.step()
        holdfast.save(tmp_path / "c", states[0])
        holdfast.load(tmp_path / "c", states[1])
        averages = two.state[models[1]]["averages"]
        assert type(averages[0]) is type(models[0].data) and averages[0] is averages[1]
        one.step()
        two.step()
        assert torch.equal(models[0], models[1])
        # Where the state has them, they are filled in place: a compiled step holds them.
        holdfast.load(tmp_path / "c", states[1])
        assert two.state[models[1]]["averages"][0] is averages[0]
        assert averages[0].sum() == 3
    finally:
        dist.destroy_process_group()


def assert_same_hyperparameters(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> None:
    for ours, theirs in zip(one.param_groups, two.param_groups, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"params"}:
            if isinstance(ours[key], torch.Tensor):
                assert torch.equal(ours[key], theirs[key])
            else:
                assert ours[key] == theirs[key] and type(ours[key]) is type(theirs[key]), key


class Watched(torch.optim.AdamW):
    """An optimizer that says when it is stepped."""

    stepped = 0

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        type(self).stepped += 1
        return super().step(closure)


def test_an_optimizer_that_never_stepped_is_saved_without_inventing_anything(tmp_path: Path) -> None:
    model = net()
    optimizer = Watched(model.parameters())
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("step"))
    optimizer.register_state_dict_pre_hook(lambda *_: fired.append("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: fired.append("load"))
    before = [parameter.clone() for parameter in model.parameters()]
    Watched.stepped = 0
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh = net()
    other = Watched(fresh.parameters())
    other.register_step_pre_hook(lambda *_: fired.append("step"))
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other})
    assert Watched.stepped == 0
    assert "step" not in fired
    assert len(optimizer.state) == len(other.state) == 0
    assert not [name for name in holdfast.open_checkpoint(tmp_path / "c").tensors if name.startswith("optimizer")]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unstepped_checkpoint_makes_a_stepped_optimizers_state_absent(tmp_path: Path) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    assert optimizer.state
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not any(optimizer.state.values())


def test_a_partly_stepped_optimizer_keeps_exactly_its_part(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model[1].requires_grad_(False)
    step(model, optimizer)
    assert len(optimizer.state) == 2
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh = net()
    other = torch.optim.AdamW(fresh.parameters())
    step(fresh, other)
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other})
    assert_same_state(
        state_by_name(model, optimizer), {name: each for name, each in state_by_name(fresh, other).items() if each}
    )


def test_state_is_filled_in_place_where_there_is_some(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    saved = state_by_name(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    step(model, optimizer)
    held = optimizer.state[model[0].weight]["exp_avg"]
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert optimizer.state[model[0].weight]["exp_avg"] is held
    assert_same_state(saved, state_by_name(model, optimizer))


def grouped(model: nn.Module, order: list[str], *, rates: bool) -> torch.optim.AdamW:
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name]], "lr": RATES[name] if rates else 0.9} for name in order]
    return torch.optim.AdamW(groups)


def test_rates_follow_the_parameter_when_groups_stand_in_another_order(tmp_path: Path) -> None:
    model = net()
    optimizer = grouped(model, list(RATES), rates=True)
    step(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    fresh = net()
    other = grouped(fresh, list(reversed(RATES)), rates=False)
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == list(reversed(RATES.values()))
    assert_same_state(state_by_name(model, optimizer), state_by_name(fresh, other))


def test_conflicting_hyperparameters_inside_a_target_group_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": grouped(model, list(RATES), rates=True)})
    fresh = net()
    before = fresh[0].weight.detach().clone()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.9)
    with pytest.raises(InvalidError, match=r"lr=0\.5.*lr=0\.25"):
        holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.9
    assert torch.equal(fresh[0].weight, before)


def test_equal_hyperparameters_of_two_groups_fill_one_group(tmp_path: Path) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": grouped(model, list(RATES), rates=False)})
    fresh = net()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.9


def with_empty_group(model: nn.Module, rates: tuple[float, float, float]) -> torch.optim.AdamW:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    biases = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "lr": rates[0]}, {"params": [], "lr": rates[1]}, {"params": biases, "lr": rates[2]}]
    return torch.optim.AdamW(groups)


def test_hyperparameters_of_an_empty_group_are_kept(tmp_path: Path) -> None:
    model = net()
    optimizer = with_empty_group(model, (0.5, 0.25, 0.125))
    holdfast.save(tmp_path / "numbered", {"model": model, "optimizer": optimizer.state_dict()})
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for source in ("c", "numbered"):
        other = with_empty_group(model, (1.0, 1.0, 1.0))
        holdfast.load(tmp_path / source, {"model": model, "optimizer": other})
        assert [group["lr"] for group in other.param_groups] == [0.5, 0.25, 0.125]
        assert other.param_groups[1]["params"] == []
    other = with_empty_group(model, (1.0, 1.0, 1.0))
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": other}, skip="optimizer.param_groups.*")
    assert [group["lr"] for group in other.param_groups] == [1.0, 1.0, 1.0]


def test_hyperparameters_saved_as_tensors_come_back_as_tensors(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.3))
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": other})
    rate = other.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert torch.equal(rate, torch.tensor(0.3))


@pytest.mark.parametrize("saved", [0.5, torch.tensor(0.5)])
def test_a_rate_that_the_optimizer_keeps_as_a_tensor_stays_one_on_its_device(
    tmp_path: Path, saved: float | torch.Tensor
) -> None:
    model = net()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=saved)})
    for device in ("cpu", "meta"):  # A GPU keeps a rate in its memory, as the meta device does here.
        other = torch.optim.AdamW(model.parameters())
        other.param_groups[0]["lr"] = torch.tensor(0.1, device=device)
        holdfast.load(tmp_path / "c", {"model": model, "optimizer": other})
        rate = other.param_groups[0]["lr"]
        assert isinstance(rate, torch.Tensor) and rate.device.type == device and rate.dtype == torch.float32
        assert device == "meta" or rate == 0.5


def test_saved_optimizers_are_keyed_by_fqn(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint = holdfast.open_checkpoint(tmp_path / "c")
    assert "optimizer.state.0.weight.exp_avg" in checkpoint.tensors
    assert "optimizer.state.1.bias.step" in checkpoint.tensors


def test_a_parameter_that_belongs_to_no_module_of_the_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"optimizer: parameter 0 of group 0.*belongs to no module"):
        holdfast.save(tmp_path / "c", {"optimizer": torch.optim.SGD(net().parameters())})
    assert not (tmp_path / "c").exists()


def test_an_optimizer_over_two_modules_and_a_loose_parameter(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[dict[str, object], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        left, right, loose = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.randn(2))
        optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters(), loose], lr=0.1)
        (right(left(torch.ones(1, 2))) * loose).sum().backward()
        if seed == 0:
            optimizer.step()
        return {"left": left, "right": right, "loose": loose, "optimizer": optimizer}, optimizer

    saved, one = build(0)
    holdfast.save(tmp_path / "c", saved)
    fresh, two = build(1)
    holdfast.load(tmp_path / "c", fresh)
    for ours, theirs in zip(one.param_groups[0]["params"], two.param_groups[0]["params"], strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(one.state[ours]["exp_avg"], two.state[theirs]["exp_avg"])


def test_saving_changes_nothing_of_an_optimizer(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = state_by_name(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert_same_state(before, state_by_name(model, optimizer))


def schedulers() -> dict[str, object]:
    rates = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda o: rates.LambdaLR(o, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda o: rates.MultiplicativeLR(o, lambda epoch: 0.9),
        "StepLR": lambda o: rates.StepLR(o, 2),
        "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 4, 4]),
        "ConstantLR": lambda o: rates.ConstantLR(o),
        "LinearLR": lambda o: rates.LinearLR(o),
        "ExponentialLR": lambda o: rates.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: rates.PolynomialLR(o, 9),
        "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 9),
        "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
        "CyclicLR": lambda o: rates.CyclicLR(o, 0.01, 0.1),
        "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, total_steps=20),
        "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
        "SequentialLR": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)], [2]),
        "ChainedScheduler": lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)]),
    }


def test_no_stock_scheduler_is_forgotten() -> None:
    rates = torch.optim.lr_scheduler
    stock = {
        name
        for name in rates.__all__
        if isinstance(getattr(rates, name), type) and name not in ("LRScheduler", "_LRScheduler")
    }
    assert stock == set(schedulers())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(schedulers()))
def test_every_stock_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, object]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, schedulers()[name](optimizer)  # type: ignore[operator]

    def advance(optimizer: torch.optim.Optimizer, scheduler: object, times: int) -> list[float]:
        found = []
        for number in range(times):
            optimizer.step()
            scheduler.step(*([1.0 + number] if name == "ReduceLROnPlateau" else []))  # type: ignore[attr-defined]
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    model, optimizer, scheduler = build()
    advance(optimizer, scheduler, 3)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    fresh, other, resumed = build()
    holdfast.load(tmp_path / "c", {"model": fresh, "optimizer": other, "scheduler": resumed})
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert advance(other, resumed, 5) == advance(optimizer, scheduler, 5)


def test_grad_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    holdfast.save(tmp_path / "c", {"scaler": scaler})
    fresh = torch.amp.GradScaler("cpu")
    holdfast.load(tmp_path / "c", {"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 512.0


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [
        ("step", {}, "cpu"),
        ("step", {"capturable": True}, "meta"),
        ("step", {"fused": True}, "meta"),
        ("exp_avg", {}, "meta"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_new_state_of_no_dimension_lies_where_the_optimizer_would_put_it(
    key: str, group: dict[str, object], device: str, shape: tuple[int, ...]
) -> None:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    assert new_state_tensor(parameter, group, key, torch.float32, ()).device.type == device
