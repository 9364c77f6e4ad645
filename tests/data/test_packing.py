"""Packed documents: rows that waste little, and the gradients of the documents one by one."""

from __future__ import annotations

import itertools
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from kit import faults
from kit.faults import KillAddon, everything, forked
from kit.ranks import on_ranks
from zae import ConfigError, LoaderError, Trainer
from zae.addons import GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon
from zae.data import (
    LengthGroupedBatchSampler,
    PackedDataset,
    cu_seqlens,
    document_mask,
    flex_mask,
    pack,
    packed_collate,
)

F64 = torch.float64
WORDS = 17


def documents(count: int = 12, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, WORDS, int(draw.integers(2, 9))).tolist() for _ in range(count)]


class Attention(nn.Module):
    """One layer of attention with positions, told by a mask what is one document."""

    def __init__(self, kind: str = "mask") -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(WORDS, 8, dtype=F64), nn.Embedding(64, 8, dtype=F64)
        self.qkv, self.out = nn.Linear(8, 24, dtype=F64), nn.Linear(8, WORDS, dtype=F64)

    def forward(self, input_ids: Any, position_ids: Any, document_ids: Any) -> Any:
        x = self.words(input_ids) + self.places(position_ids)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.kind == "varlen":
            made = self.by_lengths(q, k, v, document_ids)
        else:
            made = scaled_dot_product_attention(q, k, v, attn_mask=document_mask(document_ids))
        return self.out(x + made.transpose(1, 2).flatten(2))

    @staticmethod
    def by_lengths(q: Any, k: Any, v: Any, document_ids: Any) -> Any:
        """What FlashAttention computes of ``cu_seqlens``: each document in its turn."""
        ends, longest = cu_seqlens(document_ids)
        flat = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)]
        made = torch.empty_like(flat[0])
        for first, end in itertools.pairwise(ends.tolist()):
            assert end - first <= longest
            part = [each[first:end].transpose(0, 1) for each in flat]
            made[first:end] = scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1)
        return made.unflatten(0, q.transpose(1, 2).shape[:2]).transpose(1, 2)


class Llama(nn.Module):
    """A model of Transformers, which takes the documents from ``position_ids``."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes)
        config._attn_implementation = attention
        self.model = LlamaForCausalLM(config).to(F64)

    def forward(self, input_ids: Any, position_ids: Any, document_ids: Any) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


class GPT2(nn.Module):
    """Another one, which computes in float64 throughout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=2, n_head=2, **off)
        )
        self.model.to(F64)

    forward = Llama.forward


class Task(Trainer):
    """Predicts the next token, and counts the targets; with ``counts=False`` it does not say how many."""

    counts = True

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids")}
        logits, labels = self.model(**inputs)[:, :-1], batch["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "num_targets": (labels != -100).sum()} if self.counts else {"loss": loss}

    test_step = train_step


MODELS: dict[str, Any] = {
    "mask": Attention,
    "cu_seqlens": lambda: Attention("varlen"),
    "GPT-2": GPT2,
    "Llama, sdpa": lambda: Llama("sdpa"),
    "Llama, eager": lambda: Llama("eager"),
}


def gradients(model: nn.Module, loader: Any, *add_ons: Any, count: int = 1, task: type = Task) -> list[torch.Tensor]:
    """Return the gradients of one step over all batches of a loader."""
    found: list[torch.Tensor] = []

    class Kept(task):
        def optimizer_step(self) -> bool:
            found.extend(p.grad.clone() for p in self.model.parameters())
            return super().optimizer_step()

    options = {"gradient_accumulation_steps": count} if add_ons else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Kept.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options).run(1, loader)
    assert found
    assert len(found) == len([*model.parameters()])
    return found


