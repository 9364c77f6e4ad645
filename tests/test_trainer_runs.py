"""Whole runs against loops written by hand: runs in pieces, validation in between, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from kit.hand import digest, loader
from kit.regression import Regression, Unsized, build, line, pairs, valid
from kit.scripts import Script, besides_progress
from kit.table import Task, core_of, fingerprint
from zae import ConfigError, Every, LoaderError, MonitorError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon

# --- runs in pieces


PIECES = {
    "epochs": [{"n_epoch": 2}, {"n_epoch": 3}],
    "ones": [{"n_epoch": 1}] * 5,
    "steps": [{"n_epoch": None, "max_steps": n} for n in (1, 4, 2, 6, 7, 10)],
    "mixed": [{"n_epoch": None, "max_steps": 9}, {"n_epoch": 4}],
}


@pytest.mark.sample(count=5)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", ["loader", "generator", "list", "unsized"])
def test_pieces_are_the_whole_run(pieces: str, kind: str) -> None:
    """Weights, optimizer, random streams, counters, history and records; not how often run was called."""
    ends = []
    for parts in ([{"n_epoch": 5}], PIECES[pieces]):
        torch.manual_seed(7)
        batches: Any = loader()
        if kind == "generator":
            batches = loader(generator=torch.Generator().manual_seed(1))
        elif kind != "loader":
            batches = list(loader()) if kind == "list" else Unsized(list(loader()))
        trainer = build(AMPAddon, EMAAddon, precision="bf16", decay=0.5, log_every=4, gradient_clip=0.5,
                        scheduler=lambda o: StepLR(o, 2, 0.5))  # fmt: skip
        watched = valid()
        if kind == "unsized" and len(parts) > 1 and "max_steps" in parts[-1]:
            parts = [*parts, {"n_epoch": 1}]  # Nobody knew that the last epoch was at its end.
        for part in parts:
            trainer.run(loader=batches, valid_loader=watched, valid_every=Every(epochs=1), **part)
        ends.append((fingerprint(core_of(trainer)), trainer.progress_checker.step, len(trainer.train_history)))
    assert ends[0][1:] == ends[1][1:] == (30, 5)
    assert ends[0][0] == ends[1][0]


def test_an_endless_stream_in_pieces() -> None:
    """A generator continues where it was left, and steps_per_epoch ends its epochs."""

    def endless() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(4, 4, generator=generator), torch.randint(2, (4,), generator=generator)

    ends = []
    for parts in ([12], [3, 4, 1, 4], [4, 8], [5, 7]):
        trainer, stream = build(), endless()
        torch.manual_seed(1)
        for steps in parts:
            trainer.run(None, stream, max_steps=steps, steps_per_epoch=4)
        ends.append((digest(trainer.model), trainer.progress_checker.epoch, len(trainer.train_history)))
    assert set(ends) == {(ends[0][0], 3, 3)}
    trainer = build()
    torch.manual_seed(1)
    assert trainer.run(3, endless(), steps_per_epoch=4)["step"] == 12
    assert digest(trainer.model) == ends[0][0]


def test_a_gradient_that_an_exception_left_behind_is_not_added_to_the_next() -> None:
    class Once(Regression):
        failing = True

        def train_step(self, batch: Any) -> Any:
            if self.failing and len(batch[0]) == 3:
                raise RuntimeError("once")
            return super().train_step(batch)

    model, fresh = line(), line()
    options = {"task": Once, "gradient_accumulation_steps": 2}
    trainer = build(GradientAccumulationAddon, model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(RuntimeError, match="once"):
        trainer.run(1, pairs(2, 3))
    assert digest(model) == digest(fresh)
    trainer.failing = False
    trainer.run(1, pairs(2, 3))
    other = build(GradientAccumulationAddon, model=fresh, optimizer=SGD(fresh.parameters(), lr=0.1), **options)
    other.failing = False
    other.run(1, pairs(2, 3))
    assert digest(model) == digest(fresh)


# --- watching


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every global stream for each sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return torch.full((4,), index / 20) + noise, index % 2


@pytest.mark.sample(count=4)
@pytest.mark.parametrize("every", [None, 1, 2, 7, Every(epochs=2)])
@pytest.mark.parametrize("shared", [False, True])
def test_validation_at_any_cadence_changes_nothing(every: Any, shared: bool, tmp_path: Any) -> None:
    """Dropout, BatchNorm, shuffling without a generator, and a dataset that draws from three streams."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        generator = torch.Generator().manual_seed(3) if shared else None
        batches = torch.utils.data.DataLoader(Noisy(), 4, shuffle=True, generator=generator)
        watch = torch.utils.data.DataLoader(Noisy(), 4, shuffle=True, generator=generator)
        add_ons = [EMAAddon, StateManagerAddon] if watched else []
        options = {"decay": 0.9, "save_path": tmp_path, "save_every": 2, "log_every": 1} if watched else {}
        trainer = build(*add_ons, **options)
        trainer.run(4, batches, watch if watched else None, valid_every=every)
        streams = torch.rand(1).item(), float(np.random.rand()), random.random()
        ends.append((digest(trainer.model), fingerprint(trainer.state_dict()["optimizer"]), streams))
    assert ends[0] == ends[1]


