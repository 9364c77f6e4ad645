"""Units and data readers as fairseq2 has them: the steps of its loop, engines, metrics, and exact resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import Mean, Sum

from kit.rank_tasks import forks
from zae import ConfigError, StepError, TaskError
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    LedgerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.addons.fairseq2 import ReaderLoader, task_of
from zae.tuning.batch_size import find_batch_size
from zae.tuning.learning_rate import find_lr


class Unit:
    """The sum of squared errors, and its number of targets."""

    def __init__(self, model):
        self._model = model
        self.steps = []
        self.metric_bag = {"samples": Sum(), "error": Mean()}

    @property
    def model(self):
        return self._model

    def set_step_nr(self, step_nr):
        self.steps.append(step_nr)

    def __call__(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self._model(inputs), targets, reduction="sum")
        self.metric_bag["samples"].update(torch.tensor(len(inputs)))
        self.metric_bag["error"].update(loss.detach() / len(inputs), weight=len(inputs))
        return loss, len(inputs)


class SeesEngine(Unit):
    """A unit that fails where it would bypass DistributedDataParallel."""

    def __call__(self, batch):
        if self._model.training:
            assert isinstance(self._model, DistributedDataParallel), type(self._model)
            assert torch.distributed.get_world_size() == 2
        return super().__call__(batch)


class Scores(Unit):
    """An evaluation that only counts."""

    def __init__(self, model, factor):
        super().__init__(model)
        self.factor, self.metric_bag = factor, {"score": Mean()}

    def __call__(self, batch):
        assert not self._model.training
        self.metric_bag["score"].update(torch.tensor(self.factor), weight=len(batch[0]))


class Reader:
    """Lists of batches with a position, the last list of an epoch shorter."""

    def __init__(self, batches, num_accumulate):
        self.batches, self.size, self.place = batches, num_accumulate, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place >= len(self.batches):
            raise StopIteration
        self.place += self.size
        return self.batches[self.place - self.size : self.place]

    def reset(self):
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def batches(sizes=(4, 1, 3, 4, 2), seed=0):
    made = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 3, generator=made, dtype=torch.float64),
            torch.randn(n, 1, generator=made, dtype=torch.float64),
        )
        for n in sizes
    ]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make(*add_ons, kind=Unit, device="cpu", **options):
    unit = kind(model())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    made = task_of(unit).add_on(*add_ons) if add_ons else task_of(unit)
    return made(unit, device, optimizer=optimizer, log_bar=False, seed=1, **options)


def weights(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.unwrap().parameters()])


def by_hand(lists, epochs):
    """Train as fairseq2's loop: gradients of all sums, divided by all targets of a step."""
    unit = Unit(model())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    for _ in range(epochs):
        for step in lists:
            total = 0
            for batch in step:
                loss, count = unit(batch)
                loss.backward()
                total += count
            for each in unit.model.parameters():
                each.grad /= total
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in unit.model.parameters()])


def test_steps_of_a_reader_are_those_of_the_loop_by_hand():
    """With unequal batches in a step, and a last step of one batch."""
    data = batches()
    trainer = make(GradientAccumulationAddon, gradient_accumulation_steps=2)
    metrics = trainer.run(3, ReaderLoader(Reader(data, 2)))
    expected = by_hand([data[:2], data[2:4], data[4:]], 3)
    assert torch.allclose(weights(trainer), expected, rtol=0, atol=1e-12)
    assert trainer.train_unit.steps == [*range(1, 10)]
    assert [row["train_samples"] for row in metrics["train_metrics_history"]] == [14, 14, 14]
    last = metrics["train_metrics_history"][-1]
    assert last["train_error"] == pytest.approx(last["train_loss"], abs=1e-6)


