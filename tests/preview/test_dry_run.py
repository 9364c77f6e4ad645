"""A fault of the validation is found before the first step, and looking for it changes nothing."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from kit.hand import digest
from zae import MonitorError, Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon, StateManagerAddon

NOTE = "zae: before training, one batch of valid_loader was tried with a copy of the model"


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean()}

    def test_step(self, batch: Any) -> Any:
        return {**self.train_step(batch), "accuracy": 1.0}


def batches(count: int = 3) -> Any:
    return list(torch.randn(count, 1, 4, 3, generator=torch.Generator().manual_seed(1)))


def make(task: Any = Task, add_ons: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
    )
    return task.add_on(*add_ons)(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


class Reading(Dataset[Any]):
    """Counts what is read of it, keeps it, opens a file late, and draws from streams of all kinds."""

    def __init__(self) -> None:
        self.reads, self.file, self.kept, self.cache = 0, None, [], {}
        self.own = random.Random(3)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.kept.append(index)
        self.cache[index] = torch.ones(3)
        self.file = self.file or object()
        return (torch.rand(3) + float(np.random.rand()) + random.random() + self.own.random(),)


class Meter:
    def __init__(self) -> None:
        self.seen: list[float] = []


class Watching(Task):
    """Its test_step changes everything that it reaches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls, self.meter, self._private, self.names = 0, Meter(), Meter(), {"a": [0]}
        self.stream = np.random.default_rng(0)
        self.head = self.model[3]  # A part of the model stays a part of it.

    def test_step(self, batch: Any) -> Any:
        self.calls += 1
        for meter in (self.meter, self._private):
            meter.seen.append(float(batch[0].sum()))
        self.names["a"].append(self.calls)
        self.log({"seen": 1.0}, self.progress_checker.step)
        self.best["odd"] = 1.0
        noise = float(self.stream.random()) + float(torch.rand(())) + float(np.random.rand()) + random.random()
        with torch.no_grad():
            self.model[0].weight.add_(1.0)
            self.head.bias.add_(noise)
        if self.calls > 1:
            self.stop("enough")
        return {"loss": self.model(batch[0]).mean()}


def whole(trainer: Any, loader: Any) -> Any:
    """What a step can have changed."""
    data = getattr(loader, "dataset", None)
    own = vars(data) if isinstance(data, Reading) else {}
    seen = {key: str(value) for key, value in own.items() if key != "own"}
    return (
        digest(trainer.model), trainer.calls, trainer.meter.seen, trainer._private.seen, trainer.names,
        trainer.stream.bit_generator.state["state"]["state"], len(trainer.log_history), trainer.best,
        trainer.progress_checker.stop_reason, [module.training for module in trainer.model.modules()], seen,
        data.own.getstate() if own else None, torch.rand(1).item(), float(np.random.rand()), random.random(),
    )  # fmt: skip


class Halt(Exception):
    """Ends a run before its first step."""


@pytest.mark.parametrize("kind", ["list", "DataLoader", "workers", "dict"])
@pytest.mark.parametrize("add_ons", [(), (EMAAddon, JSONLLoggerAddon, StateManagerAddon)])
def test_the_trial_touches_nothing_of_the_run(kind: str, add_ons: Any) -> None:
    """Weights, attributes, records, files, datasets and every stream are as without it, before the first step."""
    tried: list[Any] = []

    class Halting(Watching):
        def test_step(self, batch: Any) -> Any:
            tried.append(self.model)
            return super().test_step(batch)

        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            raise Halt

    ends = []
    for try_validation in (True, False):
        folder = f"{try_validation}"
        options = {"jsonl_path": f"{folder}/log.jsonl", "save_path": f"{folder}/saved"} if add_ons else {}
        trainer = make(Halting, add_ons, try_validation=try_validation, **options)
        valid: Any = batches()
        if kind != "list":
            valid = DataLoader(Reading(), batch_size=4, shuffle=True, num_workers=2 if kind == "workers" else 0)
        random.seed(4), np.random.seed(4), torch.manual_seed(4)
        with pytest.raises(Halt):
            trainer.run(2, batches(), {"a": valid, "b": batches()} if kind == "dict" else valid)
        lines = Path(options["jsonl_path"]).read_text() if add_ons else ""
        ends.append((whole(trainer, valid), lines.count("seen")))
        assert (len(tried) > 0) is try_validation
        assert all(model is not trainer.model for model in tried)
        tried.clear()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("add_ons", [(), (EMAAddon,)])
def test_a_run_ends_as_without_the_trial(add_ons: Any) -> None:
    """Bitwise: the weights, the history and the streams of a whole run, with dropout and a shuffled loader."""
    ends = []
    for try_validation in (True, False):
        trainer = make(Task, add_ons, try_validation=try_validation)
        data = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(2)))
        torch.manual_seed(6)
        trainer.run(2, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4, shuffle=True))
        ends.append((digest(trainer.model), str(trainer.metrics), torch.rand(1).item()))
    assert ends[0] == ends[1]


