"""What a run remembers: weighted means, what steps return beside the loss, and the history."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from kit import hand
from kit.hand import network
from kit.table import Task
from zae import AddOnBase, ConfigError, Every, MonitorError, Trainer
from zae.addons import GradientAccumulationAddon, StateManagerAddon
from zae.loop.epoch_log import EpochLog, plain_numbers
from zae.loop.history import direction_of
from zae.loop.metric_rows import Metrics, MetricsDict, split_prefix
from zae.metrics.reductions import Partial, merge_sums
from zae.values.host import to_host


class Returning(Trainer):
    """A task that returns more than its loss."""

    more: Any = staticmethod(lambda trainer, batch: {})

    def train_step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        return {"loss": loss, **self.more(self, batch)}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


def build(more: Any = None, task: type[Trainer] = Returning, **options: Any) -> Any:
    model = network()
    trainer = task(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), **options)
    if more is not None:
        trainer.more = more
    return trainer


# --- means


def test_the_mean_of_an_epoch_is_by_sample() -> None:
    """Batches of 4, 4 and 1, in training and in evaluation."""
    trainer = build(lambda trainer, batch: {"first": batch[0][:, 0].mean(), "count": len(batch[0])})
    del trainer.model[1]  # BatchNorm refuses a batch of one.
    batches = hand.loader(9, shuffle=False)
    metrics = trainer.run(1, batches, batches)
    inputs = torch.cat([batch[0] for batch in batches])
    expected = inputs[:, 0].double().mean().item()
    for row in (trainer.train_metrics, trainer.test_metrics):
        assert row["first"] == pytest.approx(expected, rel=1e-6)
        assert row["count"] == (4 * 4 + 4 * 4 + 1 * 1) / 9
    assert metrics["train_metrics_history"][0]["train_first"] == trainer.train_metrics["first"]


@given(
    rows=st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.integers(1, 50), st.sampled_from(["number", "tensor", "numpy"])), min_size=1
    ),
    reads=st.sets(st.integers(0, 20)),
)
@settings(max_examples=60, deadline=None)
def test_the_mean_does_not_depend_on_when_it_is_read(rows: Any, reads: Any) -> None:
    """Nor on how a number was returned."""
    make = {"number": float, "tensor": lambda v: torch.tensor(v, dtype=torch.float64), "numpy": np.float64}
    log = EpochLog()
    for index, (value, weight, kind) in enumerate(rows):
        log.record({"a": make[kind](value)}, weight)
        if index in reads:
            log.means()
    total = 0.0
    for value, weight, _ in rows:
        total += value * weight
    assert log.means() == {"a": total / sum(weight for _, weight, _ in rows)}
    assert log["a"] == [value for value, _, _ in rows]


def test_values_that_wait_on_a_device_are_read_in_their_order() -> None:
    """Nothing is read until somebody asks; packed after 64 values."""
    log, series = EpochLog(), [(float(index), index + 1) for index in range(150)]
    log.record({"a": 0.0}, 1)
    for value, weight in series[1:]:
        log._series["a"].add_pending(torch.tensor(value), weight)
    assert len(log._series["a"].values) == 1
    assert log["a"] == [value for value, _ in series]
    assert log.means()["a"] == sum(v * w for v, w in series) / sum(w for _, w in series)


@pytest.mark.parametrize("every", [1, 4, 5, Every(epochs=1), Every(epochs=2)])
def test_records_hold_the_means_since_the_last_one(every: Any) -> None:
    """Each step is in one record, also across the end of an epoch; both counters are in every record."""
    trainer = build(lambda trainer, batch: {"at": trainer.progress_checker.step + 1}, log_every=every)
    trainer.run(4, hand.loader(12))
    rows = [(row["step"], row["batch"], row["train/at"]) for row in trainer.log_history]
    if isinstance(every, int):
        ends = range(every, 13, every)
        assert rows == [(end, end, (end - every + 1 + end) / 2) for end in ends]
    else:
        ends = range(3 * every.epochs, 13, 3 * every.epochs)
        assert rows == [(end, end, end - 1) for end in ends]


def test_a_record_after_a_nan_is_finite_again() -> None:
    """NaN stands in the record it belongs to, and in no other."""
    trainer = build(lambda trainer, batch: {"x": math.nan if trainer.progress_checker.step == 1 else 1.0}, log_every=2)
    trainer.run(1, hand.loader())
    assert [row["train/x"] == 1.0 for row in trainer.log_history] == [False, True, True]
    assert math.isnan(trainer.train_metrics["x"])


def test_merge_sums_of_ranks() -> None:
    one, two = Partial(1.0, 1.0, 1), Partial(3.0, 2.0, 2)
    assert merge_sums([{"a": one}, {"a": two, "b": one}]) == {"a": Partial(4.0, 3.0, 3), "b": one}


# --- what steps return


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Output:
    logits: Any
    name: str = "x"


EXTRAS = {
    "str": "text",
    "none": None,
    "array": np.arange(3.0),
    "tensor": torch.zeros(4, 2),
    "empty": torch.zeros(0),
    "one": torch.ones(1, 1),
    "complex": torch.tensor(1 + 2j),
    "python complex": 1 + 2j,
    "numpy complex": np.complex128(1j),
    "object": object(),
    "set": {1, 2},
    "nested": {"deep": {"number": 2.0, "text": "t"}},
    "list": [torch.ones(2), "x"],
    "named tuple": Pair(torch.ones(2), 1),
    "dataclass": Output(torch.ones(2)),
    "bool": True,
    "numpy bool": np.bool_(True),
    "numpy float": np.float32(0.5),
    "half": torch.tensor(0.5, dtype=torch.float16),
    "integer tensor": torch.tensor(3),
    "bool tensor": torch.tensor(True),
}


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", EXTRAS)
def test_extra_outputs_never_fail(name: str, keeps: bool) -> None:
    """In training, evaluation and the middle of a checkpoint."""
    trainer = build(lambda trainer, batch: {"extra": EXTRAS[name], 3: 4.0, "lr_scale": 2.0}, keep_train_outputs=keeps)
    metrics = trainer.run(None, hand.loader(), max_steps=2)
    state = trainer.state_dict()["records"]["log_train"]
    assert set(state["series"]) >= {"loss", "3", "lr_scale"}
    held: dict[str, Any] = {}
    trainer.on_epoch_end = lambda: held.update({key: trainer.log_train[key] for key in trainer.log_train})
    trainer.run(1, hand.loader(), hand.loader(8))
    row = trainer.train_history[0]
    assert (row["train_3"], row["train_lr_scale"], row["lr"]) == (4.0, 2.0, 0.1)
    numbers = {"bool": 1.0, "numpy bool": 1.0, "numpy float": 0.5, "half": 0.5, "integer tensor": 3.0, "bool tensor": 1}
    assert trainer.test_metrics.get("extra") == numbers.get(name)
    entry = "extra/deep/text" if name == "nested" else "extra"
    if name == "nested":
        assert row["train_extra/deep/number"] == 2.0
    if name not in numbers:
        assert len(held.get(entry, ())) == (6 if keeps else 0)
        assert entry not in trainer.log_train, "the epoch is over"
    assert "loss" in str(metrics)


def test_a_state_leaves_out_what_no_checkpoint_can_hold(caplog: Any) -> None:
    """And says so; the rest of the epoch's log is there."""
    things = {"thing": object(), "text": "x"}
    trainer = build(lambda trainer, batch: {"output": batch[0], **things}, keep_train_outputs=True)
    trainer.run(None, hand.loader(), max_steps=2)
    kept = trainer.state_dict()["records"]["log_train"]["kept"]
    assert set(kept) == {"output", "text"}
    assert "what log_train holds as thing cannot be saved" in caplog.text
    trainer.run(1, hand.loader())
    assert trainer.state_dict()["records"]["log_train"]["kept"] == {}, "a closed epoch is of no use to a resume"


