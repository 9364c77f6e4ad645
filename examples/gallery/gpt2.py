"""A tiny GPT-2 with a tokenizer of its own is pre-trained on Python's help pages, and
fine-tuned on another text.

The other text, descriptions of the data sets of scikit-learn, is short: the same model
learns less from it alone.
"""

import random
from pydoc_data.topics import topics

import torch
from sklearn import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging

from zae import Trainer
from zae.addons import HuggingFaceAddon, JSONLLoggerAddon, StateManagerAddon

LENGTH, SIZE = 64, 512  # Tokens of a sample, and of the vocabulary.


def make_tokenizer(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, show_progress=False, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )


def split(tokenizer, text):
    """Cut a text into samples; return those to train, to validate and to test."""
    tokens = tokenizer(text)["input_ids"]
    samples = [
        tokens[at : at + LENGTH] for at in range(0, len(tokens) - LENGTH + 1, LENGTH)
    ]
    samples = [
        {"input_ids": each, "labels": each}
        for each in random.Random(0).sample(samples, len(samples))
    ]
    n = len(samples) // 5
    return samples[2 * n :], samples[:n], samples[n : 2 * n]


def fit(model, tokenizer, samples, epochs, name, rate):
    options = {
        "train_dataset": samples[0],
        "eval_dataset": samples[1],
        "eval_strategy": "epoch",
        "seed": 0,
    }
    options |= {
        "num_train_epochs": epochs,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
    }
    options |= {
        "per_device_train_batch_size": 16,
        "load_best_model_at_end": True,
        "processing_class": tokenizer,
    }
    options |= {
        "output_dir": f"runs/{name}",
        "jsonl_path": f"runs/{name}/log.jsonl",
        "log_every": 10,
    }
    trainer = Trainer.add_on(HuggingFaceAddon, StateManagerAddon, JSONLLoggerAddon)(
        model, "cpu", **options
    )
    trainer.train()
    trainer.save_model()
    return trainer


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    pages = "".join(topics[name] for name in sorted(topics))
    names = ("iris", "diabetes", "digits", "linnerud", "wine", "breast_cancer")
    described = "".join(getattr(datasets, f"load_{name}")().DESCR for name in names)
    tokenizer = make_tokenizer(pages)
    long, short = split(tokenizer, pages), split(tokenizer, described)
    print(
        f"samples of {LENGTH} tokens: {len(long[0])} of the help pages, "
        f"{len(short[0])} of the descriptions"
    )
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        vocab_size=SIZE, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, **ends
    )
    set_seed(0)
    pretrained = fit(GPT2LMHeadModel(config), tokenizer, long, 1, "pretrained", 5e-3)
    losses = {"pre-trained": pretrained.evaluate(short[2])["eval_loss"]}
    starts = {
        "fine-tuned": GPT2LMHeadModel.from_pretrained("runs/pretrained"),
        "scratch": GPT2LMHeadModel(config),
    }
    for name, model in starts.items():
        losses[name] = fit(model, tokenizer, short, 8, name, 2e-3).evaluate(short[2])[
            "eval_loss"
        ]
    for name, loss in losses.items():
        print(f"{name}: test loss {loss:.3f} on the descriptions")


if __name__ == "__main__":
    main()
