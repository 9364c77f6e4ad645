"""Train the models and datasets of Transformers users, with the arguments of their Trainer."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch

from zae import random_state
from zae.addon import AddOnBase
from zae.addons.huggingface import length, optimizers
from zae.addons.huggingface.data import DatasetsPart
from zae.addons.huggingface.evaluation import EvaluationPart
from zae.addons.huggingface.metrics import split_set
from zae.addons.huggingface.model_init import ModelInit
from zae.addons.huggingface.overrides import OverridesPart
from zae.addons.huggingface.saving import SavingPart
from zae.addons.huggingface.training import LossPart, train_output
from zae.compose.calls import explained_call
from zae.compose.introspect import slots_of
from zae.compose.options import option_value, options_of
from zae.data.loaders import length_of
from zae.errors import ConfigError, OptionError

_log = logging.getLogger("zae")
OPTIMIZER_ARGUMENTS = (
    "optim",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim_args",
)
SCHEDULE_ARGUMENTS = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")

__all__ = ["HuggingFaceAddon"]


class HuggingFaceAddon(SavingPart, EvaluationPart, DatasetsPart, LossPart, OverridesPart, AddOnBase):
    """Train a model of Transformers on datasets: the steps, the loaders, and ``train()``.

    ``Trainer.add_on(HuggingFaceAddon)`` is a whole trainer: the loss is that of the model, or of ``compute_loss``,
    which a class of yours may override. Where your class has a ``train_step`` or ``test_step``, that one is called.
    Options have the names of ``transformers.Trainer`` and ``TrainingArguments``. ``args=TrainingArguments(...)``, or a
    dict of them, adds the add-ons that they ask for; a warning names those without effect.

    ``optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-3})`` replaces ``optim``. A ``scheduler`` is stepped
    after each optimizer step: for one that counts epochs, give ``scheduler_step_on_batch=False``. With gradient
    accumulation and on several ranks, each label that is not -100 has the same weight.

    Parameters
    ----------
    model_init : callable, optional
        Makes the model; in place of ``model``.
    num_train_epochs : float
        Epochs that ``train()`` trains.
    max_steps : int
        Optimizer steps that ``train()`` takes, whatever ``num_train_epochs`` says; -1 means no limit.
    eval_strategy : {"no", "steps", "epoch"}
        When ``train()`` evaluates.
    eval_steps : int, optional
        Steps between evaluations, with ``eval_strategy="steps"``; below 1, the share of the run. The last step is
        evaluated too. 500 by default.
    eval_delay : float
        Epochs or steps, as ``eval_strategy`` says, before the first evaluation.
    eval_on_start : bool
        Evaluate before the first step.
    load_best_model_at_end : bool
        Load the weights of the best evaluation when ``train()`` ends; needs StateManagerAddon.
    optim : str, optional
        The optimizer by its name in Transformers; None is the default of the installed version, AdamW. Biases and
        norms have no weight decay. It is made where no ``optimizer`` is given.
    learning_rate : float
        The largest rate.
    weight_decay : float
        The weight decay.
    adam_beta1 : float
        The first coefficient of Adam's averages.
    adam_beta2 : float
        The second coefficient.
    adam_epsilon : float
        Adam's epsilon.
    optim_args : str, optional
        More arguments of the optimizer, for instance ``"momentum=0.9"``.
    lr_scheduler_type : str
        The schedule by its name in Transformers, where neither ``optimizer`` nor ``scheduler`` is given.
    lr_scheduler_kwargs : dict, optional
        Further arguments of the schedule.
    warmup_steps : float
        Steps of warm-up; below 1, the share of the run.
    max_grad_norm : float
        The ``gradient_clip`` where that is not given; 0 does not clip.

    Raises
    ------
    ConfigError
        An option is invalid, or a dataset is missing.
    TaskError
        The class overrides ``evaluation_loop`` or another method of Transformers that is not called here.
    StepError
        The model returned no loss.

    Examples
    --------
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from zae import Trainer
    >>> from zae.addons import HuggingFaceAddon
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    >>> data = [{"input_ids": [2, 5 + i, 3], "labels": i % 2} for i in range(16)]
    >>> trainer = Trainer.add_on(HuggingFaceAddon)(
    ...     model, "cpu", train_dataset=data[:12], eval_dataset=data[12:], num_train_epochs=2, learning_rate=1e-3)
    >>> trainer.train().global_step
    4
    """

    layer = "model"
    rank_state_attributes = ("_loss_sum",)
    # Where the present call of train() began, and the step of its evaluation where it ends within an epoch.
    process_attributes: ClassVar[Mapping[str, Any]] = {
        "_last_step": 0,
        "_end_step": 0,
        "_first_epoch": 0,
        "_batches": None,
    }

    replicated_options = {
        "label_smoothing_factor": "train_step",
        "load_best_model_at_end": "on_run_end",
        "predict_with_generate": "predict_step",
        "generation_max_length": "predict_step",
        "generation_num_beams": "predict_step",
    }

    def __init__(
        self,
        *args: Any,
        model_init: Callable[[], Any] | None = None,
        num_train_epochs: float = 3.0,
        max_steps: int = -1,
        eval_strategy: Literal["no", "steps", "epoch"] = "no",
        eval_steps: float | None = None,
        eval_delay: float = 0,
        eval_on_start: bool = False,
        load_best_model_at_end: bool = False,
        optim: str | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        optim_args: str | None = None,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: float = 0,
        max_grad_norm: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.model_init = model_init
        self.num_train_epochs = num_train_epochs
        self.max_steps = max_steps
        self._loss_sum = torch.zeros(())
        self._last_step = 0
        self._end_step = 0
        self._first_epoch = 0
        self._batches: int | None = None  # Of an epoch.
        self.eval_strategy = eval_strategy
        self.eval_steps = eval_steps or 500
        self.eval_delay = eval_delay
        self.eval_on_start = eval_on_start
        self.load_best_model_at_end = load_best_model_at_end
        if load_best_model_at_end and "state" not in slots_of(type(self)):
            raise ConfigError(
                "load_best_model_at_end=True needs the best checkpoint; write Trainer.add_on(HuggingFaceAddon, "
                "StateManagerAddon)(..., save_path=folder)"
            )

    @classmethod
    def make_from(cls, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Make a trainer of ``args=TrainingArguments(...)``, with the add-ons that these need.

        They may be the second argument, as in Transformers, a dict, or a file. What has no effect here is a warning.
        """
        keywords = dict(options)
        positional = list(args)
        option_names = list(options_of(cls))
        second = positional[1] if len(positional) > 1 and option_names[1] == "device" else None
        if isinstance(second, Mapping) or hasattr(second, "per_device_train_batch_size"):
            keywords["args"] = positional.pop(1)
        # A class may have such an option itself.
        arguments = None if "args" in option_names else keywords.pop("args", None)
        if arguments is None:
            return super().make_from(args, options)
        if len(positional) > 1:
            raise OptionError("name what is given beside args: model, args=..., device=..., train_dataset=...")
        from zae.addons.huggingface.transformers import from_arguments

        converted = from_arguments(arguments)
        trainer = converted.trainer(cls, *(positional or (keywords.pop("model", None),)), **keywords)
        trainer.args = converted.args
        if converted.report:
            _log.warning("%s", converted.report)
        return trainer

    @classmethod
    def expand_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the options that stand for others: ``model_init``, ``tokenizer`` and ``group_by_length``."""
        expanded = dict(super().expand_options(options))
        if (model_init := expanded.get("model_init")) is not None:
            if expanded.get("model") is not None:
                raise OptionError("model and model_init are both given; keep one of them")
            expanded["model"] = expanded["model_init"] = ModelInit(model_init, options)
        if (tokenizer := expanded.pop("tokenizer", None)) is not None:
            warnings.warn("tokenizer= is now processing_class=; use that name", DeprecationWarning, stacklevel=3)
            expanded.setdefault("processing_class", tokenizer)
        if expanded.pop("group_by_length", False):
            expanded["train_sampling_strategy"] = "group_by_length"
        if expanded.get("mode", "train") != "train":
            return expanded
        beside = [name for name in ("optimizer_cls_and_kwargs", *OPTIMIZER_ARGUMENTS) if name in expanded]
        if expanded.get("optimizer") is not None and beside:
            raise OptionError(
                f"{beside[0]}={expanded[beside[0]]!r} is given beside optimizer, which has its own settings; leave one "
                "of them out"
            )
        if expanded.get("monitor") is not None and isinstance(expanded.get("eval_dataset"), Mapping):
            expanded["monitor"] = _monitor_of(expanded["monitor"], expanded["eval_dataset"])
        recipe = _recipe(expanded)
        expanded.pop("optimizer_cls_and_kwargs", None)
        return {**expanded, **recipe}

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Let the sampler count the epochs of this call of ``train()``, as that of Transformers does."""
        wrapped = super().wrap_loader(loader, training)
        sampler: Any = getattr(loader, "sampler", None)
        if training and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.progress_checker.epoch - self._first_epoch)
        return wrapped

    def on_step_end(self, outputs: Sequence[Any]) -> None:
        """Add the loss of the step to the sum of which ``train()`` returns the mean; evaluate a cut epoch."""
        super().on_step_end(outputs)
        losses = [output.loss.detach() * output.weight for output in outputs if isinstance(output.loss, torch.Tensor)]
        if losses:  # Several optimizers have a loss each, and no sum.
            self._loss_sum = self._loss_sum + sum(losses) / sum(output.weight for output in outputs)
        if self.progress_checker.step == self._last_step:
            self.request("validate")
        save_every = option_value(self, "save_every")
        if self.progress_checker.step == self._end_step and save_every is not None and save_every.steps is not None:
            self.request("save")  # As Transformers: before the epoch ends.

    def on_epoch_begin(self) -> None:
        """Evaluate before the first step, where ``eval_on_start`` asks for it."""
        super().on_epoch_begin()
        _, first_step = self.progress_checker.run_calls.present_start
        if self.eval_on_start and first_step == self.progress_checker.step:
            self.evaluate()

    def on_run_begin(self) -> None:
        """Begin the sum of losses of a new call."""
        super().on_run_begin()
        self._batches = length_of(self.current_run.activity.loader)
        _, first_step = self.progress_checker.run_calls.present_start
        if first_step == self.progress_checker.step:
            self._loss_sum = torch.zeros(())

    def on_run_end(self) -> None:
        """Take the mean over the ranks of the sum of losses."""
        self._loss_sum = self.reduce(self._loss_sum) / self.world_size
        super().on_run_end()

    @explained_call("train(), or train(resume_from_checkpoint=True)")
    def train(self, resume_from_checkpoint: Any = None) -> Any:
        """Train on ``train_dataset``, as long as ``num_train_epochs`` or ``max_steps`` say.

        A second call starts over, as that of Transformers does: steps and epochs count from 0, the schedule and the
        order of the data begin again, and with ``model_init`` so do the model and the optimizer. The names of
        checkpoints, ``progress_checker`` and the history go on.

        Parameters
        ----------
        resume_from_checkpoint : str, Path or bool, optional
            A checkpoint to continue from; True takes the newest one of ``save_path``.

        Returns
        -------
        transformers.trainer_utils.TrainOutput
            ``global_step``, ``training_loss`` (the mean over the steps) and ``metrics``: ``train_runtime``,
            ``train_samples_per_second``, ``train_steps_per_second``, ``train_loss`` and ``epoch``.
        """
        if resume_from_checkpoint:
            if "state" not in slots_of(type(self)):
                raise ConfigError(
                    f"train(resume_from_checkpoint={resume_from_checkpoint!r}) needs checkpoints, and this trainer "
                    "keeps none; write Trainer.add_on(HuggingFaceAddon, StateManagerAddon)(..., save_path=folder)"
                )
            cast(Any, self).resume_from(resume_from_checkpoint)
        first_epoch, first_step = length.begin_of_next_call(self.progress_checker)
        if first_step and not resume_from_checkpoint:
            self.begin_anew()
        loader = self.get_train_dataloader()
        started = time.time()
        batches = self.progress_checker.batch
        steps_in_epoch = self.steps_per_epoch(loader)
        last_step = 0 if self.eval_strategy != "epoch" else length.cut_at(self, steps_in_epoch)
        self._last_step = last_step and first_step + last_step
        self._end_step = first_step + (length.total_of(self, steps_in_epoch) or 0)
        self._first_epoch = first_epoch
        try:
            length.train(self, self, loader)
        finally:
            self._first_epoch = 0
        progress = self.progress_checker  # A resumed run has another one.
        samples = (progress.batch - batches) * self.loading.train_batch_size * self.engine.dp_world_size
        steps = progress.step - first_step
        loss = float(self._loss_sum) / max(steps, 1)
        return train_output(started, samples, steps, loss, self._epochs_of_call())

    def _epochs_of_call(self) -> float:
        """Return how many epochs this call of ``run`` has trained; of the open one, by its batches."""
        progress = self.progress_checker
        first_epoch, _ = progress.run_calls.present_start
        return progress.epoch - first_epoch + progress.epoch_batch / (self._batches or progress.epoch_batch or 1)

    def begin_anew(self) -> None:
        """Begin the schedule of the next call again; with ``model_init``, the model and the optimizer too."""
        self.optimizer, self.scheduler = self._makers(with_optimizer=isinstance(self.model_init, ModelInit))
        if isinstance(self.model_init, ModelInit):
            with random_state.isolated():
                torch.manual_seed(42 if self.seed is None else self.seed)  # As Transformers does.
                model = self.model_init()
            self.apply_weights(model.state_dict())

    def hyperparameter_search(self, *args: Any, folder: Any = None, **kwargs: Any) -> Any:
        """Search for the best options, as ``transformers.Trainer.hyperparameter_search`` does.

        Each trial is a new trainer with the options of this one and the parameters in their place. This trainer is not
        trained: build the best one of ``BestRun.hyperparameters``.

        Parameters
        ----------
        *args, **kwargs : object
            Those of `zae.search.hyperparameter_search` after ``folder``: ``hp_space``, ``compute_objective``,
            ``n_trials``, ``direction``, ``backend``, ``hp_name``, ``sampler``, ``pruner``, ``timeout``, ``catch`` and
            ``seed``.
        folder : str or Path, optional
            Where the search is: give one to continue it after an interruption. By default a new one in ``save_path``,
            or in ``trainer_output``.

        Returns
        -------
        BestRun, or list of them
            ``run_id``, ``objective``, ``hyperparameters`` and ``run_summary``, the study of optuna.

        Raises
        ------
        ConfigError
            The trainer has no ``model_init``.
        """
        from zae import search

        if not isinstance(self.model_init, ModelInit):
            raise ConfigError(
                "hyperparameter_search makes a new model for each trial; give model_init=..., a function, in the place "
                "of the model"
            )
        if folder is None:
            folder = _new_search_folder(Path(option_value(self, "save_path", "trainer_output")))
        make_trainer = self.model_init.trainer_of(type(self).add_on(search.PruningAddon))
        return search.hyperparameter_search(make_trainer, HuggingFaceAddon._train_and_evaluate, folder, *args, **kwargs)

    def _train_and_evaluate(self) -> Any:
        """Train, and evaluate what no validation has."""
        self.train()
        return self.history.test_metrics or self.evaluate()


