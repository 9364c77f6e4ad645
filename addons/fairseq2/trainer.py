"""Turn a call of ``fairseq2.recipes.trainer.Trainer`` into a trainer of zae."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from zae.addons.fairseq2.arguments import DEFAULTS, REPORTED, Arguments, describe, read_arguments
from zae.addons.fairseq2.gangs import GangSizes, read_gangs
from zae.addons.fairseq2.metric_bag import metrics_of
from zae.addons.fairseq2.reader import ReaderLoader, num_accumulate_of
from zae.addons.fairseq2.regime import RegimeAddon, any_of, every_of
from zae.addons.fairseq2.unit import task_of
from zae.compose.composition import load_installed
from zae.compose.converted_arguments import ConvertedArgumentsBase
from zae.compose.introspect import add_ons_of
from zae.distributed.mesh import DATA
from zae.errors import ConfigError
from zae.loop.cadence import Every

__all__ = ["ConvertedArguments", "from_arguments"]


def from_arguments(**arguments: Any) -> ConvertedArguments:
    """Return what trains as ``fairseq2.recipes.trainer.Trainer(**arguments)`` does.

    Parameters
    ----------
    **arguments : object
        Those of the constructor, of versions 0.2 to 0.4: ``unit``, ``data_reader`` and ``optimizer``, and
        ``max_num_steps`` or ``max_num_data_epochs``; the others as there. Objects are taken as they are: units,
        readers, gangs, the optimizer, the ``lr_scheduler``, the ``early_stopper`` and the ``profiler``. Of a
        ``checkpoint_manager`` the folder is taken; give a path where it does not tell it.

    Returns
    -------
    ConvertedArguments
        ``converted()`` trains. Its ``report`` names each argument that has no effect here, and why.

    Raises
    ------
    OptionError
        An argument is unknown, with the nearest name, or one that is needed is missing.
    ConfigError, TaskError
        A value, or a combination, that fairseq2 refuses, or that zae does not support.

    Examples
    --------
    >>> import torch
    >>> from zae.addons.fairseq2 import from_arguments
    >>> class Unit:
    ...     def __init__(self, model):
    ...         self.model = model
    ...     def __call__(self, batch):
    ...         return self.model(batch).square().sum(), len(batch)
    >>> class Reader:
    ...     num_accumulate, place = 2, 0
    ...     def __next__(self):
    ...         if self.place == 3:
    ...             raise StopIteration
    ...         self.place += 1
    ...         return [torch.ones(4, 2), torch.ones(1, 2)]
    ...     def reset(self):
    ...         self.place = 0
    ...     def state_dict(self):
    ...         return {"place": self.place}
    ...     def load_state_dict(self, state):
    ...         self.place = state["place"]
    >>> unit = Unit(torch.nn.Linear(2, 1))
    >>> converted = from_arguments(
    ...     unit=unit, data_reader=Reader(), optimizer=torch.optim.SGD(unit.model.parameters(), lr=0.1),
    ...     max_num_steps=100, max_num_data_epochs=2, gradient_check=True)
    >>> trainer = converted.trainer(device="cpu", log_bar=False)
    >>> converted.train(trainer)["step"]
    6
    >>> print(converted.report)
    gradient_check=True: ranks compare their weights whenever a state is saved
    """
    args = read_arguments(arguments)
    converted = ConvertedArguments(args, read_gangs(args.root_gang, args.dp_gang, args.tp_gang, args.gangs))
    for convert in (_convert_training, _convert_precision, _convert_validation, _convert_score):
        convert(args, converted)
    for convert in (_convert_checkpoints, _convert_records, _convert_debugging):
        convert(args, converted)
    for name, reason in REPORTED.items():
        if arguments.get(name) not in (None, False):
            converted.report_unused(name, reason)
    return converted


class ConvertedArguments(ConvertedArgumentsBase):
    """What `from_arguments` returns; called, it trains.

    Attributes
    ----------
    args : namespace
        The arguments, with the defaults of those that were left out.
    add_ons : list of type
        For ``task_of(unit).add_on(*add_ons)``.
    options : dict
        For the constructor, after the unit.
    run : dict
        For ``trainer.run(loader=..., valid_loader=..., **run)``.
    loader, valid_loader : ReaderLoader, dict of them, or None
        Of ``data_reader`` and ``valid_data_readers``; a dict has the display names of several units.
    gangs : GangSizes
        How the gangs divide the ranks.
    report : Report
        The arguments that have no effect, or less than in fairseq2.
    """

    def __init__(self, args: Arguments, gangs: GangSizes) -> None:
        super().__init__()
        self.args = args
        self.gangs = gangs
        self.loader = ReaderLoader(args.data_reader, num_accumulate=num_accumulate_of(args.data_reader))
        self.valid_loader: Any = None
        self._has_trained = False

    def trainer(self, task: Any = None, **more: Any) -> Any:
        """Return the trainer, with the engine that the gangs ask for.

        Parameters
        ----------
        task : type, optional
            A subclass of ``task_of(unit)``, with or without add-ons, for instance one that overrides
            ``should_validate``. Where it has no engine and ``dp_gang`` has several ranks, it gets MultiGPUAddon;
            write ``task_of(unit).add_on(FSDPAddon)`` for sharding.
        **more : object
            Further options; they replace those of the arguments. ``tensor_plan`` says which layers ``tp_gang``
            divides.

        Returns
        -------
        Trainer
            Ready for `train`.
        """
        task = task_of(self.args.unit) if task is None else task
        cls = task.add_on(*self.missing(task)) if self.missing(task) else task
        engines, options = self._engine(cls, more)
        cls = cls.add_on(*engines) if engines else cls
        return cls(self.args.unit, **{**self.options, **options, **more})

    def _engine(self, cls: Any, more: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the engines that a class lacks for the gangs, and their options."""
        if self.gangs.world == 1:
            return [], {}
        has = {name for add_on in add_ons_of(cls) for name in getattr(add_on, "mesh_dimensions", ())}
        names = []
        is_tensor = self.gangs.tensor > 1
        if is_tensor and "tensor_plan" not in more:
            raise ConfigError(
                f"tp_gang has {self.gangs.tensor} ranks, and which layers they divide is not known; write "
                "converted.trainer(tensor_plan={'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()})"
            )
        if self.gangs.data > 1 and not has & set(DATA):
            names.append("FSDPAddon" if is_tensor else "MultiGPUAddon")
        if is_tensor and "tensor" not in has:
            names.append("TensorParallelAddon")
        is_sharding = "shard" in has or "FSDPAddon" in names
        mesh = self.gangs.mesh(is_sharding)
        return [load_installed(name) for name in names], {} if mesh is None else {"mesh": mesh}

    def train(self, trainer: Any = None) -> Any:
        """Train and validate as the arguments say, with ``trainer`` or a new one; return its metrics.

        Parameters
        ----------
        trainer : Trainer, optional
            One that `trainer` has made; by default a new one.

        Returns
        -------
        MetricsDict
            What ``run`` returned.
        """
        trainer = self.trainer() if trainer is None else trainer
        return trainer.run(loader=self.loader, valid_loader=self.valid_loader, **self.run)

    def __call__(self) -> Any:
        """Make the trainer and run it, as a trainer of fairseq2 is called: once."""
        if self._has_trained:
            raise ConfigError(
                "this call of from_arguments has trained; to train on, call from_arguments again, or run one trainer "
                "several times: trainer = converted.trainer(), and trainer.run(1, converted.loader)"
            )
        self._has_trained = True
        return self.train()

    def report_unused(self, name: str, why: str) -> None:
        """Report an argument."""
        self.report[name] = f"{name}={describe(getattr(self.args, name))}: {why}"


