"""TorchMetricsAddon: the metric of all samples, whatever the batches, ranks and interruptions; and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, RunningMean
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
)
from torchmetrics.wrappers import ClasswiseWrapper

from kit import hand
from kit.rank_tasks import forks
from kit.ranks import each_rank, on_ranks
from zae import CheckpointMismatch, ConfigError, MonitorError, StepError, Trainer
from zae.addons import (
    EarlyStoppingAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
    TorchMetricsAddon,
)


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        output = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(output, targets), "output": output, "targets": targets}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class Lengths(Metric):
    """Keeps a list that torchmetrics leaves as it is: one entry for each update, with nothing that joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", default=[], dist_reduce_fx=None)

    def update(self, output: Tensor, targets: Tensor) -> None:
        self.sizes.append(torch.tensor(float(len(targets))))

    def compute(self) -> Tensor:
        return torch.stack(self.sizes).sum()


def measures() -> dict[str, Any]:
    return {"f1": MulticlassF1Score(num_classes=2), "lengths": Lengths(), "recall": MulticlassRecall(2, average=None)}


def build(*add_ons: Any, task: Any = Task, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    options = {"torch_metrics": measures(), "log_bar": False, **options}
    made = task.add_on(TorchMetricsAddon, *add_ons)
    return made(model, options.pop("device", "cpu"), optimizer=SGD(model.parameters(), lr=0.1), **options)


def loader(size: int = 22, batch: int = 4, **options: Any) -> Any:
    return DataLoader(hand.data(size), batch, **options)


def by_hand(trainer: Any, size: int = 22) -> dict[str, float]:
    """Compute the metrics of all samples at once."""
    model = trainer.unwrap().eval()
    inputs, targets = hand.data(size).tensors
    with torch.no_grad():
        output = model(inputs)
    model.train()
    recalls = MulticlassRecall(2, average=None)(output, targets)
    found = {"f1": float(MulticlassF1Score(num_classes=2)(output, targets)), "lengths": float(size)}
    return found | {f"recall/{index}": float(each) for index, each in enumerate(recalls)}


NAMES = ("f1", "lengths", "recall/0", "recall/1")


def of(metrics: Any, prefix: str = "") -> dict[str, float]:
    return {name: metrics[prefix + name] for name in NAMES}


def test_a_metric_of_all_samples(tmp_path: Path) -> None:
    """In the history, in a logger, by `evaluate`, in each evaluation anew; batches of unequal size."""
    trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "log.jsonl")
    row = trainer.run(2, loader(shuffle=True), loader())["valid_metrics_history"][-1]
    assert of(row, "valid_") == of(trainer.evaluate(loader())) == by_hand(trainer)
    assert trainer.evaluate(loader(9))["lengths"] == 9.0
    assert "train_f1" not in trainer.train_history[-1]
    assert '"valid/f1"' in (tmp_path / "log.jsonl").read_text()
    assert "output" not in trainer.log_test
    with pytest.raises(MonitorError, match="log_test does not keep 'output'"):
        trainer.log_test["output"]


def test_training_is_measured_by_epoch_and_over_windows() -> None:
    trainer = build(GradientAccumulationAddon, torch_metrics_splits=("train", "valid"), gradient_accumulation_steps=2)
    trainer.run(2, loader(), loader(9))
    assert [row["train_lengths"] for row in trainer.train_history] == [22.0, 22.0]
    assert [row["valid_lengths"] for row in trainer.valid_history] == [9.0, 9.0]
    only = build(torch_metrics_splits="train")
    only.run(1, loader(), loader(9))
    assert "f1" in only.train_metrics
    assert "f1" not in only.test_metrics


def test_the_best_checkpoint_is_by_a_metric(tmp_path: Path) -> None:
    """Its name is known in the trial before the first step; a vector's too."""
    for monitor in ("f1", "recall/1"):
        options = {"save_path": tmp_path / monitor.replace("/", "-"), "keep_best": 1, "patience": 50}
        trainer = build(StateManagerAddon, EarlyStoppingAddon, monitor=monitor, monitor_mode="max", **options)
        history = trainer.run(4, loader(shuffle=True), loader())
        scores = [row[f"valid_{monitor}"] for row in history["valid_metrics_history"]]
        assert history["best_valid"]["score"] == max(scores)
        assert trainer.best_path is not None
    for monitor in ("f2", "recall", "recall/9"):
        with pytest.raises(MonitorError, match=f"'{monitor}' in monitor.* loss, f1, lengths, recall/0, recall/1"):
            build(monitor=monitor, monitor_mode="max").run(1, loader(), loader())
    assert "f1, lengths, recall: updated with 'output', 'targets' of test_step" in str(build().plan(1, loader()))


