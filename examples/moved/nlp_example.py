"""Classify sentences with a BERT, and report accuracy and F1: the program of
Accelerate's examples/nlp_example.py, written anew for a tiny model and the docstrings
of two modules, with Accelerate and with zae."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification
from transformers.optimization import get_linear_schedule_with_warmup

from zae import Trainer
from zae.addons import StateManagerAddon

EPOCHS, PAD, CLS, SEP = 3, 0, 1, 2


def make_sentences():
    """Return pieces of two docstrings, as tokens, and from which of the two each is."""
    import argparse
    import site

    texts = [str(module.__doc__).split() for module in (argparse, site)]
    words = sorted({*texts[0], *texts[1]})
    numbers = {word: index for index, word in enumerate(words, 3)}
    sentences = [
        ([numbers[word] for word in text[at : at + 6 + at % 5]], label)
        for label, text in enumerate(texts)
        for at in range(240)
    ]
    return sentences, len(numbers) + 3


def collate(sentences):
    """Pad to the longest sentence of the batch."""
    rows = [[CLS, *tokens, SEP] for tokens, _ in sentences]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    labels = torch.tensor([label for _, label in sentences])
    mask = (tokens != PAD).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def make_loaders():
    sentences, count = make_sentences()
    train = [each for index, each in enumerate(sentences) if index % 20 < 14]
    held_out = [each for index, each in enumerate(sentences) if index % 20 >= 14]
    shuffled = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate)
    # A stream of its own: else a validation would change the next shuffle.
    stream = torch.Generator()
    return (
        shuffled,
        DataLoader(held_out, batch_size=32, collate_fn=collate, generator=stream),
        count,
    )


def make_model(count):
    torch.manual_seed(42)
    config = BertConfig(
        vocab_size=count,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return BertForSequenceClassification(config)


def make_schedule(optimizer, steps):
    return get_linear_schedule_with_warmup(optimizer, 10, steps)


def score(predictions, labels):
    """Return what the metric "glue, mrpc" of the original computes."""
    both = (predictions * labels).sum()
    return {
        "accuracy": (predictions == labels).float().mean(),
        "f1": 2 * both / (predictions.sum() + labels.sum()),
    }


def by_hand():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    train, held_out, count = make_loaders()
    model = make_model(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = make_schedule(optimizer, len(train) * EPOCHS)
    model, optimizer, train, held_out, schedule = accelerator.prepare(
        model, optimizer, train, held_out, schedule
    )
    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        predictions, labels = [], []
        for batch in held_out:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(-1)
            pair = accelerator.gather_for_metrics((predicted, batch["labels"]))
            predictions.append(pair[0])
            labels.append(pair[1])
        scores = score(torch.cat(predictions), torch.cat(labels))
        accelerator.print(f"epoch {epoch}: {scores}")
    return accelerator.unwrap_model(model)


class Sentences(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(**batch).loss}

    def test_step(self, batch):
        predictions = self.model(**batch).logits.argmax(-1)
        return {"predictions": predictions, "labels": batch["labels"]}

    def metric_on_epoch_end(self):
        predictions = torch.cat(self.log_test["predictions"])
        return score(predictions, torch.cat(self.log_test["labels"]))


def with_zae(folder):
    train, held_out, count = make_loaders()
    model = make_model(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = Sentences.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=make_schedule(optimizer, len(train) * EPOCHS),
        scheduler_step_on_batch=True,
        monitor="f1",
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(EPOCHS, train, held_out)
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