def test_outputs_of_a_last_batch_of_one_sample_are_kept_with_the_others() -> None:
    """``squeeze()`` leaves a number of it, and it was all that the log held."""

    class Shapes(Returning):
        def metric_on_epoch_end(self) -> Any:
            shapes.extend(tuple(each.shape) for each in self.log_test["output"])
            return {}

    shapes: list[Any] = []
    for task in (Shapes, Returning):
        trainer = build(lambda trainer, batch: {"output": batch[0].sum(1).squeeze()}, task=task)
        assert "output" not in trainer.evaluate(hand.loader(9, shuffle=False))
    assert shapes == [(4,), (4,), ()]
    log = EpochLog()
    for value in (None, 1.0, torch.tensor(3.0)):
        log.record({"penalty": value})
    assert log.means() == {"penalty": 2.0}


class Walked(dict[str, Any]):
    """Gives its rows where it is walked, as a dict of tensors of one length may."""

    def __iter__(self) -> Any:
        raise TypeError("no rows")


def test_what_a_step_returns_is_read_by_its_keys() -> None:
    """Whatever it is like where it is walked."""
    log = EpochLog()
    for loss in (1.0, 2.0):
        log.record(Walked(loss=torch.tensor(loss), nested=Walked(a=loss)))
    assert (log["loss"], log["nested/a"]) == ([1.0, 2.0], [1.0, 2.0])


