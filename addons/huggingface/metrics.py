"""The outputs of an evaluation as Transformers gives them to ``compute_metrics``, and what it returns as metrics.

The outputs of each batch are collected in ``log_test``, which is gathered over the ranks in the order of the loader, so
that ``compute_metrics`` gets the same arrays on any number of ranks. With ``batch_eval_metrics`` nothing is collected
on one rank: a batch is given to ``compute_metrics`` as soon as the next one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from zae.errors import ConfigError, StepError
from zae.loop.step_output import check_metrics

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalPrediction

__all__ = ["BatchOutputs", "EvaluationOutputs", "concatenate", "forward_outputs", "labels_of"]

ENTRY = "eval_outputs"
"""The name of the outputs in ``log_test``."""

_INCLUDES = ("inputs", "loss")
_OF_TIME = ("runtime", "samples_per_second", "steps_per_second", "epoch")


class BatchOutputs(NamedTuple):
    """What one batch of an evaluation is judged by; tensors, nested in tuples, lists and dicts."""

    predictions: Any
    label_ids: Any
    inputs: Any
    losses: Any


class EvaluationOutputs:
    """Compute metrics of the outputs of an evaluation by a ``compute_metrics`` that was written for Transformers.

    Parameters
    ----------
    compute_metrics : callable, optional
        A function of an ``EvalPrediction`` that returns a dict of numbers.
    preprocess_logits : callable, optional
        A function of the logits and labels of a batch, which returns what is kept of the logits.
    by_batch : bool
        Call ``compute_metrics(prediction, compute_result=is_last)`` with each batch.
    includes : sequence of str
        What the ``EvalPrediction`` contains beside logits and labels: "inputs", "loss".
    """

    def __init__(
        self,
        compute_metrics: Callable[..., Any] | None = None,
        preprocess_logits: Callable[[Any, Any], Any] | None = None,
        *,
        by_batch: bool = False,
        includes: Sequence[str] = (),
    ) -> None:
        if isinstance(includes, str) or any(include not in _INCLUDES for include in includes):
            raise ConfigError(f"include_for_metrics={includes!r}; write a list of 'inputs' and 'loss'")
        if by_batch and compute_metrics is None:
            raise ConfigError("batch_eval_metrics=True needs compute_metrics; give it, or leave batch_eval_metrics out")
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits
        self.by_batch = by_batch
        self.includes = tuple(includes)
        self._pending_outputs: BatchOutputs | None = None

    def begin(self) -> None:
        """Forget a batch that an evaluation left behind when it failed."""
        self._pending_outputs = None

    def collect(
        self, loss: Tensor | None, logits: Any, labels: Any, inputs: Mapping[str, Any], main_input: str, alone: bool
    ) -> dict[str, Any]:
        """Return what ``test_step`` returns for a batch; ``alone`` says that no other rank evaluates."""
        values: dict[str, Any] = {} if loss is None else {"loss": loss}
        if self.compute_metrics is None:
            if loss is None:
                raise StepError(
                    f"a batch of the evaluation has no labels, so there is no loss; its entries are "
                    f"{', '.join(inputs)}; "
                    "name those of your labels in label_names, or call predict()"
                )
            return values
        if labels is None or logits is None:
            missing = "labels" if labels is None else "logits"
            raise StepError(
                f"compute_metrics needs {missing}, and the batch has none: its entries are {', '.join(inputs)}; "
                + (
                    "name those of your labels in label_names, or call predict()"
                    if labels is None
                    else "leave prediction_loss_only and ignore_keys out, or compute_metrics"
                )
            )
        outputs = self.read(loss, logits, labels, inputs, main_input)
        if not self.by_batch or not alone:
            return {**values, ENTRY: outputs}
        if self._pending_outputs is not None:
            self._compute(self._pending_outputs, compute_result=False)
        self._pending_outputs = outputs
        return values

    def read(
        self, loss: Tensor | None, logits: Any, labels: Any, inputs: Mapping[str, Any], main_input: str
    ) -> BatchOutputs:
        """Return what is kept of a batch."""
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        kept_inputs = inputs if self.by_batch else inputs.get(main_input)
        size = next((len(leaf) for leaf in _leaves(logits) if leaf.dim()), 1)
        return BatchOutputs(
            logits,
            labels,
            kept_inputs if "inputs" in self.includes else None,
            loss.reshape(1).repeat(size) if loss is not None and "loss" in self.includes else None,
        )

    def metrics(self, log: Mapping[str, list[Any]]) -> dict[str, float]:
        """Return the metrics of an evaluation, whose log is that of all ranks."""
        if self.compute_metrics is None:
            return {}
        parts = [] if self._pending_outputs is None else [self._pending_outputs]
        self._pending_outputs = None
        outputs = parts or (log[ENTRY] if ENTRY in list(log) else [])
        if not outputs and len(log):
            raise StepError(
                "compute_metrics was not called: test_step of your class returns no predictions. Leave test_step out, "
                "or override prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None)"
            )
        return self.compute(outputs)

    def compute(self, outputs: Sequence[BatchOutputs]) -> dict[str, float]:
        """Return the metrics of batches in their order."""
        has_both = bool(outputs) and outputs[0].predictions is not None and outputs[0].label_ids is not None
        if self.compute_metrics is None or not has_both:
            return {}
        if not self.by_batch:
            return self._compute(BatchOutputs(*map(concatenate, zip(*outputs, strict=True))))
        *earlier, last = outputs
        for output in earlier:
            self._compute(output, compute_result=False)
        return self._compute(last, compute_result=True)

    def _compute(self, outputs: BatchOutputs, **options: bool) -> dict[str, float]:
        """Call ``compute_metrics``; return its metrics, or nothing where it was not asked for a result."""
        from transformers.trainer_utils import EvalPrediction

        assert self.compute_metrics is not None
        prediction: EvalPrediction = EvalPrediction(*outputs)
        metrics_of_user = self.compute_metrics(prediction, **options)
        if options.get("compute_result") is False:
            return {}
        if metrics_of_user is None:
            raise StepError("compute_metrics returned None; return a dict of numbers: return {'accuracy': accuracy}")
        return check_metrics(
            "compute_metrics", dict(_flat(metrics_of_user)) if isinstance(metrics_of_user, Mapping) else metrics_of_user
        )


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the metrics of nested dicts under names with a slash, and without the prefix of an evaluation."""
    for key, value in metrics.items():
        name = prefix + (str(key) if prefix else str(key).removeprefix("eval_"))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        else:
            yield name, value


