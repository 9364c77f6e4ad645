"""Windows: how long they are, what they hold, and what is refused. What they compute is in tests/test_trainer.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from kit.hand import digest, loader, network
from kit.ranks import each_rank
from kit.table import Task
from zae import AddOnBase, ConfigError, LoaderError, StepError, Trainer
from zae.addons import FSDPAddon, GradientAccumulationAddon, MultiGPUAddon, ThroughputAddon


class Noting(Task):
    """Notes how many micro-batches each step has."""

    def gradients(self, batch: Any) -> Any:
        outputs = super().gradients(batch)
        self.__dict__.setdefault("windows", []).append(len(outputs))
        return outputs


def build(steps: Any, task: Any = Noting, **options: Any) -> Any:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    made = task.add_on(GradientAccumulationAddon)
    return made(model, "cpu", optimizer=optimizer, gradient_accumulation_steps=steps, **options)


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50])
def test_windows_of_every_length(count: int, steps: int) -> None:
    """With and without a length, the same windows and bitwise the same weights."""
    batches = list(loader(28))[:count]
    lengths = [min(steps, count - first) for first in range(0, count, steps)]
    ends = []
    for source in (batches, (batch for batch in batches)):
        trainer = build(steps)
        torch.manual_seed(1)
        metrics = trainer.run(1, source)
        assert trainer.windows == lengths
        assert (metrics["step"], trainer.progress_checker.batch) == (len(lengths), count)
        assert trainer.steps_per_epoch(batches) == len(lengths)
        ends.append(digest(trainer.model))
    assert ends[0] == ends[1]


class OneDict(Task):
    """Returns the same dict from every step."""

    returned: Any = None

    def train_step(self, batch: Any) -> Any:
        self.returned = {} if self.returned is None else self.returned
        self.returned.update(super().train_step(batch), num_targets=len(batch[0]))
        return self.returned


class ManyDicts(OneDict):
    """Returns a new one."""

    def train_step(self, batch: Any) -> Any:
        return dict(super().train_step(batch))


class Unused(AddOnBase):
    """Overrides a hook of the step, to no effect."""

    layer = "loop"

    def forward_context(self) -> Any:
        return super().forward_context()


@pytest.mark.parametrize("add_ons", [(), (Unused,)])
def test_one_dict_for_all_of_a_window(add_ons: Any) -> None:
    """Each micro-batch weighs by its own targets, and has its own loss in the log."""
    ends = []
    for task in (OneDict, ManyDicts):
        trainer = build(2, task.add_on(*add_ons) if add_ons else task)
        torch.manual_seed(1)
        metrics = trainer.run(1, [tuple(part[:size] for part in batch) for batch, size in zip(loader(28), (4, 2, 3))])
        ends.append((digest(trainer.model), metrics["train_metrics_history"]))
    assert ends[0] == ends[1]


def test_without_a_length_one_window_is_held() -> None:
    """The batches of one window are fetched before its first backward, and none of the next."""
    events: list[str] = []

    class Watching(Task):
        def train_step(self, batch: Any) -> Any:
            events.append("use")
            return super().train_step(batch)

    def source() -> Iterator[Any]:
        for batch in list(loader())[:5]:
            events.append("fetch")
            yield batch

    build(2, Watching).run(1, source())
    assert events == ["fetch", "fetch", "use", "use"] * 2 + ["fetch", "use"]


def test_steps_are_windows_everywhere() -> None:
    """max_steps, steps_per_epoch, cadences and the log."""
    trainer = build(4, log_every=1)
    metrics = trainer.run(None, loader(), loader(8), max_steps=3, valid_every=2)
    assert trainer.windows == [4, 2, 4]
    assert [row["step"] for row in metrics["valid_metrics_history"]] == [2]
    assert [row["batch"] for row in trainer.log_history if "train/loss" in row] == [4, 6, 10]
    trainer = build(2)
    assert trainer.run(2, loader(), steps_per_epoch=2)["step"] == 4
    assert trainer.progress_checker.batch == 8


def test_a_batch_that_is_a_list_is_one_batch() -> None:
    """Only the add-on's own windows are taken apart; the mean of an epoch is by sample over all micro-batches."""
    trainer = build(3)
    batches = [list(batch) for batch in loader()]
    trainer.run(1, batches)
    assert trainer.windows == [3, 3]
    losses = trainer.log_train["loss"]
    assert len(losses) == 6
    sizes = [len(batch[0]) for batch in batches]
    assert trainer.train_metrics["loss"] == pytest.approx(sum(map(lambda a, b: a * b, losses, sizes)) / 22, rel=1e-12)
    trainer.run_batch(batches[0])
    assert trainer.windows[-1] == 1


