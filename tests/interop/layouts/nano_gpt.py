"""A GPT with the modules, names and arithmetic of nanoGPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """A norm whose bias may be absent."""

    def __init__(self, width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, has_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=has_bias)
        self.c_proj = nn.Linear(width, width, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.c_attn(x).split(width, dim=2)
        q, k, v = (each.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for each in split)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, *, has_bias: bool) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width, has_bias=has_bias)
        self.attn = CausalSelfAttention(width, heads, has_bias=has_bias)
        self.ln_2 = LayerNorm(width, has_bias=has_bias)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(width, 4 * width, bias=has_bias),
                "c_proj": nn.Linear(4 * width, width, bias=has_bias),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        after: Tensor = x + self.mlp["c_proj"](hidden)
        return after


class GPT(nn.Module):
    """The model. The embedding and the output share one weight."""

    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        width, words, length = 32, 67, 16
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(Block(width, 4, has_bias=has_bias) for _ in range(2)),
                "ln_f": LayerNorm(width, has_bias=has_bias),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits
