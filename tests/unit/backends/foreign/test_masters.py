"""A checkpoint that keeps weights in two precisions, loaded into models of either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import InvalidError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "deepspeed"


class Model(torch.nn.Module):
    """What the fixtures were trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.zeros(1))
        self.emb = torch.nn.Embedding(37, 10)
        self.l1 = torch.nn.Linear(10, 14)
        self.norm = torch.nn.LayerNorm(14)
        self.frozen = torch.nn.Linear(14, 15).requires_grad_(False)
        self.l2 = torch.nn.Linear(15, 10)
        self.head = torch.nn.Linear(10, 37, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def cast_to(self, dtype: torch.dtype) -> Model:
        """Return the model with its parameters in another type, buffers as they are."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self


def decayed(model: Model) -> torch.optim.AdamW:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    small = [each for name, each in trained.items() if name.endswith("bias") or "norm" in name or name == "gain"]
    large = [each for each in trained.values() if all(each is not other for other in small)]
    return torch.optim.AdamW([{"params": large}, {"params": small}])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_weights_come_from_the_copy_that_has_the_type_of_the_target(dtype: torch.dtype) -> None:
    folder = FIXTURES / "bf16_dp2" / "ckpt"
    checkpoint = holdfast.open_checkpoint(folder)
    model = Model().cast_to(dtype)
    optimizer = decayed(model)
    # Frozen weights have no master copy, and are cast.
    holdfast.load(folder, {"model": model, "optimizer": optimizer}, cast=True)
    differing = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        master, weight = (
            checkpoint.read(f"optimizer.state.{name}.master"),
            checkpoint.read(f"model.{name}", None, "torch"),
        )
        expected = torch.from_numpy(master) if dtype is torch.float32 else weight
        assert torch.equal(parameter, expected), name
        differing += not torch.equal(torch.from_numpy(master), weight.float())
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}, name
    assert differing, "the fixture's masters say more than its weights"


def test_a_master_that_is_all_there_is_needs_no_second_place() -> None:
    folder = FIXTURES / "zero3_dp4" / "ckpt"
    checkpoint = holdfast.open_checkpoint(folder)
    model = Model()
    holdfast.load(folder, {"model": model, "optimizer": decayed(model)})
    weight = checkpoint.read("optimizer.state.l1.weight.master", None, "torch")
    assert torch.equal(model.l1.weight, weight)
    with pytest.raises(InvalidError, match=r"l1\.weight.*float32 saved, bfloat16 wanted"):
        holdfast.load(folder, {"model": Model().cast_to(torch.bfloat16)}, skip="model.frozen.*")


def test_an_optimizer_that_keeps_masters_gets_them() -> None:
    folder = FIXTURES / "bf16_dp2" / "ckpt"
    model = Model().cast_to(torch.bfloat16)
    optimizer = decayed(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            optimizer.state[parameter]["master"] = torch.zeros(parameter.shape)
    holdfast.load(folder, {"model": model, "optimizer": optimizer})
    master = holdfast.open_checkpoint(folder).read("optimizer.state.l1.weight.master", None, "torch")
    assert torch.equal(optimizer.state[model.l1.weight]["master"], master)


def test_master_copies_follow_a_renamed_and_resized_weight() -> None:
    folder = FIXTURES / "bf16_dp2" / "ckpt"
    checkpoint = holdfast.open_checkpoint(folder)
    model = Model().cast_to(torch.float32)
    model.tokens = torch.nn.Embedding(40, 10)
    model.head.weight = model.tokens.weight
    del model.emb
    optimizer = decayed(model)
    partial, state = {"model.tokens.weight"}, {"model": model, "optimizer": optimizer}
    holdfast.load(folder, state, cast=True, rename={"emb": "tokens"}, partial=partial)
    master = checkpoint.read("optimizer.state.emb.weight.master", None, "torch")
    moment = checkpoint.read("optimizer.state.emb.weight.exp_avg", None, "torch")
    assert torch.equal(model.tokens.weight[:37].detach(), master)
    assert torch.equal(optimizer.state[model.tokens.weight]["exp_avg"][:37], moment)
    assert not optimizer.state[model.tokens.weight]["exp_avg"][37:].any()