def test_a_window_is_given_once() -> None:
    class Indexing(Task):
        def gradients(self, batch: Any) -> Any:
            return super().gradients([self.micro_batches(batch)[0]])

    with pytest.raises(TypeError, match="yielded once, in order"):
        build(2, Indexing).run(1, loader())


def test_a_length_that_promises_too_much_is_an_error_in_words() -> None:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return 9

    with pytest.raises(LoaderError, match="ended after 0 of the 2 batches of a window that its length promised"):
        build(2).run(1, Lying(loader()))


def climb(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first half of sharpness-aware minimization: go up along the gradient, and say by how much."""
    norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
    ways = [weight.grad * (0.05 / norm) for weight in weights]
    with torch.no_grad():
        for weight, way in zip(weights, ways, strict=True):
            weight.add_(way)
            weight.grad = None
    return ways


@torch.no_grad()
def come_back(weights: list[torch.Tensor], ways: list[torch.Tensor]) -> None:
    for weight, way in zip(weights, ways, strict=True):
        weight.sub_(way)


class Sharpness(Task):
    """SAM: the gradients of each window are taken twice."""

    def gradients(self, batch: Any) -> Any:
        super().gradients(batch)
        ways = climb(self.parameters)
        outputs = super().gradients(batch)
        come_back(self.parameters, ways)
        return outputs


@pytest.mark.parametrize("sized", [True, False])
def test_gradients_of_one_window_are_taken_twice_as_by_hand(sized: bool) -> None:
    """6 batches in windows of 4 and of 2; the second time they are the same batches, not those that follow."""
    trainer, model = build(4, Sharpness), network()
    batches, optimizer = list(loader()), SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    metrics = trainer.run(2, batches if sized else LikeAStream(batches))
    torch.manual_seed(5)
    weights = list(model.parameters())
    for _ in range(2):
        for window in (batches[:4], batches[4:]):
            ways: list[torch.Tensor] = []
            for _ in "up", "down":
                for inputs, targets in window:
                    (torch.nn.functional.cross_entropy(model(inputs), targets) / len(window)).backward()
                ways = ways or climb(weights)
            come_back(weights, ways)
            optimizer.step()
            optimizer.zero_grad()
    assert metrics["step"] == 4
    assert digest(trainer.model) == digest(model)


class LikeAStream:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_a_window_that_is_not_held_is_not_walked_into_the_next() -> None:
    class Twice(Task.add_on(GradientAccumulationAddon)):
        def micro_batches(self, batch: Any) -> Any:
            self.window = super().micro_batches(batch)
            return self.window

        def optimizer_step(self) -> bool:
            list(self.window)
            return super().optimizer_step()

    with pytest.raises(TypeError, match=r"yielded once; .* override gradients\(batch\)"):
        build(2, Twice).run(1, loader())


# ------------------------------------------------------------------------------------------- the samples of a step


def samples(count: int, batch_size: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    tensors = (torch.randn(count, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(*tensors), batch_size, **{"shuffle": True, **options})


class Regression(Trainer):
    """A task whose loss is a mean over the samples of its batch."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": (self.model(inputs) - targets).square().mean()}

    test_step = train_step