def test_calls_between_the_steps_change_nothing() -> None:
    """Evaluate, inference, state_dict, printing and pickling in the middle of an epoch."""
    ends = []
    for watched in (False, True):
        trainer = build(EMAAddon, decay=0.5)

        def look(trainer: Any = trainer) -> None:
            trainer.evaluate(valid())
            trainer.inference(valid())
            trainer.state_dict()
            str(trainer.metrics), repr(trainer), trainer.explain()
            trainer.save_model("model.safetensors")

        if watched:
            trainer.checkpoint = look
        torch.manual_seed(5)
        trainer.run(2, loader())
        ends.append((digest(trainer.model), torch.rand(1).item()))
    assert ends[0] == ends[1]


def test_nothing_of_the_run_is_validated_before_training() -> None:
    """The first batch that a run looks at is one to train on."""
    calls: list[str] = []

    class Noting(Task):
        def train_step(self, batch: Any) -> Any:
            calls.append("train")
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Any:
            calls.append("test")
            return super().test_step(batch)

    build(task=Noting).run(2, loader(8), loader(4, shuffle=False))
    assert calls == ["train", "train", "test"] * 2


def test_an_unknown_monitor_fails_at_the_first_validation() -> None:
    """With the names there are; one whose direction is unknown fails at construction."""
    trainer = build(monitor="acuracy", monitor_mode="max")
    with pytest.raises(MonitorError, match=r"did you mean 'accuracy'\? Available: loss, accuracy"):
        trainer.run(5, loader(), valid())
    assert trainer.progress_checker.epoch == 1
    for misspelt, meant in (
        ("acuracy", "accuracy"),
        ("valid/acuracy", "accuracy"),
        ("val_losss", "loss"),
        ("los", "loss"),
    ):
        with pytest.raises(
            ConfigError, match=f"^monitor='{misspelt}': .*monitor_mode='min' or .*did you mean '{meant}'"
        ):
            build(monitor=misspelt)
    for known in ("accuracy", "valid/accuracy", "train/loss", "a/accuracy"):
        loaders: Any = {"a": valid(), "b": valid()} if "a/" in known else valid()
        build(monitor=known, monitor_mode="max").run(1, loader(), loaders)


FIRST_VALIDATION: dict[str, Any] = {
    "after an epoch": lambda trainer: trainer.run(3, loader(), valid()),
    "within an epoch": lambda trainer: trainer.run(3, loader(), valid(), valid_every=4),
}


@pytest.mark.parametrize("how", FIRST_VALIDATION)
@pytest.mark.parametrize("fault", ["test_step", "metric_on_epoch_end", "monitor"])
def test_a_validation_that_fails_loses_no_step(how: str, fault: str, tmp_path: Path) -> None:
    """The state of its step is saved; with the fault mended the run continues, and ends as one without a fault."""

    class Failing(Task):
        def test_step(self, batch: Any) -> Any:
            assert fault != "test_step", "of the task"
            return super().test_step(batch)

        def metric_on_epoch_end(self) -> Any:
            assert self.mode == "train" or fault != "metric_on_epoch_end", "of the task"
            return super().metric_on_epoch_end()

    run = FIRST_VALIDATION[how]
    options: dict[str, Any] = {"save_path": tmp_path / "run", "monitor_mode": "max", "monitor": "accuracy", "seed": 3}
    wrong = {"monitor": "acuracy"} if fault == "monitor" else {}
    failing = build(StateManagerAddon, task=Failing, **{**options, **wrong})
    with pytest.raises(MonitorError if wrong else AssertionError, match="did you mean" if wrong else "of the task"):
        run(failing)
    (saved,) = (tmp_path / "run").glob("crash-*")
    assert saved.name == f"crash-{failing.progress_checker.step:08d}"
    mended = build(StateManagerAddon, **{**options, "resume": saved})
    run(mended)
    whole = build(StateManagerAddon, **{**options, "save_path": tmp_path / "whole"})
    run(whole)
    assert fingerprint(core_of(mended)) == fingerprint(core_of(whole))
    with pytest.raises(
        ConfigError, match=r"whether smaller or larger is better; write monitor_mode='min' or monitor_mode='max'"
    ):
        build(monitor="wheel")
    assert build(monitor="valid/accuracy").run(1, loader(), valid())["best_valid"]["score"] >= 0


