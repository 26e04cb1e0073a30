"""The layout `nanogpt` with GPT-2 of Transformers: the same logits and the same training steps, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")

from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

import holdfast  # noqa: E402
from tests.interop.layouts.nano_gpt import GPT  # noqa: E402

TOLERANCE = 5e-6
"""Of the largest logit."""

TOKENS = torch.arange(32).reshape(2, 16) * 7 % 67


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=67, n_positions=16, bos_token_id=0, eos_token_id=0)
    ).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.1)
    return model


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer with two groups, as nanoGPT makes it."""
    tensors = [*model.parameters()]
    groups = [[each for each in tensors if (each.dim() >= 2) is large] for large in (True, False)]
    decays = zip(groups, (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": group, "weight_decay": decay} for group, decay in decays], lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(logits(model).flatten(0, 1)[:-1], TOKENS.flatten()[1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: torch.nn.Module) -> torch.Tensor:
    found = model(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits  # type: ignore[no-any-return]


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    a, b = logits(one), logits(other)
    return float((a - b).abs().max() / a.abs().max())


def test_files_of_gpt2_load_into_nanogpt(tmp_path: Path) -> None:
    model, nano = gpt2(0), GPT()
    model.save_pretrained(tmp_path / "files")
    holdfast.load(tmp_path / "files", {"model": nano}, layout=holdfast.Layout("nanogpt").reversed())
    assert difference(model, nano) < TOLERANCE


def test_a_file_of_nanogpt_loads_into_gpt2(tmp_path: Path) -> None:
    nano, model = GPT(), gpt2(1)
    content = {"model": nano.state_dict(), "iter_num": 3, "config": {"bias": True}}
    torch.save(content, tmp_path / "ckpt.pt")  # noqa: TID251 - as nanoGPT does
    holdfast.load(tmp_path / "ckpt.pt", {"model": model}, layout="nanogpt")
    assert difference(nano, model) < TOLERANCE
    holdfast.export(tmp_path / "ckpt.pt", tmp_path / "files", to="safetensors", layout="nanogpt")
    model.config.save_pretrained(tmp_path / "files")
    assert difference(nano, GPT2LMHeadModel.from_pretrained(tmp_path / "files")) < TOLERANCE


@pytest.mark.parametrize("to_nano", [False, True], ids=["to GPT-2", "to nanoGPT"])
def test_training_goes_on_in_the_other_model(tmp_path: Path, to_nano: bool) -> None:
    source, target = (gpt2(2), GPT()) if to_nano else (GPT(), gpt2(2))
    optimizer, other = adamw(source), adamw(target)
    train(source, optimizer)
    holdfast.save(tmp_path / "step", {"model": source, "optimizer": optimizer})
    layout = holdfast.Layout("nanogpt")
    state = {"model": target, "optimizer": other}
    holdfast.load(tmp_path / "step", state, layout=layout.reversed() if to_nano else layout)
    source.eval()
    target.eval()
    assert train(target, other) == pytest.approx(train(source, optimizer), rel=1e-5)


def test_biases_may_be_absent(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "step", {"model": GPT(has_bias=False)})
    step = holdfast.open_checkpoint(tmp_path / "step", layout="nanogpt")
    assert step.tensors["model.transformer.h.1.mlp.c_fc.weight"].shape == (32, 128)
    assert not [name for name in step.tensors if name.endswith("bias")]
