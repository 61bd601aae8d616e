"""A small byte-level GPT in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The vocabulary is all bytes, so no tokenizer is needed."""

    vocabulary: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 160
    dropout: float = 0.05

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of the position, with periods from a few places to several times `length`."""
    rates = torch.exp(-math.log(2 * length) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block that normalises before each branch."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Bytes in, next-byte logits out. The head shares its weight with the byte embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._init_weights()
        self.head.weight = self.bytes.weight

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Start at a scale, and with a sense of position, that makes a run of a few hundred steps worth its while.

        Layers that write to the residual stream start smaller, as in GPT-2. Positions start as sinusoids: to look one
        byte back is then nearly a rotation, which attention finds much sooner than in random vectors.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("attention.out", "mlp.down"))
                std = 0.75 / math.sqrt(self.config.width)
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * self.config.layers) if writes else std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.bytes.weight, std=0.1)
        self.positions.weight.copy_(0.1 * sinusoids(self.config.context, self.config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.bytes(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float, generator: torch.Generator) -> bytes:
        """Continue `prompt` by `count` bytes. Call it in evaluation mode; only `generator` is drawn from."""
        tokens = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1]
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())