# --- what a run leaves behind


def test_an_empty_folder_stays_empty_and_only_progress_is_said(tmp_path: Any) -> None:
    """No add-on that writes, so no file, no connection, and nothing but three epochs and a summary."""
    script = tmp_path / "script.py"
    script.write_text(
        "import socket, torch, zae\n"
        "from zae import Trainer\n"
        "def refuse(*arguments):\n"
        "    raise AssertionError(arguments)\n"
        "socket.socket.connect = socket.socket.bind = socket.getaddrinfo = refuse\n"
        "from zae.addons import AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon\n"
        "class Task(Trainer):\n"
        "    def train_step(self, batch):\n"
        "        return {'loss': self.model(batch).square().mean()}\n"
        "    test_step = train_step\n"
        "model = torch.nn.Linear(2, 1)\n"
        "kind = Task.add_on(AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon)\n"
        "trainer = kind(model, 'cpu', optimizer=torch.optim.SGD(model.parameters(), lr=0.1), precision='bf16')\n"
        "trainer.run(3, [torch.ones(8, 2)] * 5, [torch.ones(8, 2)])\n"
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    with contextlib.chdir(folder):
        status, out, said = Script(script).end()
    assert (status, out, besides_progress(said)) == (0, "", "")
    assert len(said.splitlines()) == 4
    assert list(folder.iterdir()) == []


def test_loaders_that_lie_about_their_length() -> None:
    """The plain loop takes what it is given; a window that comes up short is refused in words."""

    class Lying(Unsized):
        def __init__(self, batches: list[Any], said: int) -> None:
            super().__init__(batches)
            self.said = said

        def __len__(self) -> int:
            return self.said

    for said in (3, 9):
        model = line()
        options = {"task": Regression, "model": model, "optimizer": SGD(model.parameters(), lr=0.1)}
        assert build(**options).run(2, Lying(pairs(2, 2, 2, 2, 2), said))["step"] == 10
        trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=2, **options)
        with pytest.raises(LoaderError, match="fix its __len__"):
            trainer.run(2, Lying(pairs(2, 2, 2, 2, 2), said))


# --- seed 003


def test_the_seed_s_basic_example(tmp_path: Any) -> None:
    """With its two methods added; device as text, a scheduler of zae's own, and none."""
    from zae.schedulers import CosineAnnealingScheduler

    for scheduled in (True, False):
        my_model = line()
        my_optimizer = torch.optim.Adam(my_model.parameters(), lr=0.001)
        my_scheduler = CosineAnnealingScheduler(optimizer=my_optimizer, total_iters=100) if scheduled else None
        trainer = Regression.add_on(StateManagerAddon)(
            model=my_model, device="cpu", mode="train", optimizer=my_optimizer, scheduler=my_scheduler,
            save_path=tmp_path / f"checkpoints{scheduled}",
        )  # fmt: skip
        trainer.run(n_epoch=10, loader=pairs(4, 4), valid_loader=pairs(3))
        assert trainer.progress_checker.epoch == 10
        assert trainer.best_path is not None
        assert trainer.best_path.is_dir()
        assert trainer.mode == "train"
        assert isinstance(trainer.device, torch.device)


def test_the_abstract_trainer_shows_what_to_write() -> None:
    """Class, methods and the lines."""
    model = line()
    with pytest.raises(TypeError, match=r"it has no train_step. Write:[\s\S]*def train_step\(self, batch\)"):
        Trainer.add_on(StateManagerAddon)(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), save_path="x")


def test_a_model_that_a_function_makes_is_seeded():
    """seed= cannot change the weights of a module that exists already; a function is called with the seed."""
    options = {"optimizer": SGD, "log_bar": False}

    def network():
        return torch.nn.Linear(3, 2)

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = Task(network, "cpu", seed=5, **options)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    second = Task(network, "cpu", seed=5, **options)
    torch.manual_seed(5)
    assert digest(first.model) == digest(second.model) == digest(network())
    assert digest(Task(network, "cpu", seed=6, **options).model) != digest(first.model)
    assert digest(Task(network, "cpu", **options).model) != digest(first.model)


def test_a_deleted_trainer_is_freed_at_once():
    """The run refers to the trainer weakly: a circle would keep its memory until the garbage collector runs."""
    gc.disable()
    try:
        trainer = build()
        trainer.plan(1, loader(), valid())
        trainer.run(1, loader(), valid())
        trainer.evaluate(valid())
        held = weakref.ref(trainer), weakref.ref(trainer.unwrap())
        del trainer
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
