"""Turn the ``TrainingArguments`` of Transformers into a trainer of zae."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import nn

from zae.addons.huggingface import arguments, optimizers
from zae.addons.huggingface.length import (
    NEVER,
    EveryAnd,
    begin_of_next_call,
    convert_evaluation,
    convert_length,
    steps_of,
    train,
)
from zae.compose.converted_arguments import ConvertedArgumentsBase, Report
from zae.compose.introspect import slots_of
from zae.compose.options import options_of
from zae.errors import ConfigError
from zae.loop.cadence import Every

__all__ = ["ConvertedArguments", "EveryAnd", "Report", "from_arguments"]


def from_arguments(args: Any, total_steps: int | None = None) -> ConvertedArguments:
    """Return the add-ons and options of a trainer that trains as ``transformers.Trainer`` does with these arguments.

    Parameters
    ----------
    args : transformers.TrainingArguments, mapping, str or Path
        Also a dict of its arguments, or a JSON or YAML file with one. Names of older versions are taken with a warning
        that has the present name.
    total_steps : int, optional
        Optimizer steps of the run. Shares of it, such as ``eval_steps=0.1`` and ``num_train_epochs=0.5``, need it,
        unless ``max_steps`` is given.

    Returns
    -------
    ConvertedArguments
        Its ``report`` names each argument that has no effect here, and why.

    Raises
    ------
    ConfigError
        An argument is unknown, has a wrong type, or would train in a way that zae does not support.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons.huggingface.transformers import from_arguments
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> converted = from_arguments({
    ...     "num_train_epochs": 2, "learning_rate": 0.1, "optim": "sgd", "gradient_accumulation_steps": 2,
    ...     "save_strategy": "no", "use_cpu": True, "torch_empty_cache_steps": 10})
    >>> trainer = converted.trainer(Task, torch.nn.Linear(2, 1))
    >>> converted.train(trainer, [torch.ones(8, 2)] * 5)["step"]
    6
    >>> print(converted.report)
    torch_empty_cache_steps=10: call torch.cuda.empty_cache() in on_step_end
    """
    read, entries = arguments.read_arguments(args, stacklevel=3)
    if total_steps is None and read.max_steps > 0:
        total_steps = read.max_steps
    converted = ConvertedArguments(read, entries, total_steps)
    for convert in _CONVERTERS:
        convert(read, converted)
    converted.add_report()
    return converted


class ConvertedArguments(ConvertedArgumentsBase):
    """What `from_arguments` returns.

    Attributes
    ----------
    args : transformers.TrainingArguments
        The arguments.
    add_ons : list of type
        For ``Task.add_on(*add_ons)``.
    options : dict
        For the constructor.
    run : dict
        For ``trainer.run(loader=..., valid_loader=..., **run)``.
    loader, valid_loader : dict
        For ``DataLoader(dataset, **loader)``.
    huggingface : dict
        More options for a class with HuggingFaceAddon.
    is_deterministic : bool
        Whether `trainer` calls ``transformers.enable_full_determinism``.
    model_calls : list of callable
        What the arguments change in the model; `trainer` calls them.
    report : Report
        The arguments that have no effect, or less than in Transformers. `trainer` takes away what HuggingFaceAddon
        does, where the class has it.
    """

    def __init__(self, args: Any, entries: Mapping[str, Any], total_steps: int | None) -> None:
        super().__init__()
        self.args = args
        self.entries = entries
        self.total_steps = total_steps
        self.loader: dict[str, Any] = {}
        self.valid_loader: dict[str, Any] = {}
        self.huggingface: dict[str, Any] = {}
        self.model_calls: list[Callable[[Any], Any]] = []
        self.is_deterministic = False
        self._trainers_with_schedule: WeakSet[Any] = WeakSet()  # That of the arguments.

    def trainer(self, task: Any, model: nn.Module | Callable[[], nn.Module] | None = None, **keywords: Any) -> Any:
        """Return a trainer of a task with the add-ons and options.

        Parameters
        ----------
        task : type
            A subclass of Trainer, with or without add-ons.
        model : Module or callable, optional
            What is trained, or a function that returns it; None where ``model_init`` is given.
        **more : object
            Further options; they replace those of the arguments.

        Returns
        -------
        Trainer
            Ready for ``run``.
        """
        cls = task.add_on(*self.missing(task))
        options = self.options_for(cls)
        for name in options.keys() & self.huggingface.keys():
            self.report.pop(name, None)  # It was without HuggingFaceAddon.
        has_factory = model is None and keywords.get("model_init") is not None
        replaces_some = any(CONVERTED.get(name) is _convert_optimizer for name in keywords)
        if (has_factory or replaces_some) and "optimizer" not in keywords and "optim" in options_of(cls):
            options = self._optimizer_by_name(options)
        if not has_factory:
            return cls(self.prepare(model), **{**options, **keywords})  # A class may have another name for it.
        keywords["model_init"] = self.prepare(keywords["model_init"])
        return cls(**{**options, **keywords})

    def _optimizer_by_name(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of HuggingFaceAddon for the optimizer, which may be replaced one by one."""
        if self.args.optim_target_modules is not None:  # There is no such option.
            return dict(options)
        other_options = {name: value for name, value in options.items() if name not in ("optimizer", "scheduler")}
        named = {name: getattr(self.args, name) for name in CONVERTED if CONVERTED[name] is _convert_optimizer}
        del named["optim_target_modules"]
        return {**other_options, **named, "optim": arguments.plain(self.args.optim)}

    def options_for(self, cls: Any) -> dict[str, Any]:
        """Return the options that a class takes."""
        option_names = {*options_of(cls)}
        if "state" not in slots_of(cls):
            option_names -= {"load_best_model_at_end"}  # The report says that there are no checkpoints.
        return {name: value for name, value in {**self.huggingface, **self.options}.items() if name in option_names}

    def prepare(self, model: Any) -> Any:
        """Change a model as the arguments say; of a function that returns one, return a function that does both."""
        if self.is_deterministic:
            arguments.library().enable_full_determinism(self.args.seed)
        if not isinstance(model, nn.Module) and callable(model):
            return partial(_make_model, model, tuple(self.model_calls))
        return _prepared(model, tuple(self.model_calls))

    def train(self, trainer: Any, loader: Any = None, valid_loader: Any = None) -> Any:
        """Run a trainer as long as the arguments say, evaluating as they say; load the best weights at the end.

        A second call starts over, as that of Transformers does: steps and epochs count from 0, and so does the
        schedule that the arguments ask for.

        Parameters
        ----------
        trainer : Trainer
            One that `trainer` has made.
        loader, valid_loader : iterable, optional
            As for ``run``; with HuggingFaceAddon they are those of its datasets.

        Returns
        -------
        MetricsDict
            What ``run`` returned.
        """
        schedule = self.options.get("scheduler")
        if trainer.scheduler is schedule:  # Nothing has made it yet.
            self._trainers_with_schedule.add(trainer)
        if begin_of_next_call(trainer.progress_checker)[1]:
            from zae.addons.huggingface.addon import HuggingFaceAddon

            if isinstance(trainer, HuggingFaceAddon):
                trainer.begin_anew()
            elif trainer in self._trainers_with_schedule:
                trainer.scheduler = schedule
        return train(trainer, self.args, loader, valid_loader, self.total_steps)

    def report_unused(self, name: str, reason: str) -> None:
        """Report an argument."""
        value = "..." if "token" in name else arguments.plain(getattr(self.args, name, None))
        self.report[name] = f"{name}={value!r}: {reason}"

    def add_report(self) -> None:
        """Report each argument that nothing has converted, unless it has its default."""
        options = arguments.huggingface_options()
        for field in dataclasses.fields(self.args):
            name = field.name
            reason = arguments.REPORTED.get(field.name)
            if name in options and CONVERTED.get(name) not in (_convert_optimizer, _convert_step):
                self.huggingface |= {} if arguments.is_default(self.args, field) else {name: getattr(self.args, name)}
            if arguments.is_default(self.args, field) or name in self.report or name in CONVERTED:
                continue
            if name == "dataloader_pin_memory" and self.args.use_cpu:  # It sets it itself.
                continue
            if name in arguments.REFUSED:
                value = arguments.plain(getattr(self.args, name))
                raise ConfigError(f"{name}={value!r} is not supported; {arguments.REFUSED[name]}")
            if name in arguments.HUGGINGFACE:
                reason = arguments.HUGGINGFACE[name]
                if name not in options:
                    self.report_unused(name, reason)
                elif reason is not arguments.IN_LOADER:
                    self.report_unused(name, f"an option of HuggingFaceAddon; without it, {reason}")
            elif reason is None:
                base = type(self.args).__module__.startswith("transformers.")
                self.report_unused(name, "this version of zae does not know it" if base else "it is for your own code")
            else:
                self.report_unused(name, reason)


