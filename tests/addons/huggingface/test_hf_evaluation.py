"""evaluate() and predict() of HuggingFaceAddon give the metrics of Transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader

from kit import hf
from kit.ranks import on_ranks
from zae import Trainer
from zae.addons import DeepSpeedAddon, FSDPAddon, HuggingFaceAddon, MultiGPUAddon, PipelineAddon
from zae.errors import ConfigError, MonitorError, StepError

Task = Trainer.add_on(HuggingFaceAddon)
TIMES = ("runtime", "per_second", "preparation_time")


def compute_metrics(eval_pred: Any) -> dict[str, Any]:
    """As in the guide of OmniGenBench."""
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, axis=-1)
    return {
        "accuracy": accuracy_score(labels, predictions),
        "f1": f1_score(labels, predictions, average="weighted"),
    }


def shapes(prediction: Any) -> dict[str, float]:
    """Metrics of any head: sums of all that compute_metrics is given."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for index, each in enumerate(value):
                add(f"{name}_{index}", each)
        elif value is not None:
            found[f"{name}_sum"] = float(np.float64(value).sum())
            found.update({f"{name}_dim{i}": n for i, n in enumerate(value.shape)})

    for name in ("predictions", "label_ids", "inputs", "losses"):
        add(name, getattr(prediction, name))
    return found


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in metrics.items() if not name.endswith(TIMES) and name != "epoch"}


def close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    ours, theirs = without_times(ours), without_times(theirs)
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def theirs(head: str, folder: Path, data: Any, *, kind: Any = transformers.Trainer, **options: Any) -> Any:
    names = {"compute_metrics", "data_collator", "preprocess_logits_for_metrics", "processing_class"}
    given = {name: options.pop(name) for name in names & options.keys()}
    make = transformers.Seq2SeqTrainingArguments if kind is transformers.Seq2SeqTrainer else hf.arguments
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    made = make(str(folder), per_device_eval_batch_size=4, **{**quiet, **options})
    return kind(hf.make_model(head), made, eval_dataset=data, **given)


def ours(head: str, data: Any, **options: Any) -> Any:
    return Task(hf.make_model(head), "cpu", eval_dataset=data, per_device_eval_batch_size=4, **options)


def ragged(head: str, count: int) -> list[dict[str, Any]]:
    """Samples without padding, so that the widths of batches differ."""
    made = []
    for row in hf.rows(head, count):
        used = sum(row["attention_mask"])
        made.append({name: each[:used] if isinstance(each, list) else each for name, each in row.items()})
    return made


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("head", hf.HEADS)
def test_each_head_gives_the_metrics_of_transformers(head: str, tmp_path: Path) -> None:
    data, more = hf.dataset(head, 22), {"include_for_metrics": ["inputs", "loss"]}
    other = theirs(head, tmp_path, data, compute_metrics=shapes, **more)
    trainer = ours(head, data, compute_metrics=shapes, **more)
    close(trainer.evaluate(), other.evaluate())
    expected, found = other.predict(data), trainer.predict(data)
    close(found.metrics, expected.metrics)
    for mine, their in zip(found[:2], expected[:2], strict=True):
        pairs = zip(mine, their, strict=True) if isinstance(their, tuple) else [(mine, their)]
        for one, another in pairs:
            np.testing.assert_allclose(one, another, rtol=1e-6, atol=1e-6)


def test_widths_that_differ_are_padded_as_by_transformers(tmp_path: Path) -> None:
    data = ragged("token", 21)
    collator = transformers.DataCollatorForTokenClassification(hf.tokenizer())
    options = {"data_collator": collator, "compute_metrics": shapes}
    other, trainer = theirs("token", tmp_path, data, **options), ours("token", data, **options)
    close(trainer.evaluate(), other.evaluate())
    found, expected = trainer.predict(data), other.predict(data)
    assert (expected.predictions == -100).any()
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-6, atol=1e-6)
    assert (found.label_ids == expected.label_ids).all()