def test_a_fault_of_test_step_is_raised_before_the_first_step() -> None:
    """The user's own exception, with a note that says what it is of, and nothing written."""

    class Failing(Task):
        def test_step(self, batch: Any) -> Any:
            raise LookupError("of the task")

    trainer = make(Failing, [StateManagerAddon], save_path="saved")
    with pytest.raises(LookupError, match="of the task") as caught:
        trainer.run(2, batches(), batches())
    assert caught.value.__notes__[0].startswith(NOTE)
    assert "try_validation=False skips this trial" in caught.value.__notes__[0]
    assert trainer.progress_checker.step == 0
    assert not Path("saved").exists()
    left_out = make(Failing, try_validation=False)
    with pytest.raises(LookupError):
        left_out.run(2, batches(), batches())
    assert left_out.progress_checker.epoch == 1


@pytest.mark.parametrize("monitor", ["acuracy", "valid/acuracy"])
def test_an_unknown_monitor_is_refused_before_the_first_step(monitor: str) -> None:
    trainer = make(monitor=monitor, monitor_mode="max")
    with pytest.raises(MonitorError, match=r"did you mean 'accuracy'\? Available: loss, accuracy") as caught:
        trainer.run(2, batches(), batches())
    assert caught.value.__notes__[0].startswith(NOTE)
    assert trainer.progress_checker.step == 0
    for known in ("accuracy", "valid/accuracy", "train/loss", "a/accuracy"):
        loaders = {"a": batches(), "b": batches()} if "a/" in known else batches()
        make(monitor=known, monitor_mode="max").run(1, batches(), loaders)


def test_a_metric_that_needs_more_than_one_batch_only_warns(caplog: Any) -> None:
    class Several(Task):
        def metric_on_epoch_end(self) -> Any:
            if self.mode == "test" and len(self.log_test["loss"]) < 2:
                raise ValueError("needs two batches")
            return {"own": 1.0}

    assert make(Several, monitor="own", monitor_mode="max").run(1, batches(), batches())["best_valid"]["score"] == 1.0
    [text] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "metric_on_epoch_end failed with one batch" in text
    assert "needs two batches" in text


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3),)] * 4)


class Bound(Task):
    """Holds what cannot be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines = (line for line in "ab")
        self.handle = open(__file__)  # noqa: SIM115

    def teardown(self) -> None:
        super().teardown()
        self.handle.close()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("iterator", "a batch of list_iterator cannot be tried and put back"),
        ("stream", "cannot be tried and put back"),
        ("task", "the model or the task cannot be copied"),
        ("model", "the model or the task cannot be copied"),
        ("large", "bytes of tensors"),
        ("workers", "a batch could not be loaded without workers"),
    ],
)
def test_what_cannot_be_tried_is_left_out(case: str, reason: str, caplog: Any) -> None:
    """With a line of the level debug, and the run continues."""
    caplog.set_level(logging.DEBUG, "zae")
    trainer, valid = make(Bound if case == "task" else Task), batches()
    if case == "model":
        trainer.model.cached = trainer.model[0].weight * 2  # No leaf: torch does not copy it.
    if case == "large":
        trainer.images = torch.empty(300 << 20, dtype=torch.uint8)
    if case == "workers":
        valid = DataLoader(InWorkers(), batch_size=4, num_workers=1)
    if case == "stream":
        valid = DataLoader(Endless(), batch_size=4)
    trainer.run(1, batches(), iter(valid) if case == "iterator" else valid)
    assert len(trainer.valid_history) == 1
    lines = [r.getMessage() for r in caplog.records if "is not tried before training" in r.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0]


class InWorkers(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        assert torch.utils.data.get_worker_info() is not None
        return (torch.ones(3),)


def test_a_resume_and_a_second_call_try_nothing() -> None:
    tried: list[int] = []

    class Counting(Task):
        def test_step(self, batch: Any) -> Any:
            tried.append(self.progress_checker.step)
            return super().test_step(batch)

    first = make(Counting, [StateManagerAddon], save_path="saved")
    first.run(1, batches(), batches(1))
    assert tried == [0, 3]
    first.run(1, batches(), batches(1))
    again = make(Counting, [StateManagerAddon], save_path="saved", resume=True)
    again.run(1, batches(), batches(1))
    again.run(2, batches(), batches(1))
    assert tried == [0, 3, 6, 9]


def test_a_crash_state_is_saved_whatever_the_monitor_says() -> None:
    """The monitor is not asked while the state of a failed run is saved."""
    trainer = make(Task, [StateManagerAddon], save_path="saved", monitor="acuracy", monitor_mode="max")
    with pytest.raises(MonitorError, match="did you mean 'accuracy'"):
        trainer.run(2, batches(), iter(batches()))
    assert [path.name for path in Path("saved").glob("crash-*")] == ["crash-00000003"]
    fixed = make(Task, [StateManagerAddon], save_path="saved", monitor="accuracy", resume="saved/crash-00000003")
    assert fixed.run(2, batches(), batches())["epoch"] == 2
