"""AutoBatchAddon: memory that really runs out, and the weights of the whole batch."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zae
from kit import hand, table
from kit.limits import leave_memory
from kit.ranks import on_ranks
from kit.scripts import Script
from zae import AddOnBase, ConfigError, StepError, Trainer
from zae.addons import (
    AMPAddon,
    AutoBatchAddon,
    DeepSpeedAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    LedgerAddon,
    MultiGPUAddon,
    PipelineAddon,
    StateManagerAddon,
    ThroughputAddon,
    TorchMetricsAddon,
)
from zae.metrics import Max, Sum
from zae.testing.watch import difference

LENGTH = 5


class Task(Trainer):
    """A mean over samples."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        out = self.model(x)
        return {"loss": nn.functional.mse_loss(out, y), "output": out}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class Counting(Task):
    """A mean over tokens, of which samples have different numbers."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        mask = y[:, :1] > 0
        loss = ((self.model(x) - y).square() * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "num_targets": mask.sum()}


class Short(Counting):
    """Memory, or what is taken for it, runs out above so many samples."""

    limit = 3

    def train_step(self, batch: Any) -> Any:
        if torch.is_grad_enabled() and len(batch[0]) > self.limit:
            self.model(batch[0][:1]).sum().backward()  # The half of a backward.
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().train_step(batch)


def network(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()


def batches(count: int = 26, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (3, 2))
    return DataLoader(TensorDataset(x, y), size)


def trained(task: Any, *add_ons: Any, dropout: float = 0.0, epochs: int = 2, **options: Any) -> Any:
    options = {"seed": 0, "device": "cpu", "optimizer": torch.optim.SGD, "log_bar": False, **options}
    if options["optimizer"] is torch.optim.SGD:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    trainer = task.add_on(*add_ons)(network(dropout), **options)
    trainer.run(epochs, batches())
    return trainer


def weights(trainer: Any) -> Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.unwrap().parameters()])


# ------------------------------------------------------------------------------------------ the weights of the whole


TABLE: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (task, add_ons, options)
    for task in (Task, Counting)
    for add_ons, options in (
        ((), {}),
        ((), {"gradient_clip": 0.1, "optimizer": torch.optim.AdamW}),
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 3}),
        ((GradientAccumulationAddon,), {"global_batch_size": 16}),
        ((EMAAddon, AMPAddon), {"precision": "fp32", "decay": 0.5}),
    )
]


@pytest.mark.sample(count=4)
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("task", "add_ons", "options"), TABLE, ids=lambda each: getattr(each, "__name__", None))
def test_parts_give_the_weights_of_the_whole(task: Any, add_ons: Any, options: Any, size: int) -> None:
    """Of batches of 8 and a short one of 2; the means of the history are the same too."""
    whole = trained(task, *add_ons, **options)
    parts = trained(task, AutoBatchAddon, *add_ons, micro_batch_size=size, **options)
    assert (weights(whole) - weights(parts)).abs().max() <= 1e-12
    assert parts.progress_checker.batch == whole.progress_checker.batch
    for a, b in zip(whole.train_history, parts.train_history, strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    again = trained(task, AutoBatchAddon, *add_ons, micro_batch_size=size, **options)
    assert torch.equal(weights(parts), weights(again))


TOGETHER = [entry for entry in table.TABLE if table.compatible(entry, table.Entry(AutoBatchAddon, dict, dict))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", TOGETHER, ids=lambda entry: entry.id)
def test_parts_with_every_other_add_on(entry: Any, tmp_path: Path) -> None:
    """As in tests/test_table.py, of a network without BatchNorm and dropout."""
    found = []
    for add_ons, options in (((), {}), ((AutoBatchAddon,), {"micro_batch_size": 3})):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            folder = tmp_path / str(len(found))
            folder.mkdir()
            given = {**entry.biting(folder), **options}
            if entry.variant == "fp16":  # From a scale at which neither overflows: parts do so at a larger one.
                given["loss_scale"] = (2.0**8, 1.0)
            trainer = table.Task.add_on(entry.add_on, *add_ons)(
                model, "cpu", optimizer=optimizer, log_bar=False, **given
            )
            trainer.run(2, hand.loader(), hand.loader(seed=9, shuffle=False))
        found.append((weights(trainer), trainer.progress_checker.step, trainer.valid_history[-1]["valid_loss"]))
    exact = 2e-2 if entry.variant in ("bf16", "fp16", "weights") else 1e-5
    assert (found[0][0] - found[1][0]).abs().max() <= exact
    assert found[0][1] == found[1][1]
    assert found[0][2] == pytest.approx(found[1][2], rel=exact)


def test_whole_batches_are_bitwise_those_without_the_addon() -> None:
    for options in ({}, {"micro_batch_size": 8}):
        trainer = trained(Counting, AutoBatchAddon, dropout=0.5, **options)
        assert torch.equal(weights(trainer), weights(trained(Counting, dropout=0.5)))


@pytest.mark.parametrize("window", [1, 3])
def test_a_repeated_step_is_that_of_parts_from_the_start(window: int) -> None:
    """Bitwise, with dropout: neither gradients nor random numbers of what was dropped are left."""
    options = {"gradient_accumulation_steps": window, "dropout": 0.5}
    add_ons = (AutoBatchAddon, GradientAccumulationAddon)
    found = trained(Short, *add_ons, **options)
    assert [(each["samples"], each["fitting_size"]) for each in found.memory_errors] == [(8, 4), (4, 2)]
    assert torch.equal(weights(found), weights(trained(Counting, *add_ons, micro_batch_size=2, **options)))
    assert found.log_history[0]["auto_batch/fitting_size"] == 2.0


def test_the_earlier_batches_of_a_window_survive() -> None:
    """Memory runs out in the third batch of a window."""

    class Later(Short):
        limit = 100

        def train_step(self, batch: Any) -> Any:
            self.limit = 3 if self.current_run.micro_index == 2 else 100
            return super().train_step(batch)

    accumulation = {"gradient_accumulation_steps": 4}
    found = trained(Later, AutoBatchAddon, GradientAccumulationAddon, **accumulation)
    whole = trained(Counting, GradientAccumulationAddon, **accumulation)
    assert found.fitting_size == 2
    assert (weights(found) - weights(whole)).abs().max() <= 1e-12


def test_what_fits_is_saved_and_a_resumed_run_is_bitwise_the_same(tmp_path: Path) -> None:
    def run(place: str, task: Any, steps: int | None) -> Any:
        cls = task.add_on(AutoBatchAddon, StateManagerAddon)
        options = {"save_path": tmp_path / place, "save_every": 2, "resume": "auto", "keep_last": 9, "seed": 0}
        trainer = cls(network(0.5), "cpu", optimizer=torch.optim.AdamW, log_bar=False, **options)
        trainer.run(3, batches(), max_steps=steps)
        return trainer

    uninterrupted = run("a", Short, None)
    run("b", Short, 5)
    resumed = run("b", Counting, None)  # With memory enough: it keeps the parts.
    assert resumed.progress_checker.step == uninterrupted.progress_checker.step
    assert resumed.fitting_size == 2
    assert len(resumed.memory_errors) == 2
    assert torch.equal(weights(resumed), weights(uninterrupted))


# -------------------------------------------------------------------------------------------- memory that runs out

LIMITED = """
import copy, json, resource, torch, zae
from kit.limits import leave_memory
from torch.utils.data import DataLoader, TensorDataset
from zae.addons import AutoBatchAddon, GradientAccumulationAddon

