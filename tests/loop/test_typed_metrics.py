"""Typed metrics: sums, extremes and last values are exact over micro-batches, records, ranks, loaders and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from kit import engines
from kit.engines import ENGINES
from kit.ranks import each_rank, on_ranks
from zae import StepError, Trainer
from zae.addons import (
    CompileAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.loop.epoch_log import EpochLog, merge_logs
from zae.loop.predictions import Predictions
from zae.metrics import Last, Max, Mean, Min, Sum
from zae.metrics.reductions import Partial, merge_sums

ROWS = torch.arange(1.0, 12.0)[:, None]


class Task(Trainer):
    """Returns one metric of each type; the input of a row is its number."""

    def train_step(self, batch: Any) -> Any:
        (x,) = batch
        loss = (self.model(x) - 1).square().mean()
        big = x[x > 3]
        return {
            "loss": loss,
            "rows": Sum(len(x)),
            "total": Sum(x.sum()),
            "largest": Max(x.max()),
            "smallest": Min(x.min().item()),
            "last": Last(x[-1, 0]),
            "big": Mean(big.mean(), big.numel()),
        }

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


def build(*add_ons: Any, task: Any = Task, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    made = task.add_on(*add_ons)
    return made(model, "cpu", optimizer=SGD(model.parameters(), lr=1e-3), log_bar=False, **options)


def loader(rows: torch.Tensor = ROWS, size: int = 4, **options: Any) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), size, **options)


def typed(metrics: Any, prefix: str = "") -> dict[str, float]:
    """Return the metrics of a row that do not depend on the weights."""
    names = ("rows", "total", "largest", "smallest", "last", "big")
    return {name: metrics[prefix + name] for name in names}


WHOLE = {"rows": 11.0, "total": 66.0, "largest": 11.0, "smallest": 1.0, "last": 11.0, "big": 7.5}


def test_each_type_over_an_epoch_and_an_evaluation(tmp_path: Path) -> None:
    """The last batch is smaller; a batch without an item of the mean is NaN with weight 0."""
    small = loader(size=3)  # The first batch has no row above 3.
    trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "log.jsonl")
    history = trainer.run(2, small, loader())
    assert typed(history["train_metrics_history"][1], "train_") == WHOLE
    assert typed(history["valid_metrics_history"][1], "valid_") == typed(trainer.evaluate(small)) == WHOLE
    assert trainer.log_train["rows"] == [3.0, 3.0, 3.0, 2.0]
    assert '"train/total": 66.0' in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("every", [1, 2])
def test_records_of_steps_hold_what_came_since_the_last_one(every: int) -> None:
    """Over micro-batches too, and over the end of an epoch."""
    trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=2, log_every=every)
    trainer.run(2, loader(size=3))
    rows = [(row["train/total"], row["train/largest"], row["train/last"]) for row in trainer.log_history]
    assert rows == ([(21.0, 6.0, 6.0), (45.0, 11.0, 11.0)] * 2 if every == 1 else [(66.0, 11.0, 11.0)] * 2)
    uneven = build(log_every=4)
    uneven.run(2, loader(size=4))  # Three batches an epoch: a record takes one of the next epoch.
    assert [(row["train/total"], row["train/smallest"]) for row in uneven.log_history] == [(76.0, 1.0)]


def test_several_loaders_are_added_up_and_named() -> None:
    """The means stay means; `valid_name` says which loader it is."""
    names: list[Any] = []

    class Named(Task):
        def test_step(self, batch: Any) -> Any:
            names.append((self.valid_name, self.mode))
            return super().test_step(batch)

        def metric_on_epoch_end(self) -> Any:
            return {"is_b": self.valid_name == "b"} if self.mode == "test" else {}

    loaders = {"a": loader(ROWS[:4]), "b": loader(ROWS[4:])}
    trainer = build(task=Named)
    row = trainer.run(1, loader(), loaders)["valid_metrics_history"][0]
    assert typed(row, "valid_") == {**WHOLE, "big": (4.0 + 8.0) / 2}
    assert (row["valid_a/rows"], row["valid_b/rows"], row["valid_a/is_b"], row["valid_b/is_b"]) == (4, 7, 0, 1)
    assert names == [("a", "test"), ("b", "test"), ("b", "test")]
    names.clear()
    trainer.evaluate(loader())
    assert {name for name, _ in names} == {None}
    assert trainer.valid_name is None


def test_a_resume_within_an_epoch_continues_each_of_them(tmp_path: Path) -> None:
    """Every record and every row of the history is that of the run that was not interrupted."""
    options = {"save_path": tmp_path / "run", "save_every": 1, "keep_last": 99, "resume": "auto", "log_every": 4}
    whole = build(log_every=4)
    history = whole.run(3, loader())
    build(StateManagerAddon, **options).run(3, loader(), max_steps=5)
    resumed = build(StateManagerAddon, **options)
    found = resumed.run(3, loader())
    assert found["train_metrics_history"] == history["train_metrics_history"]
    assert resumed.log_history == whole.log_history


@on_ranks(2, 3)
def test_several_ranks_are_one_process(world: int) -> None:
    """Unequal shares: with 11 rows and batches of 2, a rank has fewer; the last batch is on any of them."""
    trainer, single = build(MultiGPUAddon, log_every=2), build(log_every=2)
    history = trainer.run(2, loader(size=2), loader(size=2))
    single.run(2, loader(size=2 * world), loader(size=2))
    assert trainer.world_size == world
    assert typed(history["valid_metrics_history"][1], "valid_") == typed(single.test_metrics) == WHOLE
    # In training the samples of a batch are dealt out in turn, and the last batch is that of the last rank with one.
    of_ranks = trainer.gather(trainer.log_train["last"])
    last = [values[-1] for values in of_ranks if len(values) == len(of_ranks[0])][-1]
    assert typed(trainer.train_metrics) == typed(single.train_metrics) | {"last": last} == WHOLE | {"last": last}
    for row, other in zip(trainer.log_history, single.log_history, strict=True):
        alike = [key for key in row if key in ("train/rows", "train/total", "train/largest", "train/big")]
        assert {key: row[key] for key in alike} == pytest.approx({key: other[key] for key in alike}, rel=1e-6)


class Counting(engines.Task):
    """Counts the rows and tokens of its batches."""

    def train_step(self, batch: Any) -> Any:
        tokens = batch[0]
        more = {"n": Sum(len(tokens)), "most": Max(tokens.max()), "least": Min(tokens.min())}
        return {**super().train_step(batch), **more, "mean": Mean(tokens.double().mean(), tokens.numel())}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_is_one_process(name: str) -> None:
    """Also where a schedule cuts a batch into micro-batches, and where ranks share a batch."""

    def compare() -> None:
        engine = ENGINES[name]
        trainer = engines.build(engine, task=Counting)
        trainer.run(1, engines.data(24, 4), engines.data(23, 4, False))
        single = engines.build(None, task=Counting)
        single.run(1, engines.data(24, 4 * engine.shares), engines.data(23, 4, False))
        assert trainer.world_size == engine.world
        for key in ("n", "most", "least"):
            assert trainer.train_metrics[key] == single.train_metrics[key]
            assert trainer.test_metrics[key] == single.test_metrics[key]
        assert trainer.test_metrics["mean"] == pytest.approx(single.test_metrics["mean"], rel=1e-12)
        assert trainer.test_metrics["n"] == 23.0

    each_rank(ENGINES[name].world, compare)


@pytest.mark.parametrize("target", ["model", "step"])
def test_a_compiled_step_returns_them(target: str) -> None:
    """Constructed within the graph, without a break."""

    class Short(Task):
        def train_step(self, batch: Any) -> Any:
            (x,) = batch
            return {"loss": self.model(x).square().mean(), "total": Sum(x.sum()), "rows": Sum(len(x))}

    trainer = build(CompileAddon, task=Short, compile_target=target, compile_backend="eager")
    trainer.run(1, loader(ROWS[:8], 2))
    assert (trainer.train_metrics["total"], trainer.train_metrics["rows"]) == (36.0, 8.0)
    assert trainer.compile_report["graphs"] == 1


@given(
    shares=st.lists(
        st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 9)), max_size=6), min_size=1, max_size=4
    ).filter(lambda shares: any(shares)),
    kind=st.sampled_from(["mean", "sum", "max", "min"]),
)
@settings(max_examples=80, deadline=None)
def test_ranks_and_batches_may_be_combined_in_any_grouping(shares: Any, kind: str) -> None:
    """What two ranks know of their batches is what one knows of all, to rounding."""
    parts = [Partial.empty(kind).extend([v for v, _ in each], [float(w) for _, w in each]) for each in shares]
    flat = [pair for each in shares for pair in each]
    whole = Partial.empty(kind).extend([v for v, _ in flat], [float(w) for _, w in flat])
    merged = merge_sums([{"x": each} for each in parts])["x"]
    assert merged.seen == whole.seen
    assert merged.value == pytest.approx(whole.value, rel=1e-9, abs=1e-3, nan_ok=True)


def test_a_log_is_saved_and_merged_with_the_types() -> None:
    logs = [EpochLog(), EpochLog()]
    for value in (1.0, 5.0, 2.0):
        logs[0].record({"s": Sum(value), "l": Last(value), "m": Max(value), "p": value})
    logs[1].record({"s": Sum(9.0), "l": Last(7.0), "m": Max(math.nan), "only": Min(torch.tensor([3.0]))})
    logs[0].take_sums()
    logs[0].record({"s": Sum(4.0)})
    for log in logs:
        again = EpochLog()
        again.load_state_dict(log.state_dict())
        assert str(again.means()) == str(log.means())
        assert str(again.take_sums()) == str(log.take_sums())
    found = merge_logs(logs).means()
    assert (found["s"], found["l"], found["only"], found["p"]) == (21.0, 2.0, 3.0, 8 / 3)
    assert math.isnan(found["m"])
    closed = EpochLog()
    logs[0].record({"m": Max(8.0)})
    closed.load_state_dict(logs[0].state_dict(is_open=False))
    assert closed.take_sums()["m"].value == 8.0
    with pytest.raises(KeyError):
        closed.load_state_dict({**logs[0].state_dict(), "kinds": {"s": "product"}})


def test_predictions_leave_them_out() -> None:
    with Predictions() as predictions:
        predictions.add(2, {"output": torch.ones(2, 3), "n": Sum(2)})
        assert [*predictions.finish()] == ["output"]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (Sum(torch.ones(3)), None, r"'x' as Sum of a Tensor of shape \(3,\); give it one number, for instance Sum"),
        (Max("3"), None, r"'x' as Max of a str '3'; give it one number"),
        (Mean(1.0, -2), None, "'x' as a Mean of weight -2.0; give the number of items"),
        (Mean(1.0, math.nan), None, "'x' as a Mean of weight nan"),
        (Mean(1.0, torch.tensor(-2)), None, "'x' as a Mean of weight -2; give the number of items"),
        (Mean(torch.tensor(1.0), torch.tensor(math.inf)), None, "'x' as a Mean of weight inf"),
        (Sum(1), 1.0, "'x' to be combined by mean, and before by sum; return it as the same type"),
        (1.0, Sum(1), "'x' to be combined by sum, and before by mean"),
    ],
)
def test_what_cannot_be_combined_is_refused(first: Any, second: Any, text: str) -> None:
    class Wrong(Trainer):
        def train_step(self, batch: Any) -> Any:
            given = second if self.progress_checker.step else first
            return {"loss": self.model(batch[0]).square().mean(), "x": given}

        test_step = train_step

    with pytest.raises(StepError, match=text) as caught:
        build(task=Wrong).run(1, loader())
    assert "in epoch 1" in "".join(caught.value.__notes__)


def test_an_array_without_dimensions_is_a_number() -> None:
    """What ``np.asarray(mean)`` returns: it was kept as an output, and no metric was recorded."""

    class Numpy(Task):
        def test_step(self, batch: Any) -> Any:
            (x,) = batch
            mean, rows = np.asarray(x.double().mean()), np.array(len(x))
            return {"loss": mean, "rows": Sum(rows), "weighed": Mean(mean, rows), "name": np.array("text")}

    found = build(task=Numpy).evaluate(loader())
    assert found == {"loss": 6.0, "rows": 11.0, "weighed": 6.0}


def test_a_loss_for_training_is_a_tensor() -> None:
    class Wrong(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": Mean(super().train_step(batch)["loss"], 4)}

    with pytest.raises(StepError, match="returned a loss of type Mean; return the tensor"):
        build(task=Wrong).run(1, loader())
