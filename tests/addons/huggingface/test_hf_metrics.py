"""compute_metrics of Transformers, whole and by batch."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zae.addons.huggingface import metrics
from zae.addons.huggingface.metrics import BatchOutputs, EvaluationOutputs, concatenate
from zae.errors import ConfigError, StepError


def test_concatenation_is_that_of_transformers() -> None:
    from transformers.trainer_pt_utils import nested_concat

    draw = torch.Generator().manual_seed(0)
    parts: list[Any] = []
    for rows, width in [(3, 4), (2, 6), (1, 1), (4, 6)]:
        ids = torch.randint(9, (rows, width), generator=draw)
        logits = torch.randn(rows, width, 5, generator=draw)
        parts.append((logits, {"ids": ids, "row": [ids[:, 0].contiguous()]}, torch.tensor(1.0)))
    expected = parts[0]
    for each in parts[1:]:
        expected = nested_concat(expected, each)
    logits, more, losses = concatenate(parts)
    assert np.array_equal(logits, expected[0])
    assert np.array_equal(more["ids"], expected[1]["ids"])
    assert np.array_equal(more["row"][0], expected[1]["row"][0])
    assert np.array_equal(losses, expected[2])
    assert (more["ids"][:3, 4:] == -100).all()


def test_bfloat16_becomes_float32() -> None:
    (array,) = concatenate([(torch.ones(2, dtype=torch.bfloat16),)] * 3)
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32


class Sums:
    """A metric that adds up batches, and sees how many tensors are alive."""

    def __init__(self) -> None:
        self.rows = self.calls = 0
        self.alive: list[int] = []

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        logits, labels = prediction
        assert isinstance(logits, Tensor)
        assert len(logits) == len(labels)
        self.rows += len(labels)
        self.calls += 1
        gc.collect()
        self.alive.append(sum(isinstance(each, Tensor) and each.shape[1:] == (50,) for each in gc.get_objects()))
        return {"rows": self.rows} if compute_result else {}


def evaluate(outputs: EvaluationOutputs, batches: int, alone: bool = True) -> tuple[dict[str, float], int]:
    """Collect as an evaluation does; return the metrics, and the bytes that the log has kept."""
    outputs.begin()
    log: dict[str, list[Any]] = {}
    for _ in range(batches):
        inputs = {"input_ids": torch.zeros(4, 3), "labels": torch.zeros(4)}
        values = outputs.collect(torch.tensor(0.5), torch.zeros(4, 50), inputs["labels"], inputs, "input_ids", alone)
        for key, each in values.items():
            log.setdefault(key, []).append(each)
    kept = sum(part.nbytes for each in log.get("eval_outputs", []) for part in each if isinstance(part, Tensor))
    return outputs.metrics(log), kept


@pytest.mark.parametrize("alone", [True, False])
def test_memory_stays_flat_by_batch(alone: bool) -> None:
    kept = {}
    for batches in (2, 20):
        sums = Sums()
        metrics, kept[batches] = evaluate(EvaluationOutputs(sums, by_batch=True), batches, alone)
        assert metrics == {"rows": 4.0 * batches}
        assert sums.calls == batches
        if alone:
            assert max(sums.alive) <= 2, "one batch is held, one is new"
    if alone:
        assert kept == {2: 0, 20: 0}
    whole = EvaluationOutputs(lambda prediction: {"rows": len(prediction.predictions)})
    assert evaluate(whole, 20) == ({"rows": 80.0}, 20 * (4 * 50 + 4) * 4), "the whole set is kept"


def test_inputs_and_losses_are_included_where_asked() -> None:
    seen: list[Any] = []

    def metric(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {}

    evaluate(EvaluationOutputs(metric, includes=["inputs", "loss"]), 3)
    assert seen[0].inputs.shape == (12, 3)
    assert seen[0].losses.tolist() == [0.5] * 12
    evaluate(EvaluationOutputs(metric, preprocess_logits=lambda logits, labels: logits.argmax(-1)), 3)
    assert seen[1].predictions.shape == (12,)
    assert seen[1].inputs is seen[1].losses is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "compute_metrics returned None; return a dict of numbers"),
        ([0.5], "compute_metrics returned list of 1 entries; return a dict of numbers"),
        ({"confusion": np.eye(2)}, "compute_metrics returned 'confusion' of type ndarray"),
    ],
)
def test_wrong_metrics_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        evaluate(EvaluationOutputs(lambda prediction: returned), 1)


def test_names_of_metrics() -> None:
    nested = {"eval_accuracy": np.float32(0.5), "macro avg": {"f1": torch.tensor(0.25)}}
    assert evaluate(EvaluationOutputs(lambda prediction: nested), 1)[0] == {"accuracy": 0.5, "macro avg/f1": 0.25}
    assert metrics.prefixed({"loss": 1.0, "test_f1": 2.0}, "test") == {"test_loss": 1.0, "test_f1": 2.0}


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="write a list of 'inputs' and 'loss'"):
        EvaluationOutputs(includes=["input"])
    with pytest.raises(ConfigError, match="needs compute_metrics"):
        EvaluationOutputs(by_batch=True)


def test_missing_labels_are_named() -> None:
    outputs, inputs = EvaluationOutputs(lambda prediction: {}), {"input_ids": torch.zeros(2, 3)}
    with pytest.raises(StepError, match=r"compute_metrics needs labels.*input_ids.*label_names"):
        outputs.collect(None, torch.zeros(2, 5), None, inputs, "input_ids", True)
    assert metrics.labels_of(inputs, ["labels"]) is None


def test_outputs_of_a_model() -> None:
    logits, hidden = torch.ones(2, 3), torch.zeros(2, 4)
    read = metrics.forward_outputs
    assert read({"loss": torch.ones(()), "logits": logits}, [], True) is not None
    assert torch.equal(read({"loss": torch.ones(()), "logits": logits}, [], True), logits)
    assert len(read((torch.ones(()), logits, hidden), [], True)) == 2
    assert torch.equal(read((logits,), [], False), logits)
    assert torch.equal(read(logits, [], False), logits)
    assert len(read({"logits": logits, "cache": hidden}, ["cache"], False)) == 2


def test_outputs_without_labels_give_no_metrics() -> None:
    outputs = EvaluationOutputs(lambda prediction: {"n": 1})
    assert outputs.compute([BatchOutputs(torch.zeros(2, 3), None, None, None)]) == {}