# ------------------------------------------------------------------------------------------------ one batch


def _detached(value: Any) -> Any:
    """Return nested tensors without their graphs."""
    from transformers.trainer_pt_utils import nested_detach

    return nested_detach(value)


def labels_of(inputs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the labels of a batch: one, a tuple of several, or None where one of them is missing."""
    if not names or any(inputs.get(name) is None for name in names):
        return None
    labels = _detached(tuple(inputs[name] for name in names))
    return labels[0] if len(labels) == 1 else labels


def forward_outputs(outputs: Any, ignore_keys: Sequence[str], has_loss: bool) -> Any:
    """Return what a model has returned beside its loss: one tensor, or a tuple in the order of the outputs."""
    if isinstance(outputs, Mapping):
        names = [key for key in outputs if key not in ignore_keys and not (has_loss and key == "loss")]
        selected = tuple(outputs[name] for name in names)
    elif isinstance(outputs, (tuple, list)):
        selected = tuple(outputs[1:] if has_loss else outputs)
    else:  # A model without labels may return a tensor.
        return None if has_loss else _detached(outputs)
    selected = _detached(selected)
    return selected[0] if len(selected) == 1 else selected or None


def default_ignored(model: nn.Module) -> list[str]:
    """Return the outputs that the configuration of a model leaves out of predictions."""
    return list(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ["past_key_values"])


def generate(
    model: Any, inputs: Mapping[str, Any], labels: Any, processing_class: Any, options: Mapping[str, Any]
) -> tuple[Tensor, Any]:
    """Return the tokens that a model generates for a batch, and its labels, padded to the longest that may come."""
    if not hasattr(model, "generate"):
        raise ConfigError(f"predict_with_generate=True needs a model with generate; {type(model).__name__} has none")
    inputs = dict(inputs)
    decoded = inputs.get("decoder_input_ids")
    if decoded is not None and labels is not None and labels.shape == decoded.shape:  # Made of the labels.
        inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
    tokens = model.generate(**inputs, **{name: value for name, value in options.items() if value is not None})
    config = model.generation_config
    length = config.max_length if config.max_length is not None else 20  # The default of Transformers.
    if config.max_new_tokens is not None:
        length = max(length, config.max_new_tokens + 1)
    pad = getattr(processing_class, "pad_token_id", None)
    pad = getattr(model.config, "pad_token_id", None) if pad is None else pad
    if pad is None:
        raise ConfigError(
            "predict_with_generate=True pads with pad_token_id, which neither processing_class nor the "
            "configuration of the model has; set model.config.pad_token_id"
        )

    def padded(tensor: Tensor) -> Tensor:
        return nn.functional.pad(tensor, (0, max(length - tensor.shape[-1], 0)), value=pad)

    return padded(tokens), padded(labels) if isinstance(labels, Tensor) else labels


# ------------------------------------------------------------------------------------------------ nested tensors


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def concatenate(parts: Iterable[Any]) -> Any:
    """Join nested tensors of all batches, padded as Transformers pads them, and return them as arrays."""
    from transformers.trainer_pt_utils import nested_concat, nested_numpify

    joined = list(parts)
    if joined[0] is None:
        return None
    while len(joined) > 1:  # Two neighbours at a time, so that no row is copied as often as there are batches.
        pairs = zip(joined[::2], joined[1::2])
        joined = [nested_concat(*pair) for pair in pairs] + joined[len(joined) - len(joined) % 2 :]
    return nested_numpify(joined[0])


# ------------------------------------------------------------------------------------------------ names of metrics


def split_set(key: str, sets: Iterable[str]) -> tuple[str, str]:
    """Return the evaluation set and the metric that a name of Transformers means: ``eval_two_loss``, ``two_loss``."""
    metric = key.removeprefix("eval_")
    name = max((name for name in sets if metric.startswith(f"{name}_")), key=len, default="")
    return name, metric[len(name) + 1 :] if name else metric


def without_prefix(metrics: Mapping[str, float], sets: Iterable[str]) -> dict[str, float]:
    """Return what ``evaluate`` has returned under the names of an evaluation in training, without its time."""
    renamed = {}
    for key, value in metrics.items():
        name, metric = split_set(key, sets)
        if metric not in _OF_TIME:
            renamed[f"{name}/{metric}" if name else metric] = value
    return renamed


def prefixed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics under the names that Transformers gives them."""
    return {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