def _new_search_folder(place: Path) -> Path:
    """Return the first folder ``search-1``, ``search-2`` and so on in a place that does not exist."""
    number = 1
    while (place / f"search-{number}").exists():
        number += 1
    return place / f"search-{number}"


def _monitor_of(monitor: str, datasets: Mapping[str, Any]) -> str:
    """Return the name of a metric of one of several sets: that of ``eval_two_loss`` is ``two/loss`` here."""
    name, metric = split_set(monitor, datasets)
    return f"{name}/{metric}" if name else monitor


def _recipe(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not given of the optimizer, the schedule and the clipping, as Transformers would have it."""
    recipe: dict[str, Any] = {
        "gradient_clip": arguments.get("max_grad_norm", 1.0) or math.inf,
        "scheduler_step_on_batch": True,
    }
    if arguments.get("optimizer") is None:
        optimizer = {name: arguments[name] for name in OPTIMIZER_ARGUMENTS if name in arguments}
        schedule = {name: arguments[name] for name in SCHEDULE_ARGUMENTS if name in arguments}
        factory = replace(optimizers.optimizer(**optimizer), cls_and_kwargs=arguments.get("optimizer_cls_and_kwargs"))
        recipe |= {"optimizer": factory, "scheduler": optimizers.schedule(**schedule)}
    return {name: arguments.get(name, value) for name, value in recipe.items()}