def test_num_targets_is_no_metric() -> None:
    for count in (4, torch.tensor(4)):
        trainer = build(lambda trainer, batch, count=count: {"num_targets": count})
        trainer.run(1, hand.loader())
        assert set(trainer.log_train) == {"loss"}


# --- memory


class Cache:
    """Keys of a layer, as a language model returns them: no container that anybody knows of, and a cycle."""

    def __init__(self, keys: Tensor | None) -> None:
        self.layers = [{"keys": (keys,), "owner": self if keys is not None else None}]


class Locked(Cache):
    def __copy__(self) -> Any:
        raise TypeError("it cannot be copied")


def tensors() -> list[Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(("keep", "returns"), [(False, False), (False, True), (True, True)])
def test_nothing_keeps_a_graph_and_tensors_do_not_pile_up(keep: bool, returns: bool) -> None:
    """Over 1000 steps; outputs are kept only where that was asked for, detached and on the host."""

    def more(trainer: Any, batch: Any) -> Any:
        output = trainer.model(batch[0])
        kept = {"output": output, "pair": Pair(output, 1), "named": Output(output), "list": [output]}
        kept["cache"] = Cache(output)
        return {"norm": output.norm(), **(kept if returns else {})}

    trainer = build(more, keep_train_outputs=keep)
    counts: list[int] = []
    elsewhere = tensors()  # Of other tests, and of their threads: held, or one that is freed would be counted.
    theirs = {id(tensor) for tensor in elsewhere}

    def look() -> None:
        step = trainer.progress_checker.step
        if step in (10, 1000) and trainer.progress_checker.epoch_batch:
            own = [tensor for tensor in tensors() if id(tensor) not in theirs]
            assert [tensor for tensor in own if tensor.grad_fn is not None] == []
            assert not keep or all(not output.requires_grad for output in trainer.log_train["output"])
            counts.append(len(own))

    trainer.checkpoint = look
    trainer.run(1, [next(iter(hand.loader()))] * 1000)
    assert len(counts) == 2
    grown = counts[1] - counts[0]
    assert grown == (990 * 5 if keep else 0)


def test_to_host_takes_what_a_step_goes_on_using() -> None:
    source = torch.ones(2, requires_grad=True)
    array = np.ones(2)
    out = to_host({"a": source * 2, "b": [source, (array,)], "c": Pair(source, 1), "d": Output(source * 1)})
    with torch.no_grad():
        source.zero_()
    array[:] = 0
    assert out["b"][0].tolist() == out["b"][1][0].tolist() == out["c"].a.tolist() == [1, 1]
    assert type(out["c"]) is Pair
    assert type(out["d"]) is Output
    assert not any(t.requires_grad for t in (out["a"], out["b"][0], out["c"].a, out["d"].logits))


def test_to_host_frees_what_an_object_of_any_class_holds() -> None:
    """A distribution or a cache is kept without its graph; what holds none is kept as it is, and modules too."""
    weight = torch.ones(2, requires_grad=True)
    normal, cache = torch.distributions.Normal(weight * 2, 1.0), Cache(weight * 3)
    out = to_host({"normal": normal, "cache": cache})
    assert out["normal"].mean.tolist() == [2, 2]
    assert not out["normal"].mean.requires_grad
    (layer,) = out["cache"].layers
    assert layer["keys"][0].tolist() == [3, 3]
    assert layer["keys"][0].grad_fn is None
    assert layer["owner"] is out["cache"]
    assert normal.mean.requires_grad
    assert cache.layers[0]["keys"][0].requires_grad
    for value in (torch.nn.Linear(1, 1), Cache(None), torch, Cache, Locked(weight * 2), lambda: weight):
        assert to_host(value) is value


# --- metric_on_epoch_end


class Seed(Task):
    """The pattern of seed 003: a metric of what test_step returned."""

    asked = "output"

    def test_step(self, batch: Any) -> Any:
        return {**super().test_step(batch), "output": self.model(batch[0])}

    def metric_on_epoch_end(self) -> Any:
        return {"spread": torch.cat(self.log_test[self.asked]).std().item()}


def test_metric_on_epoch_end_of_the_outputs_of_an_evaluation() -> None:
    """Seed 003: it is called at the end of training too, where nothing has been evaluated: nothing is added there."""
    trainer = build(task=Seed)
    metrics = trainer.run(2, hand.loader(), hand.loader(8, shuffle=False))
    assert "train_spread" not in metrics["train_metrics_history"][0]
    assert metrics["valid_metrics_history"][1]["valid_spread"] == pytest.approx(
        torch.cat([row["output"] for row in trainer.inference(hand.loader(8, shuffle=False))]).std().item()
    )
    with pytest.raises(MonitorError, match="log_test no longer holds 'output'"):
        trainer.log_test["output"]
    trainer = build(task=Seed)
    assert "spread" in trainer.evaluate(hand.loader(8))
    misspelt = build(task=type("Misspelt", (Seed,), {"asked": "outputt", "__module__": __name__}))
    with pytest.raises(MonitorError, match="log_test has no entry 'outputt'; did you mean 'output'"):
        misspelt.run(1, hand.loader(), hand.loader(8))


class Thing:
    """What a step returns beside numbers; how many of them are alive is counted."""

    alive: ClassVar[Any] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class Things(Task):
    """Each step returns one; the most that were alive at once, in training and in evaluation."""

    fails: Any = None

    def train_step(self, batch: Any) -> Any:
        return {**super().train_step(batch), "thing": self.made()}

    def test_step(self, batch: Any) -> Any:
        out = {**super().test_step(batch), "thing": self.made()}
        if self.fails == "test_step" and len(self.log_test) and len(self.log_test["loss"]) == 2:
            raise ArithmeticError("in the third batch")
        return out

    def made(self) -> Thing:
        thing = Thing()
        most = vars(self).setdefault("most", {"train": 0, "test": 0})
        most[self.mode] = max(most[self.mode], len(Thing.alive))
        return thing


class Asking(Things):
    def metric_on_epoch_end(self) -> Any:
        if self.fails == "metric":
            raise ArithmeticError("in the metric")
        log = self.log_train if self.mode == "train" and self.keep_train_outputs else self.log_test
        return {"things": len(log["thing"])}


class AskingAddon(AddOnBase):
    """Count the outputs of an evaluation."""

    layer = "observe"

    def metric_on_epoch_end(self) -> Any:
        found = dict(super().metric_on_epoch_end())
        if getattr(self, "fails", None) == "metric":
            raise ArithmeticError("in the metric")
        return found | ({"things": len(self.log_test["thing"])} if self.mode == "test" else {})


@pytest.mark.parametrize("where", ["run", "evaluate", "several", "mode", "test_step", "metric"])
@pytest.mark.parametrize(
    ("task", "keep"), [(Things, False), (Asking, False), (Asking, True), (Things.add_on(AskingAddon), False)]
)
def test_outputs_are_held_only_while_a_metric_is_to_read_them(task: Any, keep: bool, where: str) -> None:
    """Not in an epoch, not after a validation, and not after an exception in one."""
    gc.collect()  # The traceback of an earlier test may hold some.
    trainer = build(task=task, keep_train_outputs=keep, **({"mode": "test"} if where == "mode" else {}))
    batches, valid = hand.loader(24, 4), {"a": hand.loader(20, 4), "b": hand.loader(20, 4)}
    asks = task is not Things
    if where in ("test_step", "metric"):
        trainer.fails = where = where if asks else "test_step"
        with pytest.raises(ArithmeticError):
            trainer.evaluate(valid["a"])
    elif where == "mode":
        trainer.run(2, valid["a"])
    else:
        found = trainer.run(2, batches, valid if where == "several" else valid["a"]) if where != "evaluate" else {}
        found = trainer.evaluate(valid["a"])
        assert found.get("things") == (5 if asks else None)
    gc.collect()
    assert len(Thing.alive) == 0
    held = (3 if where == "test_step" else 5) if asks else min(trainer.most["test"], 2)
    trained = 6 if keep and where in ("run", "several") else 0  # The epoch ends behind its validation.
    assert trainer.most == {"test": held + trained, "train": trained or min(trainer.most["train"], 2)}


def test_a_metric_of_training_s_outputs_says_what_to_write() -> None:
    """The log that gave its outputs up says so, whatever asks."""

    class Unkept(Things):
        def metric_on_epoch_end(self) -> Any:
            return {"things": len(self.log_train["thing"])} if self.mode == "train" else {}

    said = "log_train does not keep 'thing', which is not a number; write keep_train_outputs=True"
    with pytest.raises(MonitorError, match=said):
        build(task=Unkept).run(1, hand.loader())
    plain, kept = build(task=Things), build(task=Unkept, keep_train_outputs=True)
    assert kept.run(1, hand.loader(24, 4), hand.loader(8))["train_metrics_history"][0]["train_things"] == 6
    for log, match in ((kept.log_train, "log_train no longer holds 'thing'"), (plain.log_test, "log_test has no")):
        with pytest.raises(MonitorError, match=match):
            log["thing"]
    plain.evaluate(hand.loader(8))
    with pytest.raises(MonitorError, match=r"log_test does not keep 'thing'.*override metric_on_epoch_end"):
        plain.log_test["thing"]


class Gap(Things):
    """A metric of what was trained, which the validation asks for."""

    def metric_on_epoch_end(self) -> Any:
        return {"things": len(self.log_train["thing"])}


def test_a_validation_reads_what_was_trained_in_its_epoch(caplog: Any) -> None:
    """The epoch ends behind its validation; an evaluation after that has nothing to read, and says so."""
    trainer = build(task=Gap, keep_train_outputs=True)
    metrics = trainer.run(2, hand.loader(24, 4), hand.loader(8), valid_every=Every(steps=3))
    assert [row["valid_things"] for row in metrics["valid_metrics_history"]] == [3, 6, 3, 6]
    assert caplog.text == ""
    assert "things" not in trainer.evaluate(hand.loader(8))
    assert "metric_on_epoch_end adds nothing here: log_train no longer holds 'thing'" in caplog.text


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False), (False, False)])
def test_outputs_in_a_state_of_an_open_epoch(before: bool, after: bool, caplog: Any) -> None:
    """They are saved where they are kept. Kept from the resume on only, they are not taken for those of the epoch."""

    class Squeezed(Task):
        def train_step(self, batch: Any) -> Any:
            return {**super().train_step(batch), "output": self.model(batch[0])[:, 0].squeeze()}

        def metric_on_epoch_end(self) -> Any:
            if self.mode == "test" or not self.keep_train_outputs:
                return {}
            return {"outputs": sum(each.numel() for each in self.log_train["output"])}

    first = build(task=Squeezed, keep_train_outputs=before)
    first.run(None, hand.loader(21, 4), max_steps=3)
    resumed = build(task=Squeezed, keep_train_outputs=after)
    resumed.load_state_dict(first.state_dict())
    del resumed.model[1]  # BatchNorm refuses the last batch, of one sample.
    resumed.run(2, hand.loader(21, 4))
    found = [row.get("train_outputs") for row in resumed.train_history]
    assert found == {(True, True): [21, 21], (False, True): [None, 21]}.get((before, after), [None, None])
    assert "train_output" not in resumed.train_history[0]
    assert ("adds nothing here" in caplog.text) == (found[0] is None and after)


