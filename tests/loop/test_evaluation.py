"""Evaluation and inference: within a run, between runs, and by themselves."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from kit import hand
from kit.hand import digest, loader, network
from kit.table import Task
from zae import ConfigError, LoaderError, StepError, Trainer
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon


def build(*add_ons: Any, task: Any = Task, **options: Any) -> Any:
    model = options.pop("model", None) or network()
    if options.get("mode") != "test":
        options.setdefault("optimizer", SGD(model.parameters(), lr=0.1))
    return task.add_on(*add_ons)(model, "cpu", **options)


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


def expected(model: nn.Module) -> float:
    return hand.evaluate(model, valid())


@pytest.mark.parametrize("mode", ["train", "test"])
def test_evaluate_by_itself(mode: str) -> None:
    """No optimizer is needed in mode "test"; the model's modes come back."""
    trainer = build(mode=mode)
    trainer.model[3].eval()
    before, modes = digest(trainer.model), [module.training for module in trainer.model.modules()]
    found = trainer.evaluate(valid())
    assert [module.training for module in trainer.model.modules()] == modes
    assert (found["loss"], set(found)) == (expected(network()), {"loss", "accuracy"})
    assert digest(trainer.model) == before
    assert trainer.mode == mode


def test_run_in_mode_test() -> None:
    trainer = build(mode="test")
    metrics = trainer.run(1, valid())
    assert metrics["valid_metrics_history"][0]["valid_loss"] == expected(network())
    assert hand.losses(trainer, "valid") == [expected(network())]
    assert (metrics["step"], metrics["epoch"]) == (0, 0)
    assert trainer.run_epoch(valid())["loss"] == expected(network())


@pytest.mark.parametrize("how", ["mode", "toggle"])
def test_run_batch_in_mode_test_is_an_evaluation(how: str) -> None:
    """Without dropout, without moving BatchNorm's averages, without a gradient; into log_test."""
    trainer = build(mode="test") if how == "mode" else build()
    if how == "toggle":
        trainer.toggle()
    before = digest(trainer.model)
    batch = next(iter(valid()))
    for _ in range(2):
        trainer.run_batch(batch)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(network().eval()(batch[0]), batch[1]).item()
    assert trainer.log_test["loss"] == [loss, loss]
    assert digest(trainer.model) == before
    assert trainer.model.training == (how == "mode")


def test_steps_and_epochs_without_run() -> None:
    """run_batch and run_epoch are the loop's own, also when they are called directly."""
    by_hand, model = network(), network()
    torch.manual_seed(1)
    hand.train(by_hand, SGD(by_hand.parameters(), lr=0.1), loader(), 2)
    trainer = build(model=model)
    torch.manual_seed(1)
    batches = loader()
    for _ in range(2):
        for batch in batches:
            trainer.run_batch(batch)
    assert digest(model) == digest(by_hand)
    assert (trainer.progress_checker.step, trainer.progress_checker.batch) == (12, 12)
    model = network()
    trainer = build(model=model)
    torch.manual_seed(1)
    means = [trainer.run_epoch(batches)["loss"] for _ in range(2)]
    assert digest(model) == digest(by_hand)
    assert hand.losses(trainer) == means
    assert trainer.progress_checker.epoch == 2
    trainer.run(1, batches, valid())
    assert trainer.progress_checker.epoch == 3


def test_toggle() -> None:
    """Between the two modes, and to nothing else."""
    trainer = build()
    trainer.toggle()
    assert (trainer.mode, trainer.model.training) == ("test", False)
    trainer.toggle()
    assert (trainer.mode, trainer.model.training) == ("train", True)
    trainer.toggle("train")
    assert trainer.mode == "train"
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        trainer.toggle("trian")