def regression(*add_ons: type, device: Any = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    settings = {"optimizer": optimizer, "gradient_clip": 0.1, "seed": 3, "log_bar": False, **options}
    return Regression.add_on(GradientAccumulationAddon, *add_ons)(model, device, **settings)


def weights_of(trainer: Any) -> Any:
    return torch.cat([each.detach().flatten() for each in trainer.unwrap().parameters()])


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(("add_on", "ranks", "batch_size"), [
    (MultiGPUAddon, 1, 4), (MultiGPUAddon, 1, 12), (MultiGPUAddon, 2, 3), (MultiGPUAddon, 3, 4), (FSDPAddon, 2, 6),
])  # fmt: skip
def test_any_number_of_ranks_makes_the_same_steps(add_on: type, ranks: int, batch_size: int) -> None:
    """With 37 samples, of which the last step of an epoch has one: those of one process with batches of 12."""
    whole = regression()
    whole.run(3, samples(37, 12))

    def rank() -> Any:
        assert dist.get_world_size() == ranks
        divided, loader = regression(add_on, global_batch_size=12), samples(37, batch_size)
        plan = divided.plan(3, loader)
        assert (plan.world_size, plan.steps, plan.effective_batch_size) == (ranks, 12, 12)
        assert divided.run(3, loader)["step"] == 12
        return torch.cat([each.flatten() for each in divided.model_state().values()])

    for found in each_rank(ranks, rank):
        assert (weights_of(whole) - found).abs().max() < 1e-12


def test_a_number_that_train_step_counts_comes_first() -> None:
    class Counts(Regression):
        def train_step(self, batch: Any) -> Any:
            return {**super().train_step(batch), "num_targets": 7}

    taken = []

    class Notes(AddOnBase):
        layer = "observe"

        def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
            taken.append((num_targets, count))
            return super().scale_loss(loss, num_targets, count)

    model = nn.Linear(5, 5).double()
    trainer = Counts.add_on(GradientAccumulationAddon, Notes)(
        model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), global_batch_size=8, log_bar=False
    )
    trainer.run(1, samples(10, 4))
    assert taken == [(7, 2), (7, 2), (7, 1)]


def test_a_list_of_batches_states_its_size_and_a_stream_of_them_does_not() -> None:
    batches = list(samples(16, 4, shuffle=False))
    trainer = regression(global_batch_size=8)
    assert trainer.run(1, batches)["step"] == 2
    with pytest.raises(LoaderError, match=r"global_batch_size=8 needs the batch size of the loader.*generator.*write "):
        regression(global_batch_size=8).run(1, (batch for batch in batches))


@pytest.mark.parametrize(("options", "loader", "text"), [
    ({"global_batch_size": 0}, {}, "global_batch_size=0.* whole number of at least 1"),
    ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, {}, "both say how long a step is; leave one"),
    ({"global_batch_size": 10}, {}, "global_batch_size=10 is not a multiple of 4: .* 4 samples; write batch_size=2"),
    ({"global_batch_size": 2}, {}, "global_batch_size=2 is not a multiple of 4: .*; write batch_size=2"),
    ({"global_batch_size": 8}, {"drop_last": True}, "drop_last=True leaves out other samples .*; write drop_last=Fal"),
])  # fmt: skip
def test_sizes_that_cannot_be_meant(options: Any, loader: Any, text: str) -> None:
    """Nothing is trained before."""
    with pytest.raises(ConfigError, match=text):
        regression(**options).run(1, samples(37, 4, **loader))


def test_a_number_of_ranks_that_does_not_divide_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=8 cannot be divided by 3 ranks; choose one that every"):
        regression(MultiGPUAddon, device=["cpu"] * 3, global_batch_size=8).plan(1, samples(37, 4))
    with pytest.raises(ConfigError, match=r"is not a multiple of 12: .* 4 samples, on each of 3 ranks; .*=2 in the"):
        regression(MultiGPUAddon, device=["cpu"] * 3, global_batch_size=6).plan(1, samples(37, 4))


def test_a_batch_that_does_not_tell_its_samples_is_refused() -> None:
    class Opaque(Regression):
        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model(torch.ones(2, 5, dtype=torch.float64)).mean()}

    model = nn.Linear(5, 5).double()
    trainer = Opaque.add_on(GradientAccumulationAddon)(
        model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), global_batch_size=4, log_bar=False
    )
    loader = DataLoader(range(8), batch_size=2, collate_fn=lambda each: sum(each))  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"weighs the samples of a step alike, .* type int .*: 'num_targets'"):
        trainer.run(1, loader)


def test_a_window_of_one_batch_beside_an_add_on_that_overrides_batches() -> None:
    """Each batch is then a step, and the override outside of it is called as ever."""
    trainer = Task.add_on(GradientAccumulationAddon, ThroughputAddon)(
        network(), "cpu", optimizer=torch.optim.SGD, log_bar=False, gradient_accumulation_steps=1
    )
    assert trainer.run(1, loader())["step"] == len(loader())
