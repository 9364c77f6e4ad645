"""The loss of a model of Transformers, and what ``train()`` returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from zae.addons.huggingface.data import forward_of
from zae.arguments import checked
from zae.compose.introspect import AddOnPart, by_name
from zae.errors import StepError, kind_of

__all__ = ["Loss", "LossPart", "call_by_name", "check_named", "train_output"]


class Loss:
    """The loss of a model: that of its ``forward``, smoothed labels, or a function of outputs and labels.

    The rules are those of Transformers' Trainer; the number of targets is counted for each batch, and windows of
    accumulation and ranks give every target the same weight.
    """

    def __init__(self, model: Any, smoothing: float = 0.0, function: Callable[..., Any] | None = None) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.trainer_pt_utils import LabelSmoother

        forward = forward_of(model)
        owner = getattr(forward, "__self__", model)
        config = getattr(model, "config", None)
        takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())
        self.takes_count = bool(getattr(owner, "accepts_loss_kwargs", takes_more))
        self.is_causal = type(owner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        shifts = LOSS_MAPPING.get(getattr(owner, "loss_type", None) or "") is ForCausalLMLoss
        # Transformers looks at loss_type alone, which GPT2LMHeadModel has not: it counts first labels there.
        self.shifts = (shifts or self.is_causal) and not getattr(config, "is_encoder_decoder", False)
        is_multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
        self.smoother = LabelSmoother(epsilon=smoothing) if smoothing and not is_multi_label else None
        self.function = function

    def count(self, batch: Any) -> Tensor | None:
        """Return how many targets a batch has: its labels that are not -100; None where it has no labels."""
        if not isinstance(batch, Mapping):
            return None
        labels = batch["shift_labels"] if "shift_labels" in batch else batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        if self.shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def compute(self, model: Any, inputs: Any, count: Any = None) -> tuple[Any, Any]:
        """Return the loss and what the model returned."""
        check_named(inputs)
        inputs = dict(inputs)
        labels = None
        if self.smoother is not None or self.function is not None:
            labels = inputs.pop("labels", None)
        if self.takes_count and count is not None:
            inputs["num_items_in_batch"] = count
        outputs = model(**inputs)
        if self.function is not None:
            return self.function(outputs, labels, num_items_in_batch=count), outputs
        if labels is not None and self.smoother is not None:
            options = {"shift_labels": True} if self.is_causal else {}
            return self.smoother(outputs, labels, num_items_in_batch=count, **options), outputs
        return _loss_in(outputs, inputs), outputs


def check_named(batch: Any) -> None:
    """Refuse a batch without names for a model that takes its arguments by name."""
    if not isinstance(batch, Mapping):
        raise StepError(
            f"the batch is {kind_of(batch)}, and the model takes arguments by name; let the samples of the dataset be "
            "dicts with the names of its arguments, or write train_step(batch) and test_step(batch)"
        )


def _loss_in(outputs: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the loss that a model has computed itself, or refuse what is not one."""
    loss = None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if loss is None:
        keys = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise StepError(
            f"the model returned no loss for the inputs {', '.join(inputs)} (it returned {keys}); give the dataset a "
            "column 'labels' (or 'label'), name the labels of the model in label_names=[...], or override "
            "compute_loss(self, model, inputs, return_outputs=False)"
        )
    return loss


def call_by_name(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method with those keyword arguments that it takes: overrides may have fewer."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    return function(*args, **kwargs)


def without_change(batch: Any) -> Any:
    """Return a copy of a batch, from which ``compute_loss`` may pop the labels."""
    return copy.copy(batch) if isinstance(batch, Mapping) else batch


def train_output(started: float, samples: int, steps: int, loss: float, epoch: float) -> Any:
    """Return Transformers' TrainOutput of a call that began at a time and took these steps."""
    from transformers.trainer_utils import TrainOutput, speed_metrics

    metrics = speed_metrics("train", started, num_samples=samples, num_steps=steps)
    return TrainOutput(steps, loss, {**metrics, "train_loss": loss, "epoch": epoch})


class LossPart(AddOnPart):
    """The part of HuggingFaceAddon that computes the loss.

    Parameters
    ----------
    compute_loss_func : callable, optional
        The loss of ``outputs, labels, num_items_in_batch=...``.
    label_smoothing_factor : float
        Smooth the labels by this share, as Transformers does.
    """

    layer = "model"
    process_attributes: ClassVar[Mapping[str, Any]] = {"_loss": None}

    @checked
    def __init__(
        self,
        *args: Any,
        compute_loss_func: Callable[..., Any] | None = None,
        label_smoothing_factor: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss_func = compute_loss_func
        self.label_smoothing_factor = label_smoothing_factor
        self._loss = cast("Loss | None", None)

    @property
    def model_loss(self) -> Loss:
        """How the model takes labels, found out when it is first needed."""
        if self._loss is None:
            self._loss = Loss(self.unwrap(), self.label_smoothing_factor, self.compute_loss_func)
        return self._loss

    @by_name
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch; override it as in Transformers, with or without the last two arguments.

        Parameters
        ----------
        model : callable
            The model, with what an engine has put around it.
        inputs : mapping
            The batch, on the device; you may pop the labels.
        return_outputs : bool
            Whether to return ``(loss, outputs)``, as evaluations need.
        num_items_in_batch : Tensor, optional
            The targets of this batch. The steps weigh each batch by it, so a sum of losses divided by it, or a mean,
            is right with gradient accumulation too.

        Returns
        -------
        Tensor, or (Tensor, outputs)
            The loss.
        """
        inner = getattr(super(), "compute_loss", None)
        if inner is not None:
            options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return call_by_name(inner, model, inputs, **options)
        loss, outputs = self.model_loss.compute(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def train_step(self, batch: Any) -> Any:
        """Compute the loss of a batch, and count its targets."""
        if not getattr(super().train_step, "__isabstractmethod__", False):
            return super().train_step(batch)
        count = self.model_loss.count(batch)
        least = None if count is None else count.clamp(min=1)
        loss = call_by_name(self.compute_loss, self.model, without_change(batch), num_items_in_batch=least)
        return {"loss": loss} if count is None else {"loss": loss, "num_targets": count}
