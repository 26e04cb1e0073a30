"""The models of the bench of activations, and their training step: a GPT, and the same as models are built today.

Both have the same width, blocks and tokens. The second one has RMSNorm, SwiGLU and grouped heads, under autocast to
bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

from bench.compression_state import Batches
from bench.part import Params

VOCABULARY, HEAD_WIDTH, GROUPED = 256, 64, 4
"""A token is a byte. In grouped heads, so many queries share a key."""

DROPOUT = 0.1
SEED = 7

Step = Callable[[], torch.Tensor]


class GptBlock(nn.Module):
    """Attention and a feed-forward layer, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state after the block."""
        rows, length, width = hidden.shape
        split = self.qkv(self.before_attention(hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.before_feed(hidden)))))


class ModernBlock(nn.Module):
    """Attention with grouped heads and SwiGLU, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, inner = width // HEAD_WIDTH, -(-8 * width // 3 // 64) * 64
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width // GROUPED, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state after the block."""
        rows, length, width = hidden.shape
        normed = self.before_attention(hidden)
        query = self.query(normed).view(rows, length, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(normed).view(rows, length, 2, self.heads // GROUPED, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        normed = self.before_feed(hidden)
        return hidden + self.dropout(self.down(functional.silu(self.gate(normed)) * self.up(normed)))


BLOCKS: dict[str, type[nn.Module]] = {"gpt": GptBlock, "modern": ModernBlock}


class Gpt(nn.Module):
    """A language model of bytes."""

    def __init__(self, kind: str, *, width: int, blocks: int, tokens: int, seed: int = SEED) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(BLOCKS[kind](width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of the bytes that follow."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


class Training:
    """A model and its batch. Gradients stay allocated, so that a measured peak holds no release of older memory."""

    def __init__(self, kind: str, params: Params) -> None:
        sizes = {name: params[name] for name in ("width", "blocks", "tokens")}
        self.model = Gpt(kind, **sizes)
        self._is_autocast = kind == "modern"
        self._batch = Batches().next(rows=1, length=params["tokens"])
        self._gradients = [torch.zeros_like(parameter) for parameter in self.model.parameters()]

    def copied(self) -> Gpt:
        """Return a model of its own modules with the same parameters."""
        return copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})

    def step_of(self, model: nn.Module) -> Step:
        """Return forward and backward of a model with the same parameters, on the same batch with the same draws."""
        parameters = list(self.model.parameters())

        def step() -> torch.Tensor:
            torch.manual_seed(SEED)
            for parameter, gradient in zip(parameters, self._gradients, strict=True):
                parameter.grad = gradient.zero_()
            with torch.autocast("cpu", torch.bfloat16) if self._is_autocast else nullcontext():
                loss: torch.Tensor = model(self._batch)
            loss.backward()
            return loss

        return step

    def gradients(self) -> list[torch.Tensor]:
        """Return copies of the gradients of the last step."""
        return [gradient.clone() for gradient in self._gradients]

    def forget_gradients(self) -> None:
        """Leave no gradient, as a fit expects. The memory stays."""
        for parameter in self.model.parameters():
            parameter.grad = None