def test_a_misspelt_entry_is_an_error_also_where_nothing_is_validated() -> None:
    """What nobody records is not left out silently."""

    class Misspelt(Task):
        def metric_on_epoch_end(self) -> Any:
            return {"x": sum(self.log_train["los"])}

    with pytest.raises(MonitorError, match="log_train has no entry 'los'; did you mean 'loss'"):
        build(task=Misspelt).run(1, hand.loader())


# --- rows and the history


def test_a_name_is_found_with_and_without_its_split() -> None:
    row = Metrics(epoch=1, step=2, valid_loss=0.5)
    assert row["loss"] == row["valid/loss"] == row["valid_loss"] == 0.5
    assert "loss" in row
    assert "accuracy" not in row
    assert row.get("accuracy") is None
    with pytest.raises(MonitorError, match="unknown metric 'los'; did you mean"):
        row["los"]
    assert split_prefix("train_x") == ("train", "x")
    assert split_prefix("training") == ("", "training")


@pytest.mark.parametrize(
    ("name", "direction"),
    [("loss", "min"), ("valid/MSE", "min"), ("top1_accuracy", "max"), ("val-auc", "max"), ("loss_score", "max")],
)
def test_the_direction_of_a_metric(name: str, direction: str) -> None:
    assert direction_of(name) == direction
    assert direction_of(name, "min") == "min"


