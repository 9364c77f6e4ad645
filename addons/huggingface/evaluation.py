"""The base of HuggingFaceAddon that evaluates and predicts as Transformers' Trainer does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch.utils.data import DataLoader

from zae.addons.huggingface.metrics import (
    BatchOutputs,
    EvaluationOutputs,
    concatenate,
    default_ignored,
    forward_outputs,
    generate,
    labels_of,
    prefixed,
    without_prefix,
)
from zae.addons.huggingface.training import call_by_name, check_named, without_change
from zae.arguments import Count, checked
from zae.compose.introspect import AddOnPart, is_add_on, is_default
from zae.distributed.launcher import planned_world
from zae.errors import ConfigError, StepError
from zae.loop.evaluation import Evaluation

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.trainer_utils import PredictionOutput

    from zae.addons.huggingface.training import Loss

__all__ = ["EvaluationPart"]

_FUNCTION = "the function itself, without calling it"


class EvaluationPart(AddOnPart):
    """The part of HuggingFaceAddon that evaluates and predicts, with the names that Transformers gives to metrics.

    An evaluation within a run gives the same metrics without the prefix: ``monitor="accuracy"``.

    Parameters
    ----------
    compute_metrics : callable, optional
        A function of an ``EvalPrediction`` (``predictions, label_ids`` as arrays of the whole set, padded by -100) that
        returns a dict of numbers. A nested dict is flattened: ``"macro avg/f1-score"``.
    preprocess_logits_for_metrics : callable, optional
        A function of the logits and labels of a batch; what it returns is kept in place of the logits.
    batch_eval_metrics : bool
        Call ``compute_metrics(prediction, compute_result=is_last)`` with the tensors of each batch, so that one batch
        is kept. On several ranks each keeps those of its own share, and gets all of them when the evaluation ends.
    include_for_metrics : sequence of {"inputs", "loss"}
        What the ``EvalPrediction`` contains beside predictions and labels.
    prediction_loss_only : bool
        Keep no predictions.
    predict_with_generate : bool
        The predictions are the tokens of ``model.generate``, for models of sequence to sequence.
    generation_max_length : int, optional
        The longest output of ``generate``; else that of the model's ``generation_config``.
    generation_num_beams : int, optional
        The beams of ``generate``; else those of the model's ``generation_config``.
    """

    layer = "model"
    processing_class: Any  # An option of DatasetsPart.
    eval_dataset: Any  # So is this.
    outputs: EvaluationOutputs
    _generation: dict[str, Any]
    _ignore_keys: Sequence[str] | None
    _evaluates: bool

    @checked
    def __init__(
        self,
        *args: Any,
        compute_metrics: Annotated[Callable[..., Any], _FUNCTION] | None = None,
        preprocess_logits_for_metrics: Annotated[Callable[[Any, Any], Any], _FUNCTION] | None = None,
        batch_eval_metrics: bool = False,
        include_for_metrics: Sequence[str] = (),
        prediction_loss_only: bool = False,
        predict_with_generate: bool = False,
        generation_max_length: Count | None = None,
        generation_num_beams: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = EvaluationOutputs(
            compute_metrics,
            preprocess_logits_for_metrics,
            by_batch=batch_eval_metrics,
            includes=include_for_metrics,
        )
        if prediction_loss_only and compute_metrics is not None:
            raise ConfigError(
                "prediction_loss_only=True keeps no predictions, which compute_metrics needs; leave one of them out"
            )
        is_one_of_several = planned_world(len(self.devices)) > 1
        if predict_with_generate and type(self).lockstep_forward and is_one_of_several:
            raise ConfigError(
                f"predict_with_generate=True generates on each rank as long as its own samples need, and the ranks of "
                f"{type(self).__name__} compute every forward together; leave predict_with_generate out here, save the "
                "model with save_model(folder), and evaluate it in one process"
            )
        self.prediction_loss_only = prediction_loss_only
        self.predict_with_generate = predict_with_generate
        self._generation = {"max_length": generation_max_length, "num_beams": generation_num_beams}
        self._ignore_keys = None
        self._evaluates = False

    if TYPE_CHECKING:
        label_names: tuple[str, ...]
        model_loss: Loss

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...

        def get_test_dataloader(self, test_dataset: Any) -> Any: ...

        compute_loss: Any

        def _epochs_of_call(self) -> float: ...

    # ------------------------------------------------------------------------------------------------ one batch

    def test_step(self, batch: Any) -> Any:
        """Compute the loss of a batch, and collect its outputs for ``compute_metrics``."""
        if not is_default(super().test_step):
            return super().test_step(batch)
        is_loss_only = self.outputs.compute_metrics is None
        loss, logits, labels = self.prediction_step(self.model, batch, is_loss_only, self._ignore_keys)
        return self.outputs.collect(loss, logits, labels, batch, self._main_input, self.engine.dp_world_size == 1)

    def predict_step(self, batch: Any) -> Any:
        """Return the predictions of a batch, with its loss and labels where it has some."""
        inner = super().predict_step
        if not is_default(inner) or not is_default(super().test_step):
            return inner(batch)
        loss, logits, labels = self.prediction_step(self.model, batch, self.prediction_loss_only, self._ignore_keys)
        outputs = self.outputs.read(loss, logits, labels, batch, self._main_input)
        names = {"loss": loss, "predictions": outputs.predictions, "label_ids": labels}
        names |= {"inputs": outputs.inputs, "losses": outputs.losses}
        return {name: value for name, value in names.items() if value is not None}

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, logits and labels of a batch, each or None; override it as in Transformers.

        Parameters
        ----------
        model : callable
            The model, with what an engine has put around it.
        inputs : mapping
            The batch, on the device.
        prediction_loss_only : bool
            Whether the loss is enough.
        ignore_keys : sequence of str, optional
            Outputs of the model that are not predictions; None leaves out those that its configuration names.

        Returns
        -------
        (loss, logits, labels)
            Logits and labels are a tensor, or a tuple of several.
        """
        inner = getattr(super(), "prediction_step", None)
        if inner is not None:
            step_outputs: tuple[Any, Any, Any] = inner(model, inputs, prediction_loss_only, ignore_keys)
            return step_outputs
        check_named(inputs)
        labels = labels_of(inputs, self._labels)
        if self.predict_with_generate and not prediction_loss_only:
            return self._generate(model, inputs, labels)
        ignored = default_ignored(self.unwrap()) if ignore_keys is None else list(ignore_keys)
        has_loss = labels is not None or (not self._labels and self._returns_loss)
        loss, outputs = self._loss_and_outputs(model, inputs) if has_loss else (None, model(**inputs))
        if prediction_loss_only:
            return loss, None, None
        if has_loss and outputs is None:
            raise StepError(
                f"{type(self).__name__}.compute_loss returned a loss alone, and predictions are made of the outputs; "
                "write compute_loss(self, model, inputs, return_outputs=False, ...) and return (loss, outputs) if asked"
            )
        return loss, forward_outputs(outputs, ignored, has_loss), labels

    def _loss_and_outputs(self, model: Any, inputs: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch, and what the model returned, where ``compute_loss`` says it."""
        count = self.model_loss.count(inputs)
        options = {"return_outputs": True, "num_items_in_batch": None if count is None else count.clamp(min=1)}
        result = call_by_name(self.compute_loss, model, without_change(inputs), **options)
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        return loss.detach().mean(), outputs

    def _generate(self, model: Any, inputs: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return the tokens that the model generates as predictions."""
        tokens, labels = generate(self.unwrap(), inputs, labels, self.processing_class, self._generation)
        return None if labels is None else self._loss_and_outputs(model, inputs)[0], tokens, labels

    @property
    def _main_input(self) -> str:
        return getattr(self.unwrap(), "main_input_name", "input_ids")

    @cached_property
    def _labels(self) -> Sequence[str]:
        """The arguments of the model that are labels: as the option names them, else as Transformers finds them."""
        from transformers.utils import find_labels

        model: Any = self.unwrap()
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        return self.label_names if self.label_names != ("labels",) else find_labels(type(model))

    @property
    def _returns_loss(self) -> bool:
        from transformers.utils import can_return_loss

        return bool(can_return_loss(type(self.unwrap())))

    def metric_on_epoch_end(self) -> Mapping[str, float]:
        """Add what ``compute_metrics`` returns for an evaluation."""
        metrics = super().metric_on_epoch_end()
        return metrics if self.mode == "train" else {**metrics, **self.outputs.metrics(self.log_test)}

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Begin an evaluation without what a failed one has left."""
        self.outputs.begin()
        with super().evaluation_context():
            yield

    # ------------------------------------------------------------------------------------------ evaluate, predict

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        loader: Any = None,
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate a dataset as Transformers' Trainer does; training is left exactly as it is.

        The loss is the mean over the samples of the mean loss of their batch, as that of Transformers, whose
        Seq2SeqTrainer counts a smaller last batch like a whole one. A loss that is not finite is not left out.

        Parameters
        ----------
        eval_dataset : Dataset, or dict of them, optional
            By default that of the constructor. Of a dict the metrics are named ``eval_<name>_loss``. A loader is
            evaluated as by ``Trainer.evaluate``, whose metrics have no prefix.
        ignore_keys : sequence of str, optional
            Outputs of the model that are not predictions.
        metric_key_prefix : str
            What the names of metrics begin with.
        loader : iterable, optional
            The name of the first argument in ``Trainer.evaluate``.
        **gen_kwargs : object
            Arguments of ``generate``, with ``predict_with_generate=True``.

        Returns
        -------
        dict of str to float
            ``eval_loss``, ``eval_<metric>``, ``eval_runtime``, ``eval_samples_per_second`` and
            ``eval_steps_per_second``; after training also ``epoch``.
        """
        eval_dataset = eval_dataset if loader is None else loader
        with self._metric_settings(ignore_keys, gen_kwargs):
            if _is_loader(eval_dataset):
                return super().evaluate(eval_dataset)
            loader = self.get_eval_dataloader(eval_dataset)
            several = loader if isinstance(loader, Mapping) else {"": loader}
            results: dict[str, float] = {}
            for name, dataset in several.items():
                prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                started = time.time()
                metrics = super().evaluate(dataset)
                weight = max((dataset.weight for dataset in self.log_test.sums().values()), default=0.0)
                batches = max((len(self.log_test[key]) for key in self.log_test), default=0)
                results |= prefixed(metrics, prefix) | self._speed(prefix, started, int(weight), batches)
            return results

    def validate(self) -> dict[str, float]:
        """Call an override of ``evaluate`` for an evaluation in training, as Transformers does."""
        outer = type(self).__mro__[: type(self).__mro__.index(EvaluationPart)]
        is_overridden = any("evaluate" in vars(base) and not is_add_on(base) for base in outer)
        if self.eval_dataset is None or not is_overridden:
            return super().validate()
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        return without_prefix(self.evaluate(), sets)

    def predict(  # type: ignore[override]
        self,
        test_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        loader: Any = None,
        path: str | Path | None = None,
        seed: int | None = None,
        **gen_kwargs: Any,
    ) -> PredictionOutput | Any:
        """Return the predictions and labels of a dataset, and its metrics where it has labels.

        Parameters
        ----------
        test_dataset : Dataset
            A loader is taken as by ``Trainer.predict``, which returns a dict of tensors.
        ignore_keys : sequence of str, optional
            Outputs of the model that are not predictions.
        metric_key_prefix : str
            What the names of metrics begin with.
        loader : iterable, optional
            The name of the first argument in ``Trainer.predict``.
        path : str or Path, optional
            A file for the predictions, as in ``Trainer.predict``.
        seed : int, optional
            Where the random streams begin, as in ``Trainer.predict``.
        **gen_kwargs : object
            Arguments of ``generate``, with ``predict_with_generate=True``.

        Returns
        -------
        transformers.trainer_utils.PredictionOutput
            ``predictions``, ``label_ids`` and ``metrics``; with ``path``, the file.
        """
        test_dataset = test_dataset if loader is None else loader
        if test_dataset is None:
            raise ConfigError("predict() needs data; write predict(dataset), or predict(loader)")
        if isinstance(ignore_keys, (str, Path)):  # The second argument of Trainer.predict.
            ignore_keys, path = None, ignore_keys
        with self._metric_settings(ignore_keys, gen_kwargs):
            is_loader = _is_loader(test_dataset)
            loader = test_dataset if is_loader else self.get_test_dataloader(test_dataset)
            if is_loader or path is not None:
                return super().predict(loader, path, seed=seed)
            return self._predict(loader, metric_key_prefix, seed)

    def _predict(self, loader: Any, prefix: str, seed: int | None) -> Any:
        """Return the PredictionOutput of a loader."""
        from transformers.trainer_utils import PredictionOutput

        parts: list[BatchOutputs] = []
        losses: list[tuple[float, int]] = []

        def take(size: int | None, values: Mapping[str, Any]) -> None:
            parts.append(BatchOutputs(*map(values.get, ("predictions", "label_ids", "inputs", "losses"))))
            if "predictions" not in values and "loss" not in values:
                raise StepError(
                    f"predict_step returned {', '.join(values) or 'nothing'}; for a dataset it returns 'predictions', "
                    "and 'label_ids' where there are some. Else give predict() a loader"
                )
            losses.append((float(values.get("loss", 0.0)), size or 1))

        self.engine.rendezvous("predict")
        started = time.time()
        with self.ready():
            Evaluation(self, seed=seed).outputs(loader, take)
            metrics: dict[str, float] = self.outputs.compute(parts)
        samples = sum(size for _, size in losses)
        if parts and parts[0].label_ids is not None:
            metrics = {"loss": sum(loss * size for loss, size in losses) / max(samples, 1), **metrics}
        metrics = prefixed(metrics, prefix) | self._speed(prefix, started, samples, len(parts), with_epoch=False)
        predictions = concatenate(pair[0] for pair in parts) if parts else None
        label_ids = concatenate(pair[1] for pair in parts) if parts else None
        return PredictionOutput(predictions=predictions, label_ids=label_ids, metrics=metrics)

    @contextmanager
    def _metric_settings(self, ignore_keys: Sequence[str] | None, gen_kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Keep the arguments of an evaluation for its steps."""
        if gen_kwargs and not self.predict_with_generate:
            raise ConfigError(
                f"{', '.join(gen_kwargs)}: arguments of generate, which is called with predict_with_generate=True only"
            )
        before = self._ignore_keys, self._generation, self._evaluates
        self._ignore_keys = ignore_keys
        self._generation = {**self._generation, **gen_kwargs}
        self._evaluates = True
        try:
            yield
        finally:
            self._ignore_keys, self._generation, self._evaluates = before

    def build_scheduler(self) -> Any:
        """Leave a schedule of the run's length to the first run, where a model is evaluated before it."""
        if self._evaluates and self.progress_checker.run_calls.planned_steps is ...:
            return self.scheduler
        return super().build_scheduler()

    def _speed(
        self, prefix: str, started: float, samples: int, batches: int, with_epoch: bool = True
    ) -> dict[str, float]:
        """Return the time that an evaluation took, and the epoch that training is in."""
        from transformers.trainer_utils import speed_metrics

        steps = -(-batches // max(self.engine.dp_world_size, 1))
        speed: dict[str, float] = speed_metrics(prefix, started, num_samples=samples, num_steps=steps)
        epoch = {"epoch": float(self._epochs_of_call())} if with_epoch and self.progress_checker.step else {}
        return speed | epoch


def _is_loader(data: Any) -> bool:
    """Return whether data are batches; a list of dicts is a dataset, whose rows are samples."""
    if isinstance(data, DataLoader):
        return True
    if isinstance(data, Mapping):
        return any(map(_is_loader, data.values()))
    return isinstance(data, (list, tuple)) and not isinstance(next(iter(data), {}), Mapping)