@pytest.mark.parametrize("between", ["nothing", "a run", "a copy", "twice", "wrapped"])
def test_toggle_leaves_frozen_modules_frozen(between: str) -> None:
    """A BatchNorm that the user froze with ``.eval()`` is frozen after any number of changes of the mode."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = [module.training for module in model.modules()]
    trainer = build(model=model, optimizer=SGD(model.parameters(), lr=0.1), task=Norm)
    if between == "wrapped":
        trainer.current_run.set_up()
        trainer.model = nn.Sequential(model)  # As an add-on wraps it.
    trainer.toggle("train")
    trainer.toggle()
    assert not any(module.training for module in trainer.model.modules())
    if between == "twice":
        trainer.toggle("test")
    elif between == "a run":
        trainer.run(1, [torch.ones(2, 2)])
    elif between == "a copy":
        trainer = copy.deepcopy(trainer)
    trainer.toggle()
    assert [module.training for module in trainer.unwrap().modules()] == before
    assert trainer.model.training
    if between != "wrapped":
        trainer.run(1, [torch.ones(2, 2)])
        assert [module.training for module in trainer.unwrap().modules()] == before


def test_toggle_of_a_trainer_made_to_evaluate() -> None:
    """What is frozen in the model stays so; a model that is in evaluation mode as a whole is put into training mode."""
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].eval()
        if not frozen:
            model.eval()
        trainer = build(model=model, optimizer=SGD(model.parameters(), lr=0.1), task=Norm, mode="test")
        trainer.toggle()
        assert [module.training for module in model.modules()] == [True, True, not frozen]


class Norm(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def test_inference_returns_what_test_step_gives() -> None:
    """One dict for each batch, detached, on the host; no log is touched."""

    class Giving(Task):
        def test_step(self, batch: Any) -> Any:
            return {"output": self.model(batch[0]), "name": "x"}

    trainer = build(task=Giving)
    trainer.run(1, loader())
    logs = [len(trainer.log_train), len(trainer.log_test)]
    found = trainer.inference(valid())
    assert [row["output"].shape[0] for row in found] == [4, 4, 2]
    assert not any(row["output"].requires_grad for row in found)
    assert [len(trainer.log_train), len(trainer.log_test)] == logs
    assert trainer.test_metrics == {}
    trainer.model.eval()
    assert torch.equal(found[0]["output"], trainer.model(next(iter(valid()))[0]))


def test_modes_of_submodules_survive_validation() -> None:
    """A BatchNorm that is frozen in evaluation mode stays so."""
    trainer = build()
    trainer.model[1].eval()
    before = trainer.model[1].running_mean.clone()
    trainer.run(2, loader(), valid(), valid_every=2)
    assert [module.training for module in trainer.model.modules()] == [True, True, False, True, True, True]
    assert torch.equal(trainer.model[1].running_mean, before)


def test_several_loaders_by_name() -> None:
    """The plain name is the mean over the loaders, in their history as in what decides."""
    trainer = build()
    loaders = {"a": loader(8, seed=1, shuffle=False), "b": loader(10, seed=2, shuffle=False)}
    metrics = trainer.run(2, loader(), loaders)
    for row in metrics["valid_metrics_history"]:
        assert row["valid_loss"] == (row["valid_a/loss"] + row["valid_b/loss"]) / 2
    assert metrics["best_valid"]["score"] == min(row["valid_loss"] for row in metrics["valid_metrics_history"])
    watching = build(monitor="b/loss")
    assert watching.run(1, loader(), loaders)["best_valid"]["score"] == watching.test_metrics["b/loss"]
    with pytest.raises(LoaderError, match=r"loader\['b'\] is"):
        trainer.evaluate({"a": valid(), "b": 3})


def test_a_step_may_leave_everything_to_the_metrics_of_the_epoch() -> None:
    """It returns nothing to record: there were batches all the same, and without any it is an error all the same."""

    class Counting(Task):
        right, seen = 0.0, 0

        def test_step(self, batch: Any) -> Any:
            self.right += float((self.model(batch[0]).argmax(1) == batch[1]).sum())
            self.seen += len(batch[0])
            return {}

        def metric_on_epoch_end(self) -> Any:
            return {"share": self.right / self.seen} if self.seen else {}

    trainer = build(task=Counting)
    assert trainer.evaluate(valid()) == {"share": trainer.right / 10}
    trainer.right, trainer.seen = 0.0, 0
    with pytest.raises(LoaderError, match="yielded 0 batches"):
        trainer.evaluate(iter([]))


def test_no_loader_at_all_is_refused_as_run_refuses_it() -> None:
    """And nothing is told of a training batch that nobody asked for."""
    for loader_ in ({}, {"a": []}, hand.data()):
        with pytest.raises(LoaderError, match=r"empty dict|has 0 batches|is a dataset") as caught:
            build().evaluate(loader_)
        assert not getattr(caught.value, "__notes__", [])


def test_an_error_in_an_evaluation_leaves_the_model_as_it_was() -> None:
    """Modes, weights, averages and random streams."""

    class Failing(Task):
        def test_step(self, batch: Any) -> Any:
            torch.rand(3)
            raise RuntimeError("mine")

    trainer = build(EMAAddon, task=Failing, decay=0.5)
    trainer.run(1, loader())
    before, stream = digest(trainer.model), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mine"):
        trainer.evaluate(valid())
    assert digest(trainer.model) == before
    assert torch.equal(torch.get_rng_state(), stream)
    assert trainer.model.training
    assert trainer.mode == "train"


def test_autocast_and_averages_are_on_in_an_evaluation() -> None:
    """Also outside of a run."""
    seen = []

    class Noting(Task):
        def test_step(self, batch: Any) -> Any:
            seen.append((self.model(batch[0]).dtype, torch.equal(self.model[0].weight, self.average["0.weight"])))
            return super().test_step(batch)

    trainer = build(AMPAddon, EMAAddon, task=Noting, precision="bf16", decay=0.9)
    trainer.run(1, loader(), valid())
    trainer.evaluate(valid())
    assert set(seen) == {(torch.bfloat16, True)}
    assert not torch.equal(trainer.model[0].weight, trainer.average["0.weight"])


def test_no_gradient_is_recorded() -> None:
    trainer = build()
    trainer.evaluate(valid())
    assert all(p.grad is None for p in trainer.model.parameters())
    with pytest.raises(LoaderError, match="yielded 0 batches"):
        trainer.evaluate(iter([]))
    assert trainer.evaluate([None, *valid()])["loss"] == expected(network())


class Events(Task):
    """A task that writes down its validations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[Any] = []

    def setup(self) -> None:
        super().setup()
        self.events.append("setup")

    def teardown(self) -> None:
        self.events.append("teardown")
        super().teardown()

    def on_validation_begin(self) -> None:
        super().on_validation_begin()
        self.events.append(("begin", self.progress_checker.step, len(self.valid_history)))

    def validate(self) -> dict[str, float]:
        return {**super().validate(), "extra": 1.0}

    def on_validation_end(self, metrics: Any) -> None:
        super().on_validation_end(metrics)
        self.events.append(("end", metrics.get("extra"), metrics["loss"] == self.valid_history[-1]["valid_loss"]))


