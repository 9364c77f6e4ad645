"""Models that are divided into stages. pytest rewrites each assert in a test's own file, and not in this one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 11, 8


class Skips(nn.Module):
    """Stages that receive and pass on different shapes, and values that pass around one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.middle = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 16)
        self.up, self.last = nn.Linear(24, 8), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down(x).relu()
        middle = self.middle(self.deep(first).relu()).relu()
        up = self.up(torch.cat([middle, first], 1)).relu()
        return self.last(torch.cat([up, first], 1))


class _Beside(nn.Module):
    """Compute layers, and return the first tensor beside what they make of it, or of both that came."""

    def __init__(self, *layers: nn.Module, joins: bool) -> None:
        super().__init__()
        self.layers, self.joins = nn.Sequential(*layers), joins

    def forward(self, x: torch.Tensor, first: Any = None) -> Any:
        out = self.layers(torch.cat([x, first], 1) if self.joins else x)
        return out, x if first is None else first


class _Joined(nn.Module):
    """Compute one layer of both tensors that come."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, first], 1))


def beside(model: Skips, count: int) -> list[nn.Module]:
    """Return four stages of `Skips`, which pass on two tensors."""
    return [
        nn.Sequential(model.down, nn.ReLU()),
        _Beside(model.deep, nn.ReLU(), model.middle, nn.ReLU(), joins=False),
        _Beside(model.up, nn.ReLU(), joins=True),
        _Joined(model.last),
    ]


@dataclasses.dataclass
class Outputs:
    out: torch.Tensor
    middle: torch.Tensor


class Records(nn.Module):
    """Two outputs in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Outputs:
        middle = self.first(x).tanh()
        return Outputs(self.last(middle), middle)


class _Recorded(nn.Module):
    """The last stage of `Records`."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last

    def forward(self, middle: torch.Tensor) -> Outputs:
        return Outputs(self.last(middle), middle)


def recorded(model: Records, count: int) -> list[nn.Module]:
    """Return two stages of `Records`."""
    return [nn.Sequential(model.first, nn.Tanh()), _Recorded(model.last)]


class Language(nn.Module):
    """A stack of torch, in a model that looks at sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        given = {"dropout": 0.0, "batch_first": True}
        if kind == "encoder":
            layer: Any = nn.TransformerEncoderLayer(WIDTH, 2, 16, **given)  # type: ignore[arg-type]
            self.stack: Any = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        else:
            layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, **given)  # type: ignore[arg-type]
            self.stack = nn.TransformerDecoder(layer, 4, norm=nn.LayerNorm(WIDTH))
        self.kind = kind

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        assert length <= 16, f"{length} tokens are too many"
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=self.head.weight.dtype), 1)
        x = self.embed(tokens)
        return self.head(self.stack(x, mask=mask) if self.kind == "encoder" else self.stack(x, 2 * x, tgt_mask=mask))


class _Half(nn.Module):
    """A stage of `Language`: the first one embeds, the last one has the head."""

    def __init__(self, model: Language, is_first: bool) -> None:
        super().__init__()
        middle = len(model.stack.layers) // 2
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleList(model.stack.layers[:middle] if is_first else model.stack.layers[middle:])
        self.norm, self.head = (None, None) if is_first else (model.stack.norm, model.head)
        self.kind = model.kind

    def forward(self, tokens: torch.Tensor, memory: Any = None) -> Any:
        x = tokens if self.embed is None else self.embed(tokens)
        memory = 2 * x if self.embed is not None else memory
        mask = torch.triu(torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype), 1)
        for layer in self.layers:
            x = layer(x, mask) if self.kind == "encoder" else layer(x, memory, tgt_mask=mask)
        if self.head is None:
            return x, memory
        return self.head(x if self.norm is None else self.norm(x))


def in_halves(model: Any, count: int) -> list[nn.Module]:
    """Return two stages of `Language`, of which the second is called with what the first returns."""
    return [_Half(model, True), _Half(model, False)]