def test_several_loaders_and_an_override_beside_it() -> None:
    """An override that reads the other mode's log adds nothing there, as ever, and hides no metric."""

    class Also(Task):
        def metric_on_epoch_end(self) -> Any:
            return {"rows": len(torch.cat(self.log_test["output"]))}

    trainer = build(task=Also, torch_metrics_splits=("train", "valid"))
    row = trainer.run(1, loader(), {"a": loader(8), "b": loader(5)})["valid_metrics_history"][0]
    assert (row["valid_a/lengths"], row["valid_b/lengths"], row["valid_lengths"]) == (8.0, 5.0, 6.5)
    assert (row["valid_a/rows"], row["valid_b/rows"]) == (8, 5)
    assert trainer.train_metrics["lengths"] == 22.0


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_resume_within_an_epoch_is_exact(tmp_path: Path) -> None:
    """Counts, lists of tensors, and the metrics inside of a wrapper."""
    classes = ClasswiseWrapper(MulticlassAccuracy(2, average=None))
    given = {**measures(), "classes": classes, "loss_by_hand": MeanMetric()}
    options: dict[str, Any] = {"torch_metrics": given, "torch_metrics_splits": ("train", "valid")}
    options["torch_metrics_inputs"] = {"loss_by_hand": "loss"}
    saved = {"save_path": tmp_path / "run", "save_every": 1, "keep_last": 99, "resume": "auto"}
    whole = build(**options).run(2, loader(shuffle=True, generator=torch.Generator().manual_seed(0)), loader())
    for steps in (2, 5, None):
        resumed = build(StateManagerAddon, **options, **saved)
        shuffled = loader(shuffle=True, generator=torch.Generator().manual_seed(0))
        history = resumed.run(2, shuffled, loader(), max_steps=steps)
    assert history["train_metrics_history"] == whole["train_metrics_history"]
    assert history["valid_metrics_history"] == whole["valid_metrics_history"]
    assert any(name.startswith("train_classes/") for name in whole["train_metrics_history"][0])


@on_ranks(2, 3)
def test_ranks_count_together(world: int, tmp_path: Path) -> None:
    """Unequal shares, a list of another length on each rank, a rank without a batch; and a resume within an epoch."""
    options = {"torch_metrics_splits": ("train", "valid")}
    trainer = build(MultiGPUAddon, **options)
    trainer.run(1, loader(22, 2), loader(9, 2))
    assert trainer.world_size == world
    expected = by_hand(trainer, 9)
    assert of(trainer.test_metrics) == pytest.approx(expected)
    assert trainer.train_metrics["lengths"] == 22.0
    assert trainer.evaluate(loader(1, 2))["lengths"] == 1.0
    saved = {**options, "save_path": tmp_path / "run", "save_every": 1, "keep_last": 9, "resume": "auto"}
    build(MultiGPUAddon, StateManagerAddon, **saved).run(1, loader(22, 2), max_steps=2)
    resumed = build(MultiGPUAddon, StateManagerAddon, **saved)
    resumed.run(1, loader(22, 2))
    assert of(resumed.train_metrics) == of(trainer.train_metrics)


def partly_trained(folder: Path) -> None:
    """Train two steps of six, of four batches of two samples, or of three ranks'."""
    options = {"save_path": folder, "save_every": 1, "torch_metrics_splits": ("train",)}
    build(MultiGPUAddon, StateManagerAddon, **options).run(1, loader(24, 2), max_steps=2)


def continued(folder: Path) -> Any:
    options = {"save_path": folder, "resume": "auto", "reshard": True, "torch_metrics_splits": ("train",)}
    trainer = build(MultiGPUAddon, StateManagerAddon, **options)
    trainer.run(1, loader(24, 2))
    return trainer.world_size, of(trainer.train_metrics)["lengths"]


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 1), pytest.param(3, 2, marks=pytest.mark.exhaustive)], ids=str
)
def test_another_number_of_ranks_counts_each_sample_of_the_epoch_once(before: int, after: int, tmp_path: Path) -> None:
    """A checkpoint within an epoch: the counts of all ranks go to rank 0, and the others begin at zero."""
    for world, function in ((before, partly_trained), (after, continued)):
        run = function if world == 1 else partial(each_rank, world, function)
        found = run(tmp_path / "run")
    assert found in ((after, 24.0), [(after, 24.0)] * after)


@pytest.mark.exhaustive
def test_ranks_that_are_started_later_count_each_sample_once(tmp_path: Path) -> None:
    """The caller of spawned ranks has loaded the state, before it knows of any rank."""
    partly_trained(tmp_path / "run")
    trainer = build(MultiGPUAddon, StateManagerAddon, device=["cpu", "cpu"], save_path=tmp_path / "again",
                    reshard=True, torch_metrics_splits=("train",))  # fmt: skip
    trainer.load_state(tmp_path / "run" / "step-00000002")
    with forks():
        trainer.run(1, loader(24, 2))
    assert of(trainer.train_metrics)["lengths"] == 24.0


def test_a_collection_and_a_single_metric() -> None:
    """A collection has its prefix; a single metric is called like its class."""
    collection = MetricCollection([MulticlassAccuracy(2), MulticlassF1Score(num_classes=2)], prefix="m_")
    trainer = build(torch_metrics=collection)
    assert {"m_MulticlassAccuracy", "m_MulticlassF1Score"} <= set(trainer.evaluate(loader()))
    assert "MulticlassF1Score" in build(torch_metrics=MulticlassF1Score(num_classes=2)).evaluate(loader())
    before = collection["MulticlassAccuracy"].update_count
    assert before == 0, "copies are updated"