def difference(one: list[Any], other: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_packed_batch_has_the_gradients_of_the_documents_one_by_one(name: str) -> None:
    """The mean over all targets, in rows with padding and in one without, to 1e-12; without num_targets it is not.

    The norms of a Llama compute in float32.
    """
    bound = 1e-7 if "Llama" in name else 1e-12
    torch.manual_seed(0)
    model, texts = MODELS[name](), documents()
    single = DataLoader(texts, collate_fn=packed_collate)
    expected = gradients(model, single, GradientAccumulationAddon, count=len(texts))
    by_hand = torch.stack([_loss_of(model, pack([text])) for text in texts]).sum() / sum(
        len(text) - 1 for text in texts
    )
    assert difference(expected, list(torch.autograd.grad(by_hand, list(model.parameters())))) < bound
    rows = PackedDataset(texts, 16)
    assert len(rows) < len(texts)
    assert rows.padding > 0
    packed = gradients(model, DataLoader(rows, len(rows)))
    assert difference(expected, packed) < bound
    one = gradients(model, DataLoader(texts, len(texts), collate_fn=packed_collate))
    assert difference(expected, one) < bound
    several = gradients(model, DataLoader(rows, 2), GradientAccumulationAddon, count=-(-len(rows) // 2))
    assert difference(expected, several) < bound
    uncounted = type("Uncounted", (Task,), {"counts": False})
    wrong = gradients(model, DataLoader(rows, 2), GradientAccumulationAddon, count=-(-len(rows) // 2), task=uncounted)
    assert difference(expected, wrong) > 1e-6


def _loss_of(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """The sum of the losses of one document, with nothing of a mask."""
    logits = model(*(row[name][None] for name in ("input_ids", "position_ids", "document_ids")))
    return cross_entropy(logits[0, :-1], row["input_ids"][1:], reduction="sum")


def test_the_mask_of_flex_attention_is_the_same() -> None:
    """On a CPU flex_attention has no backward, so masks are compared; blocks between documents are left out."""
    rows = PackedDataset(documents(60), 256, too_long="split")
    ids = torch.stack([row["document_ids"] for row in rows] + [torch.arange(256) // 128])
    for causal in (True, False):
        mask = flex_mask(ids, causal)
        made = [[[mask.mask_mod(torch.tensor(b), 0, q, k) for k in torch.arange(40)] for q in torch.arange(40)]
                for b in range(len(ids))]  # fmt: skip
        assert torch.equal(torch.tensor(made)[:, None], document_mask(ids, causal)[:, :, :40, :40])
    assert flex_mask(ids[-1:]).to_dense()[0, 0].int().tolist() == [[1, 0], [0, 1]]


def test_without_the_boundaries_it_differs() -> None:
    """The test above can fail: one document of all tokens has other gradients."""
    torch.manual_seed(0)
    model, texts = Attention(), documents()
    rows = DataLoader(texts, len(texts), collate_fn=packed_collate)
    joined = [{**row, "document_ids": torch.zeros_like(row["document_ids"])} for row in rows]
    assert difference(gradients(model, rows), gradients(model, joined)) > 1e-4


@on_ranks(2, 3)
def test_ranks_pack_as_one_process_does(world):
    """Rows over ranks: the mean over the targets of all of them."""
    torch.manual_seed(0)
    model, rows = Attention(), PackedDataset(documents(), 16)
    expected = gradients(model, DataLoader(rows, len(rows)))
    found = gradients(model, DataLoader(rows, -(-len(rows) // world)), MultiGPUAddon, GradientAccumulationAddon)
    assert torch.distributed.get_world_size() == world
    assert difference(expected, found) < 1e-12


def test_a_packed_run_resumes_bitwise(tmp_path: Path) -> None:
    """Killed in mid-epoch, shuffled, it ends with the same bits."""

    def train(folder: Path, **more: Any) -> Any:
        torch.manual_seed(1)
        model = Attention()
        optimizer = torch.optim.AdamW(model.parameters())
        made = Task.add_on(StateManagerAddon, KillAddon)(
            model, "cpu", optimizer=optimizer, seed=3, save_path=folder, save_every=2, resume="auto", log_bar=False,
            **more,
        )  # fmt: skip
        made.run(2, DataLoader(PackedDataset(documents(40), 16), 2, shuffle=True))
        return everything(made)

    whole = train(tmp_path / "whole")
    assert forked(lambda: train(tmp_path / "run", kill_at=4)).status == -signal.SIGKILL
    faults.ambient(2)
    assert train(tmp_path / "run") == whole


def test_each_token_is_in_one_row_and_little_is_padding() -> None:
    """Of 500 documents from 1 to 200 tokens in rows of 256, less than 1 % is padding, the same each time."""
    draw = np.random.default_rng(1)
    texts = [[index] * int(draw.integers(1, 201)) for index in range(500)]
    packed = PackedDataset(texts, 256)
    assert packed.padding < 0.01
    assert packed.rows == PackedDataset(texts, 256, lengths=[len(text) for text in texts]).rows
    seen = torch.cat([row["input_ids"][row["document_ids"] >= 0] for row in (packed[i] for i in range(len(packed)))])
    assert torch.equal(seen.bincount(), torch.tensor([len(text) for text in texts]))


def test_labels_and_other_entries_are_packed_too() -> None:
    """Masked prompts stay masked, an attention mask is left out, and every row has one shape."""
    texts = [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3], "attention_mask": [1, 1, 1], "weight": [0.5, 1.0, 2.0]},
        {"input_ids": torch.tensor([4, 5]), "labels": [4, 5], "attention_mask": [1, 1], "weight": [1.0, 1.0]},
    ]
    row = pack(texts, 6, pad_id=9)
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 9]
    assert row["labels"].tolist() == [-100, -100, 3, -100, 5, -100]
    assert row["weight"].tolist() == [0.5, 1.0, 2.0, 1.0, 1.0, 0.0]
    assert "attention_mask" not in row
    assert {values.shape for values in PackedDataset(texts, 6)[0].values()} == {(6,)}
    assert pack([], 2)["document_ids"].tolist() == [-1, -1]


def test_documents_that_are_too_long() -> None:
    texts = [list(range(1, 12)), [3, 4]]
    with pytest.raises(ConfigError, match="document 0 has 11 tokens, and a row 4; write a larger length, too_long="):
        PackedDataset(texts, 4)
    cut = PackedDataset(texts, 4, too_long="truncate")
    assert [row["input_ids"].tolist() for row in cut] == [[1, 2, 3, 4], [3, 4, 0, 0]]
    split = PackedDataset(texts, 4, too_long="split")
    assert [row["input_ids"].tolist() for row in split] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0], [3, 4, 0, 0]]
    with pytest.raises(LoaderError, match=r"documents of \[3, 2\] tokens, 5 in all, do not fit into a row of 4"):
        pack([[1, 2, 3], [4, 5]], 4)
    with pytest.raises(LoaderError, match=r"entry 'image' of a document has shape \(2, 2\), and its input_ids \(3,\)"):
        pack([{"input_ids": [1, 2, 3], "image": [[1, 2], [3, 4]]}])
    with pytest.raises(LoaderError, match="pack takes a list of documents, and found 11 in place of one"):
        pack([11, 12])
    with pytest.raises(LoaderError, match="has the entries tokens and no 'input_ids'"):
        pack([{"tokens": [1]}])
    with pytest.raises(ConfigError, match="lengths has 1 entries, and the dataset 2 documents"):
        PackedDataset(texts, 4, lengths=[3])
    grown = PackedDataset(texts, 16, lengths=[9, 2])
    with pytest.raises(LoaderError, match="document 0 has 11 tokens, and had 9 when the dataset was packed"):
        _ = grown[0]
    with pytest.raises(ConfigError, match="too_long='cut'; it must be"):
        PackedDataset(texts, 4, too_long="cut")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PackedDataset(iter([]), 4), "reads documents by index, and this is a list_iterator; .*packed_collate"),
        (lambda: PackedDataset([[1]], 4, pad_id=None), "pad_id=None; it must be a token id.*tokenizer.eos_token_id"),
        (lambda: PackedDataset([[1]], 4, lengths=[-1]), "lengths must be the number of tokens of each document"),
        (lambda: PackedDataset([[1]], 4, lengths=[math.nan]), "lengths must be the number of tokens of each document"),
        (lambda: PackedDataset([PADDED], 4), r"a document of 3 tokens is padded: .* tokenize with padding=False"),
        (lambda: pack([PADDED]), r"a document of 3 tokens is padded: .* tokenize with padding=False"),
        (lambda: PackedDataset(["some text"], 40), r"a document is the text 'some text'; tokenize it"),
        (lambda: pack([[1.5, 2.0]]), "the input_ids of a document are floats"),
        (
            lambda: pack([{"input_ids": [1], "text": "one"}]),
            "entry 'text' of a document is a str, not a list of numbers",
        ),
        (
            lambda: pack([{"input_ids": [1], "w": [1]}, [2]]),
            "entries input_ids, w, labels, and another one input_ids, l",
        ),
        (lambda: pack([[2], {"input_ids": [1], "w": [1]}]), "entries input_ids, labels, and another one input_ids, w"),
    ],
)
def test_documents_that_cannot_be_packed_are_refused(make: Any, text: str) -> None:
    """Padding would be trained on, and entries of some documents were lost."""
    with pytest.raises((ConfigError, LoaderError), match=text):
        make()


PADDED = {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}


def test_an_empty_document_changes_no_types() -> None:
    row = pack([{"input_ids": [], "kind": []}, {"input_ids": [4, 5], "kind": [1, 1]}])
    assert {str(values.dtype) for values in row.values()} == {"torch.int64"}
    assert row["document_ids"].tolist() == [1, 1]


def test_batches_by_tokens_in_one_row() -> None:
    """Without padding: a batch sampler by tokens, and a collate function that makes one row of each batch."""
    texts = documents(40)
    sampler = LengthGroupedBatchSampler([len(text) for text in texts], max_tokens=32)
    rows = list(DataLoader(texts, batch_sampler=sampler, collate_fn=packed_collate))
    assert max(row["input_ids"].shape[1] for row in rows) <= 32
    assert sum(row["input_ids"].shape[1] for row in rows) == sum(map(len, texts))
    assert all((row["document_ids"] >= 0).all() for row in rows)