def test_a_loss_without_targets_is_a_mean():
    class MeanUnit(Unit):
        def __call__(self, batch):
            loss, count = super().__call__(batch)
            return loss / count, None

    mean, whole = make(kind=MeanUnit), make()
    for trainer in (mean, whole):
        trainer.run(2, batches((4, 4)))
    assert torch.equal(weights(mean), weights(whole))


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resume_within_an_epoch_is_exact(tmp_path, stop):
    """The reader's place, and what the metrics have counted of the epoch."""
    options = {"gradient_accumulation_steps": 2, "save_path": tmp_path, "save_every": 1}
    whole = make(GradientAccumulationAddon, gradient_accumulation_steps=2)
    expected = whole.run(2, ReaderLoader(Reader(batches(), 2)))
    first = make(StateManagerAddon, GradientAccumulationAddon, **options)
    first.run(2, ReaderLoader(Reader(batches(), 2)), max_steps=stop)
    second = make(StateManagerAddon, GradientAccumulationAddon, resume="auto", **options)
    metrics = second.run(2, ReaderLoader(Reader(batches(), 2)))
    assert second.progress_checker.step == 6
    assert torch.equal(weights(second), weights(whole))
    assert metrics["train_metrics_history"] == expected["train_metrics_history"]


def test_units_of_several_loaders_and_one_score_of_them():
    """Each loader has the unit of its name; a monitor without a name is the mean of both."""
    unit = Unit(model())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    scores = {"dev": Scores(unit.model, 1.0), "test": Scores(unit.model, 3.0)}
    trainer = task_of(unit)(
        unit, "cpu", optimizer=optimizer, log_bar=False, valid_units=scores, monitor="score", monitor_mode="max"
    )
    metrics = trainer.run(1, batches(), {"dev": batches((4,)), "test": batches((4,))})
    row = metrics["valid_metrics_history"][-1]
    assert (row["valid/dev/score"], row["valid/test/score"]) == (1.0, 3.0), row
    assert metrics["best_valid"]["score"] == 2.0
    assert scores["dev"].steps == [5]
    assert metrics["train_metrics_history"][-1]["train_samples"] == 14
    with pytest.raises(ConfigError, match=r"valid_units has no unit for the loader 'other'; write valid_loader="):
        trainer.evaluate({"other": batches((4,)), "dev": batches((4,))})


def test_an_evaluation_with_the_same_unit_keeps_what_an_epoch_has_counted():
    trainer = make()
    metrics = trainer.run(1, batches(), batches((2,)), valid_every=2)
    assert metrics["train_metrics_history"][-1]["train_samples"] == 14
    assert [row["valid_samples"] for row in metrics["valid_metrics_history"]] == [2, 2]


def _looks(trainer, loader, valid):
    trainer.plan(2, loader, valid)
    find_lr(trainer, loader, steps=10)
    find_batch_size(trainer, loader)
    assert trainer.explain()
    trainer.evaluate(valid)


def test_what_looks_at_a_trainer_leaves_its_units_alone():
    """A plan, the searches and an evaluation before a run; the run is that of a trainer nobody looked at."""

    def train(looks):
        unit = Unit(model())
        valid = {"dev": Unit(unit.model), "test": Unit(unit.model)}
        optimizer = torch.optim.SGD(unit.model.parameters(), lr=0.01)
        trainer = task_of(unit)(unit, "cpu", optimizer=optimizer, log_bar=False, valid_units=valid)
        inputs, targets = map(torch.cat, zip(*batches(), strict=True))
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
        loaders = dict.fromkeys(valid, loader)
        if looks:
            before, inner = copy.deepcopy(unit.model.state_dict()), unit.model
            _looks(trainer, loader, loaders)
            assert unit.model is valid["dev"].model is valid["test"].model is inner
            assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())
            assert (unit.steps, float(unit.metric_bag["samples"].compute())) == ([], 0.0)
        metrics = trainer.run(2, loader, loaders)
        return weights(trainer), unit.steps, metrics["train_metrics_history"], metrics["valid_metrics_history"]

    alone, looked = train(False), train(True)
    assert torch.equal(alone[0], looked[0])
    assert alone[1:] == looked[1:]