def _add_regime(to: ConvertedArguments, **options: Any) -> None:
    """Add RegimeAddon, once, with these options."""
    to.add_ons += [RegimeAddon] * (RegimeAddon not in to.add_ons)
    to.options.update(options)


def _convert_training(args: Arguments, to: ConvertedArguments) -> None:
    """Carry the length, the optimizer, the schedule, the gradient clip, accumulation, the seed and the devices."""
    to.options.update(optimizer=args.optimizer, seed=args.seed)
    to.run.update(n_epoch=args.max_num_data_epochs, max_steps=args.max_num_steps)
    if args.lr_scheduler is not None:
        to.options.update(scheduler=args.lr_scheduler, scheduler_step_on_batch=True)
    # The norm is logged as grad_norm in any case, as there.
    to.options["gradient_clip"] = math.inf if args.max_gradient_norm is None else float(args.max_gradient_norm)
    if (count := num_accumulate_of(args.data_reader)) > 1:
        to.add_on("GradientAccumulationAddon", gradient_accumulation_steps=count)
    if to.gangs.device is not None:
        to.options["device"] = str(to.gangs.device)


def _convert_precision(args: Arguments, to: ConvertedArguments) -> None:
    """Carry dtype, amp and fp16_loss_scale."""
    precision = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(args.dtype)
    if args.amp and precision is None:
        to.report_unused("amp", f"dtype={args.dtype} computes as without it; write dtype=torch.bfloat16")
    elif args.amp:
        to.add_on("AMPAddon", precision=precision)
    if args.dtype is torch.float16:
        to.options["loss_scale"] = tuple(args.fp16_loss_scale)
        to.report_unused(
            "dtype", "a step that overflows counts as a step, and the smallest loss scale is kept, not an error"
        )
    elif args.fp16_loss_scale != DEFAULTS["fp16_loss_scale"]:
        to.report_unused("fp16_loss_scale", "it is for dtype=torch.float16 with amp=True")


def _cadences(args: Arguments, event: str) -> list[Every]:
    """Return the cadences of "validate", "checkpoint" or "publish_metrics", as they were given."""
    names = ("every_n_steps", "after_n_steps", "every_n_data_epochs", "after_n_data_epochs")
    return every_of(*(getattr(args, f"{event}_{name}") for name in names))