class Wide(zae.Trainer):
    rows = 1
    def train_step(self, batch):
        hidden = self.model[0](batch[0].unsqueeze(1).expand(-1, self.rows, 1)).sigmoid()
        return {"loss": (self.model[1](hidden.exp()).mean((1, 2)) - batch[1]).square().mean()}
    test_step = train_step

class Wider(Wide):
    rows = 400

generator = torch.Generator().manual_seed(0)
data = [torch.randn(128, *tail, generator=generator, dtype=torch.float64) for tail in ((1,), ())]
model = torch.nn.Sequential(torch.nn.Linear(1, 100_000), torch.nn.Linear(100_000, 1)).double()

def train(cls, size=64, **options):
    own = copy.deepcopy(model)
    trainer = cls(own, "cpu", optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), log_bar=False, **options)
    trainer.run(1, DataLoader(TensorDataset(*data), size), limit_batches=2)
    return trainer

def refused(cls):
    try:
        train(cls)
    except (zae.StepError, RuntimeError) as error:
        return str(error)

train(Wide, 1)
held = leave_memory(90 << 20)
without, alone = refused(Wide), refused(Wider.add_on(AutoBatchAddon))
found = train(Wide.add_on(AutoBatchAddon))
window = train(Wide.add_on(AutoBatchAddon, GradientAccumulationAddon), gradient_accumulation_steps=2)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
whole = train(Wide)
gaps = [float((a - b).detach().abs().max()) for a, b in zip(whole.model.parameters(), found.model.parameters())]
steps = [each.progress_checker.step for each in (found, window)]
print(json.dumps([without, alone, found.memory_errors, window.fitting_size, steps, max(gaps)]))
"""


def test_a_batch_that_does_not_fit_is_computed_in_parts() -> None:
    """Under a real limit of memory, in a process of its own."""
    status, out, err = Script(LIMITED).end(120)
    assert status == 0, err
    without, alone, errors, fitting, steps, gap = json.loads(out)
    assert "can't allocate memory" in without
    assert alone.startswith("one sample alone does not fit in memory in step 1; train in lower precision (AMPAddon)")
    assert [errors[0][key] for key in ("step", "samples")] == [1, 64]
    assert 1 <= errors[-1]["fitting_size"] < 64
    assert 1 <= fitting < 64
    assert steps == [2, 1]
    assert gap <= 1e-12
    assert "64 samples do not fit in memory" in err


class Wide(Trainer):
    """Takes 1.6 MB for each sample and activation."""

    def train_step(self, batch: Any) -> Any:
        hidden = self.model[0](batch[0]).sigmoid()
        return {"loss": (self.model[1](hidden.exp()).squeeze(1) - batch[1]).square().mean()}

    test_step = train_step


def _train_wide(task: Any, device: Any, size: int, count: int = 120) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(count, *tail, generator=generator).double() for tail in ((1,), ())))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 100_000), nn.Linear(100_000, 1)).double()
    trainer = task(model, device, optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), log_bar=False)
    trainer.run(1, DataLoader(data, size))
    return trainer


@on_ranks(2, 3)
def test_ranks_divide_alike_where_one_has_no_memory(world: int) -> None:
    """Only the last rank has a limit; the short last step has fewer samples on some ranks."""
    import torch.distributed as dist

    whole = weights(_train_wide(Wide, "cpu", 48 * world, 48 * world + 13))
    blocks = [torch.empty(8 << 20, dtype=torch.uint8) for _ in range(48)]  # Free places in the heap, as tests leave.
    del blocks[:-1]
    held = leave_memory(60 << 20) if dist.get_rank() == world - 1 else []
    task = Wide.add_on(AutoBatchAddon, MultiGPUAddon)
    trainer = _train_wide(task, ["cpu"] * world, 48, 48 * world + 13)
    assert trainer.world_size == 1 or dist.get_world_size() == world
    del held, blocks
    assert trainer.memory_errors[0]["samples"] == 48
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (trainer.memory_errors, trainer.fitting_size))
    assert all(each == found[0] for each in found)
    assert (weights(trainer) - whole).abs().max() <= 1e-12


@on_ranks(2)
@pytest.mark.parametrize(
    ("engine", "task"), [(MultiGPUAddon, Counting), (FSDPAddon, Task), (FSDPAddon, Counting)],
    ids=["ddp", "fsdp", "fsdp-counts"],
)  # fmt: skip
def test_engines_give_the_weights_of_the_whole(world: int, engine: Any, task: Any) -> None:
    """With a short last batch, of which the ranks have 1 sample and none, in windows of two batches."""
    options = {"gradient_accumulation_steps": 2, "epochs": 1}
    whole = trained(task, GradientAccumulationAddon, engine, device=["cpu"] * world, **options)
    parts = trained(
        task, AutoBatchAddon, GradientAccumulationAddon, engine, device=["cpu"] * world, micro_batch_size=3, **options
    )
    a, b = (each.state_dict()["model"] for each in (whole, parts))
    assert max((a[key] - b[key]).abs().max() for key in a) <= 1e-12


# --------------------------------------------------------------------------------------------- what the loop is given


class Rich(Task):
    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        x = batch[0]
        return {**found, "seen": Sum(float(len(x))), "largest": Max(float(x.max())), "names": ["a"] * len(x),
                "rows": torch.ones(7), "none": None}  # fmt: skip


def test_outputs_are_put_together(caplog: pytest.LogCaptureFixture) -> None:
    outputs = []

    class LookAddon(AddOnBase):
        """Keep what a step returned."""

        def on_step_end(self, found: Any) -> None:
            super().on_step_end(found)
            outputs.append(found)

    trained(Rich, AutoBatchAddon, LookAddon, micro_batch_size=3, epochs=1)
    (first,) = outputs[0]
    x, _ = next(iter(batches()))
    assert first.values["output"].shape == (8, 2)
    assert not first.values["output"].requires_grad
    assert first.values["seen"].value == 8.0
    assert first.values["largest"].value == float(x.max())
    assert first.values["names"] == ["a"] * 8
    assert first.weight == 8.0
    assert "rows" not in first.values
    assert [r.message for r in caplog.records if "'rows'" in r.message and "put together" in r.message] == [
        "the output 'rows' of train_step cannot be put together from the parts of a batch, and is left out; return a "
        "number, or one row for each sample"
    ]


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


def test_batches_of_any_container_are_divided() -> None:
    from transformers import BatchEncoding

    x, y = next(iter(batches()))

    class Named(Task):
        def train_step(self, batch: Any) -> Any:
            kinds.add(type(batch))
            pair = (batch.x, batch.y) if isinstance(batch, Pair) else (batch["x"], batch["y"])
            return super().train_step(pair)

    kinds: set[type] = set()
    found = []
    for each in (Pair(x, y), BatchEncoding({"x": x, "y": y}), {"x": x, "y": y}):
        model = network()
        options = {"optimizer": torch.optim.AdamW, "micro_batch_size": 3, "log_bar": False}
        Named.add_on(AutoBatchAddon)(model, "cpu", **options).run(1, [each])
        found.append([each.detach() for each in model.parameters()])
    assert kinds == {Pair, BatchEncoding, dict}
    assert difference(found[0], found[1]) is None
    assert difference(found[0], found[2]) is None


def test_numbers_that_ranks_share_are_alike_in_each_part() -> None:
    """And move on as for one batch."""

    class NoiseAddon(AddOnBase):
        """Add one number to the loss of a step."""

        layer = "loop"

        def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
            drawn.append(float(torch.rand((), generator=self.generator("noise", per_rank=False))))
            return super().scale_loss(loss, num_targets, count)

    drawn: list[float] = []
    trained(Task, NoiseAddon, epochs=1)
    whole, drawn = drawn, []
    trained(Task, NoiseAddon, AutoBatchAddon, micro_batch_size=4, epochs=1)
    assert drawn == [each for index, each in enumerate(whole) for _ in range(2 if index < 3 else 1)]


def test_observers_count_a_repeated_step_once(tmp_path: Path) -> None:
    from torchmetrics import MeanMetric

    metrics = {"torch_metrics": {"m": MeanMetric()}, "torch_metrics_inputs": {"m": "loss"}}
    options = {**metrics, "torch_metrics_splits": ("train",), "ledger_path": tmp_path / "ledger", "epochs": 1}
    observers = (LedgerAddon, ThroughputAddon, TorchMetricsAddon)
    found = trained(Short, AutoBatchAddon, *observers, **options)
    plain = trained(Counting, *observers, **{**options, "ledger_path": tmp_path / "plain"})
    a, b = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("ledger", "plain"))
    assert [row["stages"]["batch"]["data"] for row in a[1:]] == [row["stages"]["batch"]["data"] for row in b[1:]]
    assert found._meter.batches == plain._meter.batches
    assert found.step_flops == plain.step_flops
    assert found.train_history[-1]["m"] == pytest.approx(plain.train_history[-1]["m"], rel=1e-12)


# -------------------------------------------------------------------------------------------------- what is refused


class Contrast(Task):
    """Samples of a batch are compared with each other."""

    def train_step(self, batch: Any) -> Any:
        out = self.model(batch[0])
        return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


class Uncounted(Counting):
    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"]}


class Buffered(Task):
    def train_step(self, batch: Any) -> Any:
        self.model.seen.add_(1)
        return super().train_step(batch)


class Perturbed(Short):
    """Weights that are moved between two backwards, as by SAM."""

    def gradients(self, batch: Any) -> Any:
        with torch.no_grad():
            for each in self.parameters:
                each.add_(0.1)
        return super().gradients(batch)


def refused(text: str, kind: type[Exception], task: Any, *add_ons: Any, model: Any = None, **options: Any) -> None:
    options = {"micro_batch_size": 3, "optimizer": torch.optim.AdamW, "log_bar": False, **options}
    with pytest.raises(kind, match=re.escape(text)):
        task.add_on(AutoBatchAddon, *add_ons)(model or network(), "cpu", **options).run(1, batches())


def test_what_would_train_something_else_is_refused() -> None:
    mixing = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    refused("depends on all samples of their input, or on how often they are called: 1 (BatchNorm1d)", ConfigError,
            Task, model=mixing)  # fmt: skip
    refused("in the mean of each: computed in parts, a batch would train something else", StepError, Contrast)
    refused("Return 'num_targets'", StepError, Uncounted)
    model = network()
    model.register_buffer("seen", torch.zeros(()))
    refused("train_step changes seen: computed in parts", StepError, Buffered, model=model)
    for engine in (DeepSpeedAddon, PipelineAddon):
        with pytest.raises(zae.AddOnError, match="AutoBatchAddon"):
            Task.add_on(AutoBatchAddon, engine)


def test_frozen_statistics_and_equal_samples_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    model[1].eval()
    trainer = Task.add_on(AutoBatchAddon)(model, "cpu", optimizer=torch.optim.AdamW, micro_batch_size=3, log_bar=False)
    trainer.run(1, batches())
    assert trainer.progress_checker.step == 4


def test_a_batch_that_cannot_be_divided_is_named() -> None:
    class Weighted(Task):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch[:2])

    x, y = next(iter(batches()))
    cls = Weighted.add_on(AutoBatchAddon)
    trainer = cls(network(), "cpu", optimizer=torch.optim.AdamW, micro_batch_size=3, log_bar=False)
    with pytest.raises(ConfigError, match=re.escape("batch[2] has 5 rows and the batch has 8 samples")):
        trainer.run(1, [(x, y, torch.ones(5))])

    class Opaque(Task):
        def train_step(self, batch: Any) -> Any:
            raise MemoryError

    trainer = Opaque.add_on(AutoBatchAddon)(network(), "cpu", optimizer=torch.optim.AdamW, log_bar=False)
    with pytest.raises(ConfigError, match="a batch of type object does not say how many samples it has"):
        trainer.run(1, [object()])


def test_weights_that_a_step_moves_are_not_repeated() -> None:
    class Twice(Perturbed):
        def gradients(self, batch: Any) -> Any:
            with torch.no_grad():
                self.model[0].weight.add_(0.1)
            return Short.gradients(self, batch)

        def train_step(self, batch: Any) -> Any:
            with torch.no_grad():
                self.model[0].weight.add_(0.1)
            return super().train_step(batch)

    refused("memory ran out after train_step had changed 0.weight", StepError, Twice, micro_batch_size=None)


def test_another_error_is_raised_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Task):
        def train_step(self, batch: Any) -> Any:
            raise RuntimeError("another fault")

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="another fault"):
        trained(Wrong, AutoBatchAddon)
    assert not caplog.records


def test_copies_do_not_carry_the_step() -> None:
    trainer = trained(Short, AutoBatchAddon)
    twin = copy.deepcopy(trainer)
    assert twin._start is None
    assert twin.fitting_size == 2