def test_metrics_of_sklearn_by_batch_and_preprocessed(tmp_path: Path) -> None:
    data = hf.dataset("sequence", 22)
    close(
        ours("sequence", data, compute_metrics=compute_metrics).evaluate(data, metric_key_prefix="test"),
        theirs("sequence", tmp_path, data, compute_metrics=compute_metrics).evaluate(data, metric_key_prefix="test"),
    )
    seen: list[int] = []

    def by_batch() -> Any:
        right, rows = [0], [0]

        def accuracy(prediction: Any, compute_result: bool) -> dict[str, float]:
            classes, labels = prediction
            seen.append(len(labels))
            right[0] += int((classes == labels).sum())
            rows[0] += len(labels)
            return {"accuracy": right[0] / rows[0]} if compute_result else {}

        return accuracy

    more = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1), "batch_eval_metrics": True}
    mine = ours("sequence", data, compute_metrics=by_batch(), **more).evaluate()
    batches, seen[:] = [*seen], []
    close(mine, theirs("sequence", tmp_path, data, compute_metrics=by_batch(), **more).evaluate())
    assert batches == seen == [4, 4, 4, 4, 4, 2]


def test_several_sets_are_named_and_one_can_be_monitored(tmp_path: Path) -> None:
    data = {"small": hf.dataset("sequence", 6), "large": hf.dataset("sequence", 14)}
    found = ours("sequence", data, compute_metrics=compute_metrics).evaluate()
    close(found, theirs("sequence", tmp_path, data, compute_metrics=compute_metrics).evaluate())
    assert {"eval_small_loss", "eval_large_accuracy"} <= found.keys()
    only = ours("sequence", data).evaluate("small")
    assert only["eval_loss"] == pytest.approx(found["eval_small_loss"])


@pytest.mark.parametrize("monitor", ["accuracy", "eval_accuracy", "f1"])
def test_validation_of_a_run_is_monitored(monitor: str) -> None:
    data = hf.dataset("sequence", 12)
    trainer = ours("sequence", data, train_dataset=data, compute_metrics=compute_metrics, eval_strategy="epoch",
                   num_train_epochs=2, learning_rate=1e-2, monitor=monitor, log_bar=False)  # fmt: skip
    trainer.train()
    rows = trainer.valid_history
    assert len(rows) == 2
    last = trainer.evaluate()
    assert rows[-1]["valid_accuracy"] == last["eval_accuracy"]
    assert rows[-1]["valid_loss"] == pytest.approx(last["eval_loss"], abs=1e-7)
    assert trainer.best["score"] == max(row[f"valid_{monitor.removeprefix('eval_')}"] for row in rows)
    assert last["epoch"] == 2.0
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"} <= last.keys()


def test_a_misspelt_monitor_is_refused_at_the_first_validation() -> None:
    data = hf.dataset("sequence", 8)
    trainer = ours("sequence", data, train_dataset=data, compute_metrics=compute_metrics, eval_strategy="epoch",
                   monitor="acuracy", monitor_mode="max", log_bar=False)  # fmt: skip
    with pytest.raises(MonitorError, match=r"unknown metric 'acuracy'.*did you mean 'accuracy'"):
        trainer.train()
    assert trainer.progress_checker.epoch <= 1


