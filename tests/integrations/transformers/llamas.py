"""The Llama of the tests of activations, and its training on one process and on the ranks of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import activations
from holdfast.activations.runtime.peak import peak_bytes
from tests.support.gloo_worlds import World

STEPS, ROWS, LENGTH, LAYERS, VOCABULARY = 20, 8, 64, 8, 1024
BUDGET = "45%"


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        **{"use_cache": False, **options},
    )
    return LlamaForCausalLM(config).train()


def step_of(model: LlamaForCausalLM, number: int = 0) -> Callable[[], torch.Tensor]:
    batch = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss

    return step


def trained(model: LlamaForCausalLM, rank: int = 0) -> list[tuple[float, list[torch.Tensor]]]:
    """Train, and return the loss and this rank's gradients of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    found = []
    for number in range(STEPS):
        loss = float(step_of(model, 2 * number + rank)().detach())
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append((loss, [(each.to_local() if hasattr(each, "to_local") else each).clone() for each in gradients]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def is_same(one: list[tuple[float, list[torch.Tensor]]], other: list[tuple[float, list[torch.Tensor]]]) -> bool:
    """Return whether two trainings have the same losses and gradients to the bit."""
    return all(
        loss == other_loss and all(torch.equal(*pair) for pair in zip(gradients, other_gradients, strict=True))
        for (loss, gradients), (other_loss, other_gradients) in zip(one, other, strict=True)
    )


def sharded(world: World) -> dict[str, Any]:
    """Fit on all ranks, train plainly and under the plan; return what the test asks."""

    def made() -> LlamaForCausalLM:
        model = llama()
        for each in (*model.model.layers, model):
            fully_shard(each)
        return model

    torch.set_num_threads(1)
    model = made()
    plan = activations.fit(model, step_of(model, world.rank), budget=BUDGET)
    plain, planned = made(), made()
    with plan.apply(planned) as managed:
        same = is_same(trained(planned, world.rank), trained(plain, world.rank))
        report = managed.report()
        _, peak = peak_bytes(step_of(planned, world.rank), torch.device("cpu"))
        return {"same": same, "share": peak / plan.solved.budget_bytes, "report": report}