def _make_model(make: Callable[..., Any], calls: tuple[Callable[[Any], Any], ...]) -> nn.Module:
    return _prepared(make(), calls)


def _prepared(model: nn.Module, calls: tuple[Callable[[Any], Any], ...]) -> nn.Module:
    for call in calls:
        call(model)
    return model


# ------------------------------------------------------------------------------------------------- length and cadences


def _convert_eval_start(args: Any, to: ConvertedArguments) -> None:
    """Carry eval_on_start and do_eval."""
    if args.do_eval and args.eval_strategy == "no":
        to.report_unused("do_eval", arguments.REPORTED["do_train"])
    if args.eval_on_start:
        to.report_unused(
            "eval_on_start", "converted.train() does it; before trainer.run(), call trainer.evaluate(valid_loader)"
        )


def _convert_logging(args: Any, to: ConvertedArguments) -> None:
    """Carry logging_strategy, logging_steps and logging_first_step."""
    every: Every = {"no": NEVER, "epoch": Every(epochs=1)}.get(arguments.plain(args.logging_strategy), NEVER)
    if args.logging_strategy == "steps":
        first = (1,) if args.logging_first_step else ()
        every = EveryAnd(steps=steps_of("logging_steps", args, to.total_steps), also=first)
    elif args.logging_first_step:
        to.report_unused("logging_first_step", "it needs logging_strategy='steps'")
    to.options["log_every"] = every
    to.options["log_bar"] = "lines" if args.disable_tqdm else True