@pytest.mark.parametrize("every", [None, 2])
def test_the_hooks_around_a_validation(every: int | None) -> None:
    """They enclose each validation of a run, and no other evaluation; the end gets what ``validate`` returned."""
    trainer = build(task=Events)
    trainer.run(2, [*loader(8)][:2], valid(), valid_every=every)
    rounds = [("begin", step, index) for index, step in enumerate((2, 4))]
    ends = [("end", 1.0, True)] * 2
    pairs = [event for pair in zip(rounds, ends) for event in pair]
    assert trainer.events == ["setup", *pairs, "teardown"]
    trainer.evaluate(valid())
    assert trainer.events[6:] == ["setup", "teardown"]
    tested = build(task=Events, mode="test")
    tested.run(1, valid())
    assert tested.events == ["setup", ("begin", 0, 0), ("end", None, True), "teardown"]


class OwnMetrics(Events):
    """A validation without the loop's, which gives metrics of its own."""

    def validate(self) -> Any:
        return {"loss": torch.tensor(4.0 - self.progress_checker.step), "accuracy": np.float32(0.5)}


@pytest.mark.parametrize("own", [OwnMetrics, Events])
def test_what_an_override_of_validate_returns_is_recorded(own: Any) -> None:
    """Beside those of the loop, or in place of them: in the history, the log, the best and for what waits for them."""
    monitor = {"monitor": "loss" if own is OwnMetrics else "extra", "monitor_mode": "min"}
    stops = build(EarlyStoppingAddon, task=own, patience=1, **monitor)
    metrics = stops.run(4, [*loader(8)][:2], valid())
    name, first = ("accuracy", 0.5) if own is OwnMetrics else ("extra", 1.0)
    rows = metrics["valid_metrics_history"]
    assert [row[f"valid_{name}"] for row in rows] == [first] * len(rows)
    assert [row[f"valid/{name}"] for row in stops.log_history if f"valid/{name}" in row] == [first] * len(rows)
    assert stops.best["score"] == (-4.0 if own is OwnMetrics else 1.0)
    assert all(type(row["valid_loss"]) is float for row in rows)
    assert len(rows) == (4 if own is OwnMetrics else 2)  # The other metric does not improve.


def test_an_override_of_validate_returns_numbers() -> None:
    class Words(Events):
        def validate(self) -> Any:
            return {"loss": "low"}

    with pytest.raises(StepError, match=r"validate returned 'loss' of type str 'low'; return a number"):
        build(task=Words).run(1, loader(8), valid())


def test_ready_is_one_setup_for_all_that_it_encloses() -> None:
    """What is within sets up and tears down nothing of its own; a run tears down, and ready() then does not."""
    trainer = build(task=Events)
    batches = [*loader(8)]
    with trainer.ready():
        trainer.run_batch(batches[0])
        trainer.evaluate(valid())
        with trainer.ready():
            trainer.run_epoch(batches)
    assert trainer.events == ["setup", "teardown"]
    assert not trainer.current_run.setup.is_done
    with trainer.ready():
        trainer.run(1, batches)
    assert trainer.events == ["setup", "teardown"] * 2
    with pytest.raises(ValueError, match="too many values") as caught, trainer.ready():
        trainer.run_batch("no such batch")
    assert "the batch was str" in caught.value.__notes__[0]
    assert trainer.events == ["setup", "teardown"] * 3


class StateOfEvents(Task):
    """Its test_step reads what events and train_step have set."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.runs = 1

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.epochs = self.progress_checker.epoch

    def on_validation_begin(self) -> None:
        super().on_validation_begin()
        self.rows = 0

    def train_step(self, batch: Any) -> Any:
        self.last = batch[0].mean()
        return super().train_step(batch)

    def test_step(self, batch: Any) -> Any:
        self.rows += len(batch[0]) * self.runs
        return {**super().test_step(batch), "last": self.last + self.epochs}


def test_a_validation_may_read_what_events_and_steps_have_set() -> None:
    trainer = build(task=StateOfEvents)
    metrics = trainer.run(2, loader(10), valid())
    assert trainer.rows == 10
    assert len(metrics["valid_metrics_history"]) == 2