def _with_end(args: Arguments, cadences: list[Every]) -> Every:
    """Add the last step of a run, and the end of its last epoch, at which fairseq2 does everything."""
    ends = every_of(args.max_num_steps, 0, args.max_num_data_epochs, 0)
    return any_of(*dict.fromkeys([*cadences, *ends]))


def _convert_validation(args: Arguments, to: ConvertedArguments) -> None:
    """Carry the valid units, their readers, and when they are called."""
    set_names = [name for name in DEFAULTS if name.startswith("validate_every") and getattr(args, name) is not None]
    if not args.valid_units:
        for name in set_names:
            to.report_unused(name, "there are no valid_units")
        return
    names = _names_of(args.valid_units)
    loaders = dict(zip(names, map(ReaderLoader, args.valid_data_readers), strict=True))
    units = dict(zip(names, args.valid_units, strict=True))
    is_one = len(units) == 1
    to.options["valid_units"] = args.valid_units[0] if is_one else units
    to.valid_loader = next(iter(loaders.values())) if is_one else loaders
    every = _with_end(args, _cadences(args, "validate"))
    to.run["valid_every"] = every
    if {part.steps is None for part in getattr(every, "parts", ())} == {True, False}:
        _add_regime(to)  # A step may be the last of its epoch too.


def _names_of(units: list[Any]) -> list[str]:
    """Return the display names of units, or their numbers; two of one name get numbers."""
    names: list[str] = []
    for index, unit in enumerate(units):
        name = str(getattr(unit, "display_name", None) or getattr(unit, "name", None) or index)
        names.append(f"{name}-{index}" if name in names else name)
    return names


def _convert_score(args: Arguments, to: ConvertedArguments) -> None:
    """Carry the name of the score, its direction and the early stopper."""
    if args.score_metric_name is not None and not args.valid_units:
        name = "score_metric_descriptor" if args.score_metric_descriptor is not None else "score_metric_name"
        to.report_unused(name, "there are no valid_units")
    elif args.score_metric_name is not None:
        to.options.update(monitor=args.score_metric_name, monitor_mode="min" if args.lower_better else "max")
    elif args.lower_better:
        to.report_unused("lower_better", "it is for score_metric_name")
    if args.early_stopper is not None:
        to.add_on("EarlyStoppingAddon", early_stopper=args.early_stopper)


def _convert_checkpoints(args: Arguments, to: ConvertedArguments) -> None:
    """Carry the folder of the checkpoints, when they are saved, and which are kept."""
    if args.save_path is None:
        return
    last = args.keep_last_n_checkpoints
    best = args.keep_best_n_checkpoints or 0
    every = _with_end(args, _cadences(args, "checkpoint"))
    count = 1 if last is None and best else last
    to.add_on(
        "StateManagerAddon",
        save_path=args.save_path,
        save_every=every,
        keep_last=count,
        keep_best=best,
        resume="auto",
    )
    models = args.keep_last_n_models
    best_models = args.keep_best_n_models or 0
    if models is not None or best_models:
        to.options.update(save_weights_every=every, keep_weights=models or 1, keep_best_weights=best_models)
    if best and not args.valid_units:
        to.report_unused(
            "keep_best_n_checkpoints", "the best has the smallest loss of an epoch, as there are no valid_units"
        )
    elif best and args.score_metric_name is None:
        to.report_unused(
            "keep_best_n_checkpoints",
            "the best has the smallest loss that valid_units return; write score_metric_name='...' for another score",
        )


def _convert_records(args: Arguments, to: ConvertedArguments) -> None:
    """Carry when metrics are logged, and where."""
    cadences = _cadences(args, "publish_metrics")
    if cadences:
        to.options["log_every"] = _with_end(args, cadences)
        if args.publish_metrics_every_n_steps is not None and metrics_of(args.unit):
            _add_regime(to)
    if args.tb_dir is not None:
        to.add_on("TensorBoardLoggerAddon", log_dir=args.tb_dir)
    if args.metrics_dir is not None:
        to.add_on("JSONLLoggerAddon", jsonl_path=Path(args.metrics_dir) / "metrics.jsonl")


def _convert_debugging(args: Arguments, to: ConvertedArguments) -> None:
    """Carry anomaly_detection, the profiler, and the profile of fairseq2 0.2."""
    if args.anomaly_detection:
        to.add_on("AnomalyAddon")
    if args.profiler is not None:
        _add_regime(to, profiler=args.profiler)
    if args.profile is None:
        return
    if args.tb_dir is None:
        to.report_unused("profile", "traces are written to tb_dir, which is not given")
        return
    skipped, recorded = args.profile
    to.add_on("ProfilerAddon", profile_dir=args.tb_dir, profile_schedule=(max(0, skipped - 1), 1, recorded, 1))
