"""An epoch loop of the user's own in run_epoch: it is a whole epoch, or is refused with what to write."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from kit.rank_tasks import forks
from zae import CheckpointMismatch, Every, TaskError, Trainer
from zae.addons import GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon


class Plain(Trainer):
    """The loop of zae."""

    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Own(Plain):
    """A loop of its own."""

    def run_epoch(self, loader):
        for batch in loader:
            self.run_batch(batch)


class Numbered(Plain):
    """With something around the loader, and its end asked for by hand."""

    def run_epoch(self, loader):
        numbered = iter(zip(itertools.count(), loader))
        while (pair := next(numbered, None)) is not None:
            self.run_batch(pair[1])


class Sometimes(Plain):
    """The default in every second epoch."""

    def run_epoch(self, loader):
        if self.progress_checker.epoch % 2:
            return super().run_epoch(loader)
        for batch in loader:
            self.run_batch(batch)
        return self.train_metrics


class Around(Plain):
    """The default loop, with a generator of the user around the loader."""

    def run_epoch(self, loader):
        assert len(loader) == 6
        assert loader.batch_size == 4
        return super().run_epoch(loader)


class Through(Plain):
    """The default loop over a generator, which asks for its iterator at once."""

    def run_epoch(self, loader):
        return super().run_epoch(batch for batch in loader)


def make(cls, *add_ons, device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return cls.add_on(*add_ons)(model, device, optimizer=optimizer, scheduler=schedule, log_bar=False, **options)


def shuffled(count=24):
    samples = torch.arange(2.0 * count).reshape(-1, 2) / count
    return torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)


def same(one, other):
    pairs = zip(one.unwrap().state_dict().values(), other.unwrap().state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("cls", [Own, Numbered, Sometimes, Around, Through])
@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,)])
def test_it_trains_validates_and_records_as_the_default_loop(cls, add_ons):
    options = {"gradient_accumulation_steps": 4} if add_ons else {}
    made = []
    for each in (Plain, cls):
        trainer = make(each, *add_ons, seed=0, log_every=2, **options)
        trainer.run(3, shuffled(), [torch.ones(4, 2)], valid_every=2)
        made.append(trainer)
    default, own = made
    assert same(default, own)
    assert own.train_history == default.train_history
    assert own.valid_history == default.valid_history
    assert own.history.log == default.history.log


@pytest.mark.parametrize("cls", [Own, Numbered, Sometimes])
def test_it_ends_at_a_limit_and_resumes_within_an_epoch(cls, tmp_path):
    whole = make(Plain, seed=0)
    whole.run(3, shuffled())
    for limit in (1, 4, 6, 8, None):
        options = {"save_path": tmp_path, "save_every": Every(steps=1), "resume": "auto", "seed": 0}
        trainer = make(cls, StateManagerAddon, **options)
        trainer.run(3, shuffled(), max_steps=limit)
        assert trainer.progress_checker.step == (limit or 18)
    assert same(trainer, whole)


class Lazy(Plain):
    """The default loop over a generator function, which asks for the iterator within the epoch."""

    def run_epoch(self, loader):
        def changed():
            yield from loader

        return super().run_epoch(changed())


@pytest.mark.parametrize("cls", [Through, Lazy])
def test_a_loader_that_a_resume_cannot_find_is_named_before(cls, tmp_path, caplog):
    options = {"save_path": tmp_path, "save_every": Every(steps=1), "seed": 0, "resume": "auto"}
    make(cls, StateManagerAddon, **options).run(2, shuffled(), max_steps=8)
    said = [each for each in caplog.messages if f"{cls.__name__}.run_epoch gives super().run_epoch" in each]
    assert len(said) == 1
    assert "cannot be resumed" in said[0]
    with pytest.raises(CheckpointMismatch, match="the loader is not the one"):
        make(cls, StateManagerAddon, **options).run(2, shuffled())


def test_break_ends_the_epoch():
    class Short(Plain):
        def run_epoch(self, loader):
            for index, batch in enumerate(loader):
                self.run_batch(batch)
                if index == 1:
                    break

    trainer = make(Short)
    metrics = trainer.run(3, shuffled())
    assert [row["step"] for row in metrics["train_metrics_history"]] == [2, 4, 6]
    limited = make(Plain)
    limited.run(3, shuffled(), steps_per_epoch=2)
    assert trainer.train_history[0]["lr"] == limited.train_history[0]["lr"]


def test_an_error_in_it_leaves_the_epoch_open():
    entered = []

    class Failing(Plain):
        def epoch_context(self):
            return Context()

        def run_epoch(self, loader):
            for batch in loader:
                self.run_batch(batch)
                if self.progress_checker.step == 3:
                    raise RuntimeError("of the user")

    class Context:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, kind, *_):
            entered.append(kind)

    trainer = make(Failing)
    with pytest.raises(RuntimeError, match="of the user"):
        trainer.run(2, shuffled())
    assert entered == ["in", RuntimeError]
    assert trainer.progress_checker.place["epoch"] == 1
    assert not trainer.train_history


def without_run_batch(self, loader):
    for batch in loader:
        self.model(batch).square().mean().backward()
        self.optimizer.step()


def twice_each(self, loader):
    for batch in loader:
        self.run_batch(batch)
        self.run_batch(batch)


def some(self, loader):
    for index, batch in enumerate(loader):
        if index % 2:
            self.run_batch(batch)


def two_passes(self, loader):
    for batch in [*loader, *loader]:
        self.run_batch(batch)


def two_loops(self, loader):
    for _ in range(2):
        for batch in loader:
            self.run_batch(batch)


def nothing(self, loader):
    return {"loss": 0.0}


def another_loader(self, loader):
    for batch in shuffled():
        self.run_batch(batch)


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (without_run_batch, "has made 0 steps with a batch.*for batch in loader: self.run_batch"),
        (twice_each, "has made 2 steps with a batch.*in the loader"),
        (some, "has made 0 steps with a batch.*leave batches out"),
        (two_passes, "has made 0 steps with a batch"),
        (two_loops, "iterates over its loader a second time.*more epochs"),
        (nothing, r"has made no epoch; call super\(\).run_epoch\(loader\), or iterate over the loader"),
        (another_loader, "has made no epoch.*the loader that it is given"),
    ],
)
def test_a_loop_that_is_not_an_epoch_says_what_to_write(loop, says):
    trainer = make(type("Mine", (Plain,), {"run_epoch": loop}))
    with pytest.raises(TaskError, match=rf"Mine.run_epoch {says}"):
        trainer.run(2, shuffled())


def test_in_mode_test_it_returns_metrics():
    with pytest.raises(TaskError, match=r"run_epoch returned .*None.* in mode 'test'; return the metrics"):
        Own(nn.Linear(2, 1), "cpu", mode="test", log_bar=False).run(1, [torch.ones(4, 2)])


@forks()
def test_its_loader_is_the_share_of_its_rank(tmp_path):
    files = []
    for cls in (Plain, Own):
        trainer = make(cls, MultiGPUAddon, device=["cpu", "cpu"], seed=0)
        trainer.run(2, shuffled())
        files.append(trainer.save_model(tmp_path / f"{cls.__name__}.safetensors"))
    assert files[0].read_bytes() == files[1].read_bytes()