def test_a_direction_that_the_name_does_not_tell() -> None:
    with pytest.raises(ConfigError, match="its name does not say"):
        direction_of("foo")


def test_what_run_returns_prints_as_a_table() -> None:
    """Seed 000: its keys, and its text."""
    trainer = build(task=Task)
    metrics = trainer.run(2, hand.loader(), hand.loader(8), valid_every=4)
    assert set(metrics) >= {
        "best_valid", "best_train", "train_metrics_history", "valid_metrics_history", "epoch", "step", "stop_reason",
    }  # fmt: skip
    assert metrics["best_valid"]["loss"] == min(row["valid_loss"] for row in metrics["valid_metrics_history"])
    assert metrics["train_metrics_history"][-1]["train_loss"] == hand.losses(trainer)[-1]
    lines = str(metrics).splitlines()
    assert lines[0].split()[:3] == ["epoch", "step", "train_loss"]
    places = [(row["epoch"], row["step"]) for row in metrics["valid_metrics_history"]]
    assert places == [(1, 4), (2, 8), (2, 12)], "a validation belongs to the epoch that is open"
    assert [tuple(map(int, line.split()[:2])) for line in lines[1:]] == [(1, 4), (1, 6), (2, 8), (2, 12)]
    assert len([line for line in lines if line.endswith("best")]) == 1
    assert len({len(line.removesuffix("  best")) for line in lines}) == 1
    assert str(MetricsDict()) == "no epoch has been trained"