def test_evaluation_changes_nothing_in_training() -> None:
    data = hf.dataset("sequence", 16)
    weights = []
    for evaluates in (False, True):
        more = {"compute_metrics": compute_metrics, "eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
        trainer = ours("sequence", data, train_dataset=data, num_train_epochs=1, seed=3, log_bar=False, **more)
        if evaluates:
            trainer.evaluate()
            trainer.predict(data)
        trainer.train()
        if evaluates:
            trainer.predict(data)
        weights.append(trainer.unwrap().state_dict())
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


@on_ranks(2, 3)
def test_ranks_give_the_metrics_of_one_process(world: int, tmp_path: Path) -> None:
    import torch.distributed as dist

    assert dist.get_world_size() == world
    data = ragged("token", 19)
    collator = transformers.DataCollatorForTokenClassification(hf.tokenizer())
    seen: list[Any] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {"targets": float(sum((each != -100).sum() for each in seen)), "rows": sum(map(len, seen))}

    for more in ({"compute_metrics": shapes}, {"compute_metrics": by_batch, "batch_eval_metrics": True}):
        options: dict[str, Any] = {"eval_dataset": data, "per_device_eval_batch_size": 2, "data_collator": collator}
        alone = Task(hf.make_model("token"), "cpu", **options, **more)
        several = Trainer.add_on(HuggingFaceAddon, MultiGPUAddon)(hf.make_model("token"), "cpu", **options, **more)
        expected = alone.evaluate()
        seen.clear()
        found = several.evaluate()
        assert several.world_size == world
        close(found, expected)
        seen.clear()
        expected, seen[:] = alone.predict(data), []
        result = several.predict(data)
        close(result.metrics, expected.metrics)
        np.testing.assert_allclose(result.predictions, expected.predictions, rtol=1e-6, atol=1e-6)
        assert (result.label_ids == expected.label_ids).all()
        seen.clear()


# ------------------------------------------------------------------------------------------- as a new user


def test_labels_that_are_missing() -> None:
    bare = [{k: v for k, v in row.items() if k != "labels"} for row in hf.rows("sequence", 6)]
    for more in ({}, {"compute_metrics": compute_metrics}):
        trainer = ours("sequence", bare, **more)
        with pytest.raises(StepError, match=r"labels.*input_ids.*label_names.*predict\(\)"):
            trainer.evaluate()
        found = trainer.predict(bare)
        assert found.predictions.shape[0] == 6
        assert found.label_ids is None
        assert "test_loss" not in found.metrics
        assert found.metrics["test_samples_per_second"] > 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1], "return a dict of numbers"), (None, "returned None"), ({"x": "good"}, "'x' of type str"),
     ({"matrix": np.eye(2)}, "return a number")],
)  # fmt: skip
def test_wrong_result_of_compute_metrics(returned: Any, message: str) -> None:
    trainer = ours("sequence", hf.dataset("sequence", 4), compute_metrics=lambda prediction: returned)
    with pytest.raises(StepError, match=message):
        trainer.evaluate()


def test_model_that_returns_a_tuple(tmp_path: Path) -> None:
    data = hf.dataset("sequence", 6)
    trainer, other = (make(data) for make in (
        lambda data: ours("sequence", data, compute_metrics=compute_metrics),
        lambda data: theirs("sequence", tmp_path, data, compute_metrics=compute_metrics),
    ))  # fmt: skip
    trainer.unwrap().config.return_dict = other.model.config.return_dict = False
    close(trainer.evaluate(), other.evaluate())


def test_keys_to_ignore(tmp_path: Path) -> None:
    data = hf.dataset("causal", 6)
    for keys, count in ((None, 1), (["past_key_values", "hidden_states"], 1), (["past_key_values"], 2)):
        models = [hf.make_model("causal"), hf.make_model("causal")]
        for each in models:
            each.config.output_hidden_states = True
            each.config.use_cache = False
        trainer = Task(models[0], "cpu", per_device_eval_batch_size=4)
        found = trainer.predict(data, ignore_keys=keys).predictions
        expected = transformers.Trainer(models[1], hf.arguments(tmp_path)).predict(data, ignore_keys=keys).predictions
        assert isinstance(found, tuple) == isinstance(expected, tuple)
        assert count == 1 or len(found) == len(expected)


def test_own_prediction_step_and_own_test_step() -> None:
    data = hf.dataset("sequence", 6)

    class Zero(Task):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            return torch.zeros(()), torch.zeros(len(inputs["labels"]), 3), inputs["labels"]

    class Own(Trainer):
        def test_step(self, batch: Any) -> Any:
            return {"loss": torch.ones(())}

    zero = Zero(hf.make_model(), "cpu", compute_metrics=compute_metrics)
    assert zero.evaluate(data)["eval_loss"] == 0.0
    assert Own.add_on(HuggingFaceAddon)(hf.make_model(), "cpu").evaluate(data)["eval_loss"] == 1.0
    with pytest.raises(StepError, match="compute_metrics was not called: test_step of your class"):
        Own.add_on(HuggingFaceAddon)(hf.make_model(), "cpu", compute_metrics=compute_metrics).evaluate(data)