def _convert_saving(args: Any, to: ConvertedArguments) -> None:
    """Carry output_dir, save_strategy, save_steps, save_total_limit, resume_from_checkpoint and ignore_data_skip."""
    strategy = arguments.plain(args.save_strategy)
    if strategy == "no":
        for name in ("resume_from_checkpoint", "load_best_model_at_end"):
            if getattr(args, name):
                to.report_unused(name, "there are no checkpoints with save_strategy='no'")
        return
    every = {"epoch": Every(epochs=1), "best": NEVER}.get(strategy)
    limit = args.save_total_limit if (args.save_total_limit or 0) > 0 else None
    watched = args.metric_for_best_model is not None and args.eval_strategy != "no"
    keeps_best = args.load_best_model_at_end or strategy == "best" or (watched and limit is not None)
    to.add_on(
        "StateManagerAddon",
        save_path=args.output_dir,
        save_every=every or Every(steps=steps_of("save_steps", args, to.total_steps)),
        keep_last=limit,
        keep_best=int(keeps_best),
    )
    if strategy == "best":
        to.report_unused("save_strategy", "the end of the run is saved too")
    if "overwrite_output_dir" in to.entries:
        to.options["overwrite"] = bool(to.entries["overwrite_output_dir"])
    if to.entries.get("save_safetensors") is False:
        to.options["save_format"] = "ckpt"
    if args.resume_from_checkpoint:
        to.options["resume"] = _checkpoint(args.resume_from_checkpoint)
    if args.ignore_data_skip:
        to.options["mid_epoch"] = "restart"
    if args.load_best_model_at_end:
        to.report_unused(
            "load_best_model_at_end", "converted.train() does it; after trainer.run(), call trainer.restore_best()"
        )


def _checkpoint(path: Any) -> Any:
    """Return what to resume from; a folder of Transformers is refused."""
    if isinstance(path, str) and path.lower() in ("true", "1"):
        path = True
    if not isinstance(path, bool) and (Path(path) / "trainer_state.json").exists():
        raise ConfigError(
            f"resume_from_checkpoint={str(path)!r} is a checkpoint of Transformers, which has another state; load its "
            "weights, model = AutoModel....from_pretrained(path), and start a new run"
        )
    return path


def _convert_best(args: Any, to: ConvertedArguments) -> None:
    """Carry metric_for_best_model and greater_is_better."""
    if args.metric_for_best_model is not None:
        to.options["monitor"] = args.metric_for_best_model.removeprefix("eval_")
    if args.greater_is_better is not None:
        to.options["monitor_mode"] = "max" if args.greater_is_better else "min"


# ----------------------------------------------------------------------------------------------------------- the step