def test_an_open_epoch_is_shown_so_far() -> None:
    trainer = build(task=Task)
    metrics = trainer.run(None, hand.loader(), max_steps=2)
    assert [(row["epoch"], row["step"]) for row in metrics["train_metrics_history"]] == [(1, 2)]
    assert trainer.train_history == []


def test_the_history_prints_as_its_table(capsys: Any) -> None:
    trainer = build(task=Task)
    trainer.run(2, hand.loader(), hand.loader(8))
    print(trainer.metrics)
    assert capsys.readouterr().out == f"{trainer.metrics}\n"
    assert len(hand.losses(trainer)) == len(hand.losses(trainer, "valid")) == 2


def test_cells_are_short() -> None:
    rows = [Metrics(epoch=1, step=1, a=1e-9, b=math.nan, c=123456.0, d=0.0)]
    text = str(MetricsDict(train_metrics_history=rows, valid_metrics_history=[]))
    assert text.splitlines()[1].split() == ["1", "1", "1e-9", "nan", "1.235e5", "0"]


def test_log_reset_forgets_the_open_epoch() -> None:
    trainer = build(task=Task)
    trainer.run(None, hand.loader(), max_steps=2)
    trainer.log_reset()
    assert len(trainer.log_train) == len(trainer.log_test) == 0
    with pytest.raises(MonitorError, match="nothing yet"):
        trainer.log_train["loss"]