def test_collections_by_name_and_a_wrapper_with_states() -> None:
    """A dict of collections names its metrics by both; Running keeps states itself, and counts no updates."""
    pair = MetricCollection([MulticlassAccuracy(2), MulticlassF1Score(num_classes=2)])
    given = {"clean": pair, "all": MetricCollection({"loss": MeanMetric(), "last": RunningMean(2)})}
    trainer = build(torch_metrics=given, torch_metrics_inputs={"all": "loss"}, torch_metrics_splits=("train", "valid"))
    metrics = trainer.run(1, loader(), loader())
    found = metrics["valid_metrics_history"][0]
    assert found["clean/MulticlassF1Score"] == by_hand(trainer)["f1"]
    losses = trainer.log_test["loss"]
    assert found["all/loss"] == pytest.approx(sum(losses) / len(losses))
    assert found["all/last"] == pytest.approx(sum(losses[-2:]) / 2)
    only = build(torch_metrics={"last": RunningMean(2)}, torch_metrics_inputs="loss")
    assert only.evaluate(loader())["last"] > 0
    with pytest.raises(ConfigError, match=r"torch_metrics contains Linear\(.*, which is not a metric"):
        build(torch_metrics=nn.ModuleDict({"f1": nn.Linear(1, 1)}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"torch_metrics_inputs": ("output", "target")}, "test_step returned no 'target'"),
        ({"torch_metrics_inputs": ("targets", "output")}, "Either `preds` and `target`"),
        ({"torch_metrics": {"confusion": MulticlassConfusionMatrix(2)}}, "'confusion' computed a tensor of shape"),
    ],
)
def test_a_fault_of_a_metric_ends_the_first_validation(options: Any, text: str) -> None:
    with pytest.raises((StepError, ValueError), match=text):
        build(**options).run(2, loader(), loader())


def test_a_metric_that_needs_more_than_one_batch() -> None:
    class Late(Lengths):
        def compute(self) -> Tensor:
            assert len(self.sizes) > 1, "one batch is too few"
            return super().compute()

    trainer = build(torch_metrics={"late": Late()}, monitor="late", monitor_mode="max")
    assert trainer.run(1, loader(), loader())["best_valid"]["late"] == 22.0


def test_inputs_by_other_names() -> None:
    class Binary(Task):
        def test_step(self, batch: Any) -> Any:
            inputs, targets = batch
            return {"loss": 1.0, "score": self.model(inputs)[:, 0].sigmoid(), "is_first": targets == 0}

    trainer = build(task=Binary, torch_metrics={"auroc": BinaryAUROC()}, torch_metrics_inputs=("score", "is_first"))
    inputs, targets = hand.data().tensors
    found = trainer.evaluate(loader())["auroc"]
    expected = BinaryAUROC()(trainer.model.eval()(inputs)[:, 0].sigmoid(), targets == 0)
    assert found == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"torch_metrics": {"f1": len}}, r"torch_metrics contains <built-in function len>, which is not a metric"),
        ({"torch_metrics": {}}, "torch_metrics contains {}"),
        ({"torch_metrics_splits": ("test",)}, r"write \('valid',\), \('train',\) or"),
        ({"torch_metrics_inputs": {"f2": "loss"}}, "has 'f2'; the metrics are f1, lengths, recall"),
        ({"torch_metrics_inputs": (1, 2)}, "give names of what the steps return"),
    ],
)
def test_options_that_cannot_be_meant(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(**options)


def test_what_a_step_or_a_metric_does_not_give() -> None:
    with pytest.raises(StepError, match=r"test_step returned no 'target', which .*did you mean 'targets'"):
        build(torch_metrics_inputs=("output", "target")).evaluate(loader())
    with pytest.raises(StepError, match=r"'confusion' computed a tensor of shape \(2, 2\), and a record holds numbers"):
        build(torch_metrics={"confusion": MulticlassConfusionMatrix(2)}).evaluate(loader())
    with pytest.raises(ValueError, match="Either `preds` and `target`") as caught:
        build(torch_metrics_inputs=("targets", "output")).evaluate(loader())
    assert "the metric 'f1' (MulticlassF1Score) was updated with targets (4,), output (4, 2)" in str(
        caught.value.__notes__
    )


def test_a_state_of_other_metrics_is_refused(tmp_path: Path) -> None:
    saved = {"save_path": tmp_path / "run", "save_every": 1, "resume": "auto", "torch_metrics_splits": "train"}
    build(StateManagerAddon, **saved).run(1, loader(), max_steps=2)
    with pytest.raises(CheckpointMismatch, match="has the metrics f1, lengths, recall of training, and here"):
        build(StateManagerAddon, **{**saved, "torch_metrics": {"f2": Lengths()}}).run(1, loader())
    other = {**measures(), "f1": MulticlassConfusionMatrix(2)}
    with pytest.raises(CheckpointMismatch, match="the metric 'f1' is not that of a MulticlassConfusionMatrix"):
        build(StateManagerAddon, **{**saved, "torch_metrics": other}).run(1, loader())
