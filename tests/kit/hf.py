"""Tiny models and a tokenizer of Transformers, made on the spot: nothing is downloaded."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # A name that is not there fails at once.

import torch
import transformers
from datasets import Dataset
from torch import nn

__all__ = ["HEADS", "arguments", "dataset", "make_model", "rows", "sentences", "tokenizer"]

_WORDS = [
    "the", "a", "small", "big", "red", "blue", "cat", "dog", "bird", "fish", "runs", "sleeps", "eats", "sees", "jumps",
    "sings", "slowly", "today", "here", "there",
]  # fmt: skip


def sentences() -> list[str]:
    """48 sentences of 3 to 8 words."""
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 9, (48,), generator=draw).tolist()
    return [" ".join(_WORDS[i] for i in torch.randint(len(_WORDS), (n,), generator=draw)) for n in lengths]


@cache
def tokenizer() -> Any:
    """A WordPiece tokenizer, trained on the sentences: 30 ms.

    Training breaks ties by hashes that differ from process to process; ids of words are the same in all of them, so
    that ranks have the same data.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    raw.train_from_iterator(sentences(), trainers.WordPieceTrainer(vocab_size=96, special_tokens=special))
    trained = raw.get_vocab().keys()
    order = [*special, *sorted(trained & set(_WORDS)), *sorted(trained - set(_WORDS) - set(special))]
    raw.model = models.WordPiece({token: index for index, token in enumerate(order)}, unk_token="[UNK]")
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, mask_token="[MASK]", **names)


def _bert() -> Any:
    return transformers.BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=96, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=96, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip


HEADS: dict[str, tuple[str, Any]] = {
    "sequence": ("BertForSequenceClassification", _bert),
    "token": ("BertForTokenClassification", _bert),
    "question": ("BertForQuestionAnswering", _bert),
    "seq2seq": ("T5ForConditionalGeneration", _t5),
    "causal": ("GPT2LMHeadModel", _gpt2),
    "masked": ("BertForMaskedLM", _bert),
}
"""The class of the model of each head, and its configuration."""


def make_model(head: str = "sequence", seed: int = 0) -> nn.Module:
    """A model with random weights, always the same for a seed."""
    name, config = HEADS[head]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = config()
        settings.num_labels = 2 if head == "question" else 3
        return getattr(transformers, name)(settings).train()


def rows(head: str = "sequence", count: int = 22) -> list[dict[str, Any]]:
    """Samples of a head, padded to 12 tokens; labels have unequal numbers of targets."""
    draw = torch.Generator().manual_seed(3)
    encoded = tokenizer()(sentences()[:count], padding="max_length", truncation=True, max_length=12)
    made = []
    for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True):
        sample: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        used = sum(mask)
        if head == "sequence":
            sample["labels"] = sum(ids) % 3
        elif head == "token":
            sample["labels"] = [i % 3 if m else -100 for i, m in zip(ids, mask, strict=True)]
        elif head == "question":
            sample |= {"start_positions": ids[1] % used, "end_positions": used - 1}
        elif head == "masked":
            hidden = [bool(m) and float(torch.rand((), generator=draw)) < 0.4 for m in mask]
            hidden[1] = True  # A batch has one target at least.
            sample["labels"] = [i if h else -100 for i, h in zip(ids, hidden, strict=True)]
            sample["input_ids"] = [4 if h else i for i, h in zip(ids, hidden, strict=True)]
        else:
            sample["labels"] = [i if m else -100 for i, m in zip(ids, mask, strict=True)]
            if head == "causal":
                sample["labels"][0] = -100  # Nothing predicts the first token; see `training.Loss`.
        made.append(sample)
    return made


def dataset(head: str = "sequence", count: int = 22) -> Dataset:
    """The same as a Dataset."""
    return Dataset.from_list(rows(head, count))


def arguments(folder: Any, **more: Any) -> Any:
    """TrainingArguments for a quiet run on the CPU that writes nothing by itself."""
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 10**6}
    return transformers.TrainingArguments(output_dir=str(folder), **{**quiet, **more})