def test_ranks_call_what_the_engine_has_put_around_the_model():
    """Two ranks are one process with the whole batch; metrics count the samples of both."""
    ranks = make(MultiGPUAddon, kind=SeesEngine, device=["cpu", "cpu"])
    data = batches((4, 1, 3, 4))
    with forks():
        metrics = ranks.run(2, data, batches((3, 2)))
    alone = make()
    alone.run(2, [tuple(map(torch.cat, zip(*data[at : at + 2], strict=True))) for at in (0, 2)])
    assert torch.allclose(weights(ranks), weights(alone), rtol=0, atol=1e-12)
    assert [row["train_samples"] for row in metrics["train_metrics_history"]] == [12, 12]
    assert [row["valid_samples"] for row in metrics["valid_metrics_history"]] == [5, 5]
    assert type(ranks.train_unit.model) is nn.Sequential


@pytest.mark.parametrize(
    ("add_ons", "options", "bound"),
    [
        ((EMAAddon,), {}, 0.0),
        pytest.param((AMPAddon,), {"precision": "bf16"}, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param((CompileAddon,), {}, 1e-12, marks=pytest.mark.exhaustive),
        pytest.param((LedgerAddon,), {"ledger_path": "ledger"}, 0.0, marks=pytest.mark.exhaustive),
        pytest.param((FSDPAddon,), {"device": ["cpu", "cpu"]}, 1e-12, marks=pytest.mark.exhaustive),
    ],
)
def test_other_add_ons_leave_the_weights_of_the_loop(tmp_path, monkeypatch, add_ons, options, bound):
    """Two ranks share the whole batch: each of its two halves is the batch of one rank."""
    monkeypatch.chdir(tmp_path)
    data = batches((4, 2, 3, 4))
    is_shared = len(options.get("device", "")) == 2
    trainer = make(*add_ons, **options)
    trainer.run(2, data)
    whole = [tuple(map(torch.cat, zip(*data[at : at + 2], strict=True))) for at in (0, 2)] if is_shared else data
    alone = make()
    alone.run(2, whole)
    assert torch.allclose(weights(trainer), weights(alone), rtol=0, atol=bound)


def test_a_unit_that_holds_its_model_in_a_criterion():
    class Criterion:
        def __init__(self, inner):
            self.module = inner

    class Nested:
        def __init__(self, inner):
            self._criterion = Criterion(inner)

        @property
        def model(self):
            return self._criterion.module

        def __call__(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    nested, plain = make(kind=Nested), make()
    for trainer in (nested, plain):
        trainer.run(1, batches())
    assert torch.equal(weights(nested), weights(plain))


@pytest.mark.parametrize(
    ("unit", "match"),
    [
        (nn.Linear(1, 1), "unit is .*; give an object with __call__"),
        (object(), "give an object with __call__"),
    ],
)
def test_what_is_not_a_unit(unit, match):
    with pytest.raises(TaskError, match=match):
        task_of(unit)


def test_units_that_cannot_be_trained():
    class Hidden:
        def __init__(self, inner):
            self._get = lambda: inner

        @property
        def model(self):
            return self._get()

        def __call__(self, batch):
            return self.model(batch).sum(), 1

    class Bare(Unit):
        def __call__(self, batch):
            return super().__call__(batch)[0]

    with pytest.raises(TaskError, match="no attribute of Hidden holds its model"):
        task_of(Hidden(nn.Linear(1, 1)))
    with pytest.raises(StepError, match=r"Bare returned .*Tensor.*; return \(loss, num_targets\)"):
        make(kind=Bare).run(1, batches())
    with pytest.raises(ConfigError, match="give the unit in its place"):
        task_of(Unit(model()))(model(), "cpu", mode="test")
    with pytest.raises(ConfigError, match=r"is not unit\.model; make both units of one model"):
        make(valid_units=Unit(model()))
    with pytest.raises(ConfigError, match="has no __next__, reset"):
        ReaderLoader([1])


def test_a_reader_that_was_left_within_an_epoch_begins_again():
    loader = ReaderLoader(Reader([1, 2, 3], 2))
    begun = iter(loader)
    assert [next(begun), next(begun), next(begun)] == [1, 2, 3]
    state = copy.deepcopy(loader.state_dict())
    assert state == {"reader": {"place": 2}, "used": 1}
    assert list(loader) == [1, 2, 3]
    loader.load_state_dict({"reader": {"place": 0}, "used": 1})
    assert list(loader) == [2, 3]
