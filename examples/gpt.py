"""A small GPT on bytes, for the examples: it learns the text of one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT, WIDTH, HEADS, BLOCKS, VOCABULARY = 64, 64, 4, 3, 256


class Block(nn.Module):
    """Causal attention and a feed-forward net, each around the residual stream."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block; shape (samples, tokens, WIDTH), as given."""
        samples, tokens, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(samples, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """The model."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of bytes of shape (samples, tokens)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def text_of(path: str) -> Tensor:
    """Return the bytes of a file as tokens."""
    return torch.tensor(list(Path(path).read_bytes()))


def batch_of(text: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Draw a batch with torch's own generator: tokens, and the token that follows each."""
    starts = torch.randint(len(text) - CONTEXT - 1, (samples,))
    tokens = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return tokens[:, :-1], tokens[:, 1:]


class Windows:
    """Every window of a text, as a data set."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.text) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a window, and the token that follows each."""
        tokens = self.text[start : start + CONTEXT + 1]
        return tokens[:-1], tokens[1:]