def test_own_compute_loss_without_outputs() -> None:
    data = hf.dataset("sequence", 6)

    class Alone(Task):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs).loss

    assert Alone(hf.make_model(), "cpu").evaluate(data)["eval_loss"] > 0
    with pytest.raises(StepError, match=r"compute_loss returned a loss alone.*\(loss, outputs\)"):
        Alone(hf.make_model(), "cpu", compute_metrics=compute_metrics).evaluate(data)


def test_loaders_are_evaluated_as_by_trainer(tmp_path: Path) -> None:
    data = hf.dataset("sequence", 6)
    trainer = ours("sequence", data, compute_metrics=compute_metrics)
    loader = trainer.get_eval_dataloader()
    assert isinstance(loader, DataLoader)
    found = trainer.evaluate(loader)
    assert {*found} == {"loss", "accuracy", "f1"}
    assert found["loss"] == pytest.approx(trainer.evaluate()["eval_loss"])
    assert trainer.predict(loader)["predictions"].shape[0] == 6
    assert trainer.evaluate(loader=loader) == found
    assert trainer.predict(loader=loader)["predictions"].shape[0] == 6
    assert trainer.predict(data, path=tmp_path / "p.safetensors").is_file()
    assert trainer.predict(loader, str(tmp_path / "q.safetensors")).is_file()


def test_sets_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\(\) needs data"):
        Task(hf.make_model(), "cpu").evaluate()
    with pytest.raises(ConfigError, match=r"predict\(\) needs data"):
        Task(hf.make_model(), "cpu").predict()
    with pytest.raises(ConfigError, match="keeps no predictions"):
        ours("sequence", None, compute_metrics=compute_metrics, prediction_loss_only=True)
    with pytest.raises(ConfigError, match="num_beams: arguments of generate"):
        ours("sequence", hf.dataset("sequence", 2)).evaluate(num_beams=2)


def test_predict_with_generate_is_that_of_transformers(tmp_path: Path) -> None:
    data, more = hf.dataset("seq2seq", 8), {"predict_with_generate": True, "generation_max_length": 9}
    options = {**more, "compute_metrics": shapes, "processing_class": hf.tokenizer()}
    collator = transformers.DataCollatorForSeq2Seq(hf.tokenizer(), hf.make_model("seq2seq"))
    other = theirs("seq2seq", tmp_path, data, kind=transformers.Seq2SeqTrainer, data_collator=collator, **options)
    trainer = ours("seq2seq", data, data_collator=collator, **options)
    close(trainer.evaluate(), other.evaluate())
    found, expected = trainer.predict(data, num_beams=2), other.predict(data, num_beams=2)
    assert (found.predictions == expected.predictions).all()
    close(found.metrics, expected.metrics)
    with pytest.raises(ConfigError, match="BertForSequenceClassification has none"):
        ours("sequence", hf.dataset("sequence", 2), predict_with_generate=True, compute_metrics=shapes).evaluate()


@pytest.mark.parametrize("engine", [FSDPAddon, DeepSpeedAddon, PipelineAddon], ids=lambda each: each.__name__)
def test_generating_by_ranks_that_compute_together_is_refused_before_training(engine: Any) -> None:
    options = {"predict_with_generate": True, "train_dataset": hf.rows("seq2seq", 4), "compute_metrics": shapes}
    with pytest.raises(ConfigError, match=r"predict_with_generate=True .* evaluate it in one process"):
        Task.add_on(engine)(hf.make_model("seq2seq"), ["cpu", "cpu"], **options)
    Task.add_on(MultiGPUAddon)(hf.make_model("seq2seq"), ["cpu", "cpu"], **options)
