"""A Llama of Transformers trains in less than half the memory, with the losses and gradients of plain training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")

import holdfast  # noqa: E402
from holdfast import activations  # noqa: E402
from holdfast.activations.runtime.peak import peak_bytes  # noqa: E402
from tests.integrations.transformers.llamas import BUDGET, LAYERS, STEPS, is_same, llama, step_of, trained  # noqa: E402
from tests.support.gloo_worlds import Case, run_world  # noqa: E402


def seconds_of(step: Callable[[], torch.Tensor]) -> float:
    step()
    began = time.process_time()
    for _ in range(3):
        step()
    return time.process_time() - began


@pytest.fixture(scope="module")
def plan() -> activations.ActivationPlan:
    torch.set_num_threads(1)
    model = llama()
    return activations.fit(model, step_of(model), budget=BUDGET)


def test_a_llama_trains_within_its_budget_to_the_bit(plan: activations.ActivationPlan) -> None:
    plain, model = llama(), llama()
    with plan.apply(model) as managed:
        assert is_same(trained(model), trained(plain))
        assert f"{LAYERS * STEPS} calls as planned, 0 of other signatures" in managed.report()
        _, peak = peak_bytes(step_of(model), torch.device("cpu"))
    _, most = peak_bytes(step_of(plain), torch.device("cpu"))
    assert peak <= plan.solved.budget_bytes <= 0.46 * most
    checkpointed = llama()
    checkpointed.gradient_checkpointing_enable()
    with plan.apply(model):
        seconds = [seconds_of(step_of(each)) for each in (plain, model, checkpointed)]
    _, least = peak_bytes(step_of(checkpointed), torch.device("cpu"))
    print(
        f"slowdown {seconds[1] / seconds[0]:.3f} at {peak / most:.2f} of the peak; gradient_checkpointing_enable "
        f"{seconds[2] / seconds[0]:.3f} at {least / most:.2f}"
    )


def test_a_checkpoint_of_a_managed_model_loads_into_the_plain_one(
    plan: activations.ActivationPlan, tmp_path: Path
) -> None:
    model, plain = llama(), llama()
    with plan.apply(model):
        trained(model)
        holdfast.save(tmp_path / "step", {"model": model})
    with torch.no_grad():
        for each in plain.parameters():
            each.zero_()
    holdfast.load(tmp_path / "step", {"model": plain})
    for (name, one), (other_name, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other_name and torch.equal(one, other)


def test_a_cache_of_keys_is_refused_with_the_remedy() -> None:
    model = llama(use_cache=True)
    try:
        said = activations.fit(model, step_of(model), budget=BUDGET).explain()
    except holdfast.InvalidError as error:
        said = str(error)
    assert "use_cache=False" in said


def test_enabled_checkpointing_is_refused_with_the_remedy() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(holdfast.InvalidError, match=r"gradient_checkpointing_disable\(\)"):
        activations.fit(model, step_of(model), budget=BUDGET)


def test_a_sharded_llama_trains_within_its_budget_to_the_bit(tmp_path: Path) -> None:
    case = Case("tests.integrations.transformers.llamas:sharded")
    for found in run_world(2, [case], tmp_path, deadline_seconds=280).values(case.key()):
        assert isinstance(found, dict) and found["same"]
        assert found["share"] <= 1
        assert f"{LAYERS * STEPS} calls as planned, 0 of other signatures" in found["report"]
