"""A step returns what is no metric, or gets batches whose samples cannot be counted: that is said, once."""

from __future__ import annotations

import decimal
import re

import numpy as np
import pytest
import torch
from torch import nn

from zae import MonitorError, Trainer


class Plain(Trainer):
    """Returns one further entry."""

    def entry(self, output):
        return 0.5

    def train_step(self, batch):
        output = self.model(batch)
        return {"loss": output.square().mean(), "quality": self.entry(output)}

    test_step = train_step


def make(entry=None, cls=Plain, **options):
    model = nn.Linear(2, 3)
    kind = cls if entry is None else type("Task", (cls,), {"entry": lambda self, output: entry(output)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return kind(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def batches():
    return [torch.ones(4, 2)] * 3


FORGOTTEN = {
    "one for each sample": (lambda out: (out.argmax(1) == 0).float(), r"a tensor of shape \(4,\).*quality.mean\(\)"),
    "right or wrong": (lambda out: out.argmax(1) == 0, r"shape \(4,\).*quality.float\(\).mean\(\)"),
    "as int": (lambda out: (out.argmax(1) == 0).int(), r"shape \(4,\).*quality.float\(\).mean\(\)"),
    "with a graph": (lambda out: out.square().mean(1), r"shape \(4,\).*quality.mean\(\)"),
    "of one entry": (lambda out: out.mean().reshape(1), r"shape \(1,\)"),
    "an array": (lambda out: out.detach().mean(1).numpy(), r"an array of shape \(4,\).*quality.mean\(\)"),
    "an array of bool": (lambda out: out.detach().numpy() > 0, r"an array of shape \(4, 3\).*quality.mean\(\)"),
    "a list": (lambda out: [0.5, 0.25], "a list of 2 entries.*one number"),
    "another number": (lambda out: decimal.Decimal("0.5"), "a Decimal.*one number"),
}


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_metric_that_is_not_a_number_is_named_once(kind, caplog):
    entry, says = FORGOTTEN[kind]
    make(entry).run(3, batches(), batches())
    said = [record.getMessage() for record in caplog.records if "quality" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("Task.train_step returned 'quality' as ")
    with pytest.raises(MonitorError, match=says):
        make(entry, monitor="quality", monitor_mode="max").run(1, batches(), batches())


def test_one_of_the_validation_alone_is_named(caplog):
    class Task(Plain):
        def test_step(self, batch):
            return {"loss": 0.0, "accuracy": self.model(batch).argmax(1) == 0}

    make(cls=Task).run(2, batches(), batches())
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if text.startswith("Task.test_step returned 'accuracy'")] == said


@pytest.mark.parametrize(
    "entry",
    [
        lambda out: out,
        lambda out: out.detach(),
        lambda out: out.argmax(1),
        lambda out: "text",
        lambda out: None,
        lambda out: {"inner": 0.5},
        lambda out: out.mean(),
        lambda out: np.float64(0.5),
    ],
)
def test_outputs_and_numbers_are_not_named(entry, caplog):
    make(entry).run(2, batches(), batches())
    assert not caplog.records


def test_what_metric_on_epoch_end_reads_is_not_named(caplog):
    class Task(Plain):
        def entry(self, output):
            return output.argmax(1) == 0

        def metric_on_epoch_end(self):
            return {"quality": torch.cat(self.log_test["quality"]).float().mean()} if self.mode == "test" else {}

    make(cls=Task, monitor="quality", monitor_mode="max").run(2, batches(), batches())
    assert not caplog.records


class Rows:
    """A batch as an object of the user."""

    def __init__(self, rows):
        self.rows = rows

    def to(self, *_, **__):
        return self


class OfRows(Trainer):
    """Reads batches of several kinds."""

    def train_step(self, batch):
        rows = batch.rows if isinstance(batch, Rows) else batch["x"] if isinstance(batch, dict) else batch
        rows = torch.stack([torch.full((2,), float(len(each))) for each in rows]) if isinstance(rows, list) else rows
        return {"loss": self.model(rows).square().mean()}

    test_step = train_step


UNCOUNTED = {
    "an object": (Rows, "no tensor that zae knows of \\(Rows\\)"),
    "texts": (lambda x: ["a", "bc", "d"], "no tensor that zae knows of \\(list\\)"),
    "edges first": (lambda x: {"edges": torch.zeros(2, 50), "x": x}, r"different first dimensions \(2, 3\)"),
}


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_batches_whose_samples_are_not_known_are_named_once(kind, caplog):
    batch, why = UNCOUNTED[kind]
    data = [batch(torch.ones(3, 2)), batch(torch.ones(3, 2))]
    make(cls=OfRows).run(2, data, data)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(why, record.getMessage())
    assert "return 'num_targets' from the step, or override sample_weight" in record.getMessage()
    caplog.clear()
    make(cls=OfRows).evaluate(data)
    assert len(caplog.records) == 1
    caplog.clear()
    make(cls=OfRows).inference(data)  # It has no means.
    assert not caplog.records


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_who_counts_is_not_told(kind, caplog):
    class Counting(OfRows):
        def train_step(self, batch):
            return {**super().train_step(batch), "num_targets": 3}

        test_step = train_step

    class Weighing(OfRows):
        def sample_weight(self, batch, num_targets):
            return 3.0

    data = [UNCOUNTED[kind][0](torch.ones(3, 2))]
    for cls in (Counting, Weighing):
        make(cls=cls).run(1, data, data)
    assert not caplog.records


def test_batches_without_samples_are_not_named(caplog):
    class Drawn(Trainer):
        def train_step(self, batch):
            return {"loss": self.model(torch.ones(1, 2)).square().mean()}

        test_step = train_step

    for data in (range(3), [None, 1], [{"step": 1}], [torch.tensor(3.0)], [(torch.ones(4, 2), {"name": 3})]):
        make(cls=Drawn).run(1, data)
    assert not [record for record in caplog.records if "samples" in record.getMessage()]