def _convert_step(args: Any, to: ConvertedArguments) -> None:
    """Carry the gradient clip, accumulation, seeds, and precision."""
    to.options["gradient_clip"] = float(args.max_grad_norm or math.inf)  # Its norm is logged all the same.
    to.options["seed"] = args.seed
    to.is_deterministic = args.full_determinism
    if args.gradient_accumulation_steps > 1:
        to.add_on("GradientAccumulationAddon", gradient_accumulation_steps=args.gradient_accumulation_steps)
    precision = getattr(args, "mixed_precision", "no")  # That of the arguments, or of accelerate's environment.
    if precision in ("bf16", "fp16"):
        to.add_on("AMPAddon", precision=precision)


def _convert_compile(args: Any, to: ConvertedArguments) -> None:
    """Carry torch_compile, its backend and its mode."""
    if args.torch_compile:
        backend = args.torch_compile_backend or "inductor"
        to.add_on("CompileAddon", compile_backend=backend, compile_mode=args.torch_compile_mode)


def _convert_optimizer(args: Any, to: ConvertedArguments) -> None:
    """Carry the optimizer and the schedule."""
    to.options["optimizer"], to.options["scheduler"] = optimizers.factories(args)
    to.options["scheduler_step_on_batch"] = True  # Of a scheduler that is given in place of this one too.


def _convert_model(args: Any, to: ConvertedArguments) -> None:
    """Carry what changes the model: its cache, checkpointing of activations, and noise on embeddings."""
    to.model_calls.append(partial(_set_cache, value=getattr(args, "use_cache", False)))
    if getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing:
        options = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
        to.model_calls.append(partial(_checkpoint_activations, arguments=dict(options)))
    if args.neftune_noise_alpha is not None:
        to.model_calls.append(partial(_add_noise, alpha=args.neftune_noise_alpha))


def _set_cache(model: Any, value: bool) -> None:
    """Set ``use_cache`` in the configuration of a model."""
    if getattr(model, "config", None) is not None:
        model.config.use_cache = value


def _checkpoint_activations(model: Any, arguments: dict[str, Any]) -> None:
    """Let a model compute activations again in the backward pass."""
    own_options = {name: arguments[name] for name in ("every_n_layers", "offload") if name in arguments}
    options = {name: value for name, value in arguments.items() if name not in own_options} or None
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **own_options)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, **own_options)
    else:
        raise ConfigError(
            f"activation_checkpointing=True needs a model of Transformers, and {type(model).__name__} has no "
            "activation_checkpointing_enable; call torch.utils.checkpoint.checkpoint in its forward"
        )


def _add_noise(model: Any, alpha: float) -> None:
    """Add noise to the embeddings of a model in training (NEFTune)."""
    from transformers.integrations.neftune import activate_neftune

    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(
            f"neftune_noise_alpha={alpha} needs a model of Transformers, and {type(model).__name__} has no "
            "get_input_embeddings"
        )
    activate_neftune(model, alpha)


def _report_old(args: Any, to: ConvertedArguments) -> None:
    """Report the entries of older versions that nothing here takes."""
    if "tokenizer" in to.entries:
        if "processing_class" in arguments.huggingface_options():
            to.huggingface["processing_class"] = to.entries["tokenizer"]
        else:
            to.report["tokenizer"] = "tokenizer: save it yourself, tokenizer.save_pretrained(folder)"


# The functions with the arguments that each of them carries.
_CONVERTERS: dict[Callable[[Any, ConvertedArguments], None], tuple[str, ...]] = {
    convert_length: ("num_train_epochs", "max_steps"),
    convert_evaluation: ("eval_strategy", "eval_steps", "eval_delay"),
    _convert_eval_start: ("eval_on_start", "do_eval"),
    _convert_logging: ("logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm"),
    _convert_saving: (
        "output_dir",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "resume_from_checkpoint",
        "ignore_data_skip",
        "load_best_model_at_end",
    ),
    _convert_best: ("metric_for_best_model", "greater_is_better"),
    _convert_step: ("max_grad_norm", "seed", "full_determinism", "gradient_accumulation_steps", "bf16", "fp16"),
    _convert_compile: ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    _convert_optimizer: (
        "optim",
        "optim_args",
        "optim_target_modules",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
    ),
    _convert_model: (
        "use_cache",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "neftune_noise_alpha",
    ),
    arguments.convert_device: (
        "use_cpu",
        "fsdp",
        "fsdp_config",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
    ),
    arguments.convert_accelerator: ("accelerator_config",),
    arguments.convert_loaders: (),
    arguments.convert_loggers: ("report_to", "run_name", "project", "trackio_space_id"),
    _report_old: (),
}
CONVERTED = {name: convert for convert, names in _CONVERTERS.items() for name in names}
"""The arguments that a function here carries."""