def test_nan_is_never_the_best() -> None:
    scores = iter([math.nan, 2.0, math.nan, 1.0, math.nan])

    class Scored(Task):
        def test_step(self, batch: Any) -> Any:
            return {"loss": next(scores)}

    trainer = build(task=Scored)
    metrics = trainer.run(5, hand.loader(8), hand.loader(4))
    assert (metrics["best_valid"]["score"], metrics["best_valid"]["epoch"]) == (1.0, 4)


def test_what_is_logged_by_hand_is_kept_as_plain_numbers():
    """A tensor given to ``log`` must not keep its graph alive in the history."""
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    kept = plain_numbers({"loss": loss, "count": np.int64(3), "note": "text", "all": torch.zeros(2)})
    assert (kept["loss"], kept["count"], kept["note"]) == (6.0, 3, "text")
    assert type(kept["count"]) is int
    assert not kept["all"].requires_grad


class Away(torch.Tensor):
    """A tensor that says that it is on an accelerator without float64, and counts how often the host waits for it."""

    is_cpu = False
    reads = 0
    _reading = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__float__, Tensor.__bool__, Tensor.__int__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Away.reads += func in cls._reading
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Away) and made.dtype == torch.float64:
            raise TypeError("the device has no float64")  # As MPS says.
        return made


def test_numbers_of_the_host_and_of_a_device_keep_their_order_and_weights() -> None:
    """A step may return a tensor of the device once and a plain 0.0 at other times."""
    for chunked in (1, 300):
        log, expected = EpochLog(), []
        for index in range(chunked):
            log.record({"aux": torch.tensor(float(index)).as_subclass(Away)}, weight=index + 1)
            expected.append(float(index))
        log.record({"aux": 7.0}, weight=10)
        log.record({"aux": torch.tensor(8.0)}, weight=20)
        log.record({"aux": torch.tensor(9.0).as_subclass(Away)}, weight=30)
        expected += [7.0, 8.0, 9.0]
        weights = [*range(1, chunked + 1), 10, 20, 30]
        mean = sum(map(float.__mul__, expected, map(float, weights))) / sum(weights)
        assert log.means()["aux"] == pytest.approx(mean, rel=1e-12)
        assert log["aux"] == expected


