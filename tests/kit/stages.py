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
        self.up, self.last = nn.Linear(24, 8), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, y: Any = None) -> Any:
        first = self.down(x).relu()
        middle = self.middle(self.deep(first).relu()).relu()
        up = self.up(torch.cat([middle, first], 1)).relu()
        out = self.last(torch.cat([up, x], 1))
        return out if y is None else {"out": out, "loss": nn.functional.mse_loss(out, y)}


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


def hugging(kind: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"hidden_size": WIDTH, "intermediate_size": 16, "max_position_embeddings": 16}
    if kind == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **off))
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=4, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)