def test_a_buffer_of_a_device_is_recorded_as_it_was() -> None:
    """A step may return a sum that it keeps adding to; on an accelerator it is read late."""
    log, total = EpochLog(), torch.tensor(0.0).as_subclass(Away)
    for _ in range(3):
        total += 1
        log.record({"total": total})
    assert log["total"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("more", "reads_a_step"), [({}, 0), ({"gradient_accumulation_steps": 4}, 1)], ids=str)
def test_counted_targets_are_read_with_the_log(more: Any, reads_a_step: int) -> None:
    """No step waits for the device to learn how many targets it had, but to divide a window by them: that one, once."""

    class Counting(Trainer):
        wraps: Any = Away

        def train_step(self, batch: Any) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            count = (batch[1] > 0).sum() + 1
            return {name: each.as_subclass(self.wraps) for name, each in (("loss", loss), ("num_targets", count))}

        test_step = train_step

    def run(batches: int, wraps: Any = Away) -> tuple[int, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        cls = Counting.add_on(GradientAccumulationAddon) if more else Counting
        trainer = cls(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), log_bar=False, **more)
        trainer.wraps, Away.reads = wraps, 0
        metrics = trainer.run(1, hand.loader(4 * batches, shuffle=False), hand.loader(8, shuffle=False))
        return Away.reads, (metrics, model.weight.detach())

    few, many = run(8)[0], run(40)[0]
    assert many - few == reads_a_step * (40 - 8) // 4
    (metrics, weight), (expected, same) = run(20)[1], run(20, Tensor)[1]
    assert str(metrics) == str(expected)
    assert torch.equal(weight.as_subclass(Tensor), same)


@pytest.mark.parametrize("monitor", ["loss", "score", "epoch"])
def test_a_metric_called_like_what_is_said_of_the_best_is_there_too(monitor: str) -> None:
    """``score``, ``split``, ``epoch`` and ``step`` of a user's own are in the row."""

    class Named(Task):
        def test_step(self, batch: Any) -> Any:
            return {"loss": torch.tensor(0.25), "score": 70.5, "epoch": 71.5, "split": 72.5}

    model = network()
    trainer = Named(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), monitor=monitor, monitor_mode="min")
    best = trainer.run(2, hand.loader(), hand.loader())["best_valid"]
    score = {"loss": 0.25, "score": 70.5, "epoch": 71.5}[monitor]
    assert (best["score"], best["epoch"], best["split"]) == (score, 1, "valid")
    assert (best["valid_score"], best["valid_epoch"], best["valid_split"]) == (70.5, 71.5, 72.5)
    trainer.history.recompute_best()
    assert trainer.best == best


@pytest.mark.parametrize(("first", "second"), [("val_loss", "val_acc"), ("test/loss", "loss")])
def test_a_step_may_name_a_metric_with_a_split(first: str, second: str, tmp_path: Any) -> None:
    """By its own name it is found in a row, and it is the best one's score also after a resume with another monitor."""

    class Named(Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            loss = super().test_step(batch)["loss"]
            return {"val_loss": loss, "val_acc": -loss, "test/loss": loss, "loss": 2 * loss}

    def build(monitor: str) -> Any:
        model = network()
        return Named.add_on(StateManagerAddon)(
            model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), monitor=monitor, log_bar=False,
            save_path=tmp_path, resume="auto",
        )  # fmt: skip

    history = build(first).run(3, hand.loader(), hand.loader(9))
    row = min(history["valid_metrics_history"], key=lambda row: row[f"valid_{first}"])
    assert row[first] == row[f"valid_{first}"] == history["best_valid"]["score"]
    assert first in row
    resumed = build(second)
    history = resumed.run(3, hand.loader(), hand.loader(9))
    scores = {each["step"]: each["score"] for each in resumed.history.scores_by_step().values()}
    assert scores == {each["step"]: each[f"valid_{second}"] for each in history["valid_metrics_history"]}
    assert history["best_valid"]["score"] in scores.values()
