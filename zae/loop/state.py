"""The trainer's own part of a state: read in one piece, loaded wholly or not at all."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from zae.common import optim, optimizer_modes
from zae.common.optimizer_settings import REMEDY
from zae.common.optimizer_state import check_rates, load_optimizer_state
from zae.common.torch_private import has_own_loading, has_own_shapes
from zae.data.position import LoaderPosition
from zae.errors import CheckpointMismatch, ConfigError, ZaeError, printable
from zae.loop import addon_state
from zae.loop.history import History
from zae.loop.progress import ProgressChecker
from zae.schedulers import is_plateau
from zae.storage import weights_file
from zae.storage.checkpoint import load_checkpoint
from zae.storage.plain_names import fit_name, fit_state, named_parameters

if TYPE_CHECKING:
    from zae.loop.optimization import Optimization
    from zae.trainer import Trainer

__all__ = [
    "Weights",
    "load_core",
    "load_evaluation_weights",
    "load_weights",
    "load_weights_of",
    "read_core",
    "save_evaluation_weights",
]

_log = logging.getLogger("zae")
_KEYS = ("model", "optimizer", "outside", "scheduler", "progress", "records", "position")
_OPTIONAL = ("order", "validation", "training_weights", "generators")
Weights: TypeAlias = "str | Path | Mapping[str, Tensor]"
_SHOWN = 10
_LOAD = torch.optim.Optimizer.load_state_dict


def read_core(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a trainer without its add-ons."""
    optimization = _optimization_of(trainer)
    optimization.note_settings()
    trainer.nonfinite.read_pending(trainer)
    weights, training_weights = optimizer_modes.both_weights(trainer.optimizers, trainer.model_state)
    pending = trainer.progress_checker.pending_validation
    return {
        "model": weights,
        **optimization.state_dict(),
        # Parameters that an optimizer trains and the model does not hold, a learnt loss weight for instance.
        "outside": {name: optim.outside_of(each, trainer.unwrap()) for name, each in trainer.optimizers.items()},
        "order": {name: _order_of(trainer, each) for name, each in trainer.optimizers.items()},
        "progress": trainer.progress_checker.state_dict(),
        "records": {
            # A pending validation may read a metric of what was trained in the epoch that has just been closed.
            **trainer.history.state_dict(bool(trainer.progress_checker.epoch_batch or pending)),
            "settings": optimization.settings.state_dict(),
            "grad_norm": trainer.grad_norm,
        },
        "position": trainer.loader_position.state_dict(),
        **({"validation": pending} if pending else {}),
        # Of an optimizer that trains with other weights than it evaluates with.
        **({"training_weights": training_weights} if training_weights else {}),
    }


def load_core(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> None:
    """Check the whole state first, and only then take it over."""
    if addon_state.is_loading(trainer, addon_state.ENTRIES):
        return
    _check_keys(state, strict)
    optimization = _build_factories(trainer)
    optimizers, schedulers = optimization.optimizers, optimization.schedulers
    optimization.note_settings()
    weights = _fitting_weights(trainer, state, strict)
    with _in_words("nothing was loaded"):
        _check_names(state, optimizer=optimizers, scheduler=schedulers)
        optimization.settings.check_classes(state)
        states = {name: _in_order(trainer, name, each, state, strict) for name, each in optimizers.items()}
        outside = [(p, value) for name, o in optimizers.items() for p, value in _outside(trainer, name, o, state)]
        progress, history = ProgressChecker(), trainer.history.loaded(state["records"])
        grad_norm = state["records"]["grad_norm"]
        progress.load_state_dict(state["progress"])
        progress.pending_validation = _pending_validation(state)

    with _taken_back(trainer, optimizers, schedulers):
        with _in_words("nothing was loaded"):
            _load_position(trainer, state["position"], progress)
            for name, optimizer in optimizers.items():
                # It keeps the tensors: without a copy of a state in memory, two trainers would share them.
                load_optimizer_state(optimizer, _kept_or_copied(trainer, states[name]))
            for name, scheduler in schedulers.items():
                scheduler.load_state_dict(_scheduler_state(trainer, name, scheduler, state))
            trainer.progress_checker, trainer.history, trainer.grad_norm = progress, history, grad_norm
            optimization.settings.load(state["records"].get("settings"))
            if not history.has_criterion_of(state["records"]):
                _recompute_best(history, state["records"]["monitor"])
        _load(trainer.unwrap(), weights, strict)  # Last, because most models cannot be restored.
    with torch.no_grad():
        for parameter, value in outside:
            parameter.copy_(value)
    for optimizer in optimizers.values():
        optim.match_layout(optimizer)
        if progress.step:  # Else a schedule that is stepped before it warns.
            optimizer._opt_called = True  # type: ignore[attr-defined]
    if state.get("training_weights"):
        optimizer_modes.take_for_training(trainer.optimizers)


def _kept_or_copied(trainer: Trainer, state: Any) -> Any:
    """Return a state that the trainer may keep, because it was read from a file, or else a copy."""
    return state if addon_state.is_loading(trainer, addon_state.FROM_FILE) else copy.deepcopy(state)


def _check_keys(state: Mapping[str, Any], strict: bool) -> None:
    """Refuse a state that lacks a part, or has one that nobody takes."""
    missing = [key for key in _KEYS if key not in state]
    leftover = [str(key) for key in state if key not in (*_KEYS, *_OPTIONAL)]
    if missing:
        raise _incomplete(missing, state)
    if leftover:
        names = ", ".join(leftover)
        text = f"this trainer has no add-on for the state of {names}; add it with .add_on({names})"
        if strict:
            raise CheckpointMismatch(f"{text}, or load with strict=False to ignore it")
        _log.warning("%s", printable(text))


def _fitting_weights(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> dict[str, Tensor]:
    """Return the weights that training goes on from, under the keys of the model."""
    training_weights = state.get("training_weights", {})
    if not isinstance(training_weights, Mapping):
        raise CheckpointMismatch(f"the training_weights of the state are {training_weights!r:.80}, and must be a dict")
    weights = _fit(trainer.unwrap(), {**state["model"], **training_weights}, strict)
    _check_types(trainer.unwrap(), weights)
    return weights


def _load_position(trainer: Trainer, position: Mapping[str, Any], progress: ProgressChecker) -> None:
    """Load where the data stands; ``seed=`` overrides the random streams of a state that is not of any run."""
    if trainer.seed is None or progress.batch or progress.run_starts:
        trainer.loader_position.load_state_dict(position)
        return
    unused = LoaderPosition(trainer.fast_data)
    unused.load_state_dict(position)  # Only to check it.
    # What has trained is seeded again; what is being set up for the first time has been seeded just now.
    trainer.is_seeded = trainer.is_seeded and not trainer.progress_checker.batch
    trainer.loader_position = LoaderPosition(trainer.fast_data)


def _scheduler_state(trainer: Trainer, name: str, scheduler: Any, state: Mapping[str, Any]) -> Any:
    """Return a scheduler's state; one that monitors a metric is reset if the metric has changed."""
    own = copy.deepcopy(state["scheduler"][name])
    check_rates("scheduler", own, scheduler.state_dict())
    if is_plateau(scheduler) and not trainer.history.has_criterion_of(state["records"]):
        return {**own, "mode": scheduler.mode, "best": scheduler.mode_worse, "num_bad_epochs": 0}
    return own


def _recompute_best(history: History, saved: Any) -> None:
    """Find the best so far by the present monitor, and say so."""
    history.recompute_best()
    said = "the state was saved with monitor=%s, and here it is %s: the best epoch so far is determined again by it"
    _log.warning(said, printable(str(saved)), history.criterion)


@contextlib.contextmanager
def _taken_back(trainer: Trainer, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> Iterator[None]:
    """On an error, leave all of them as they were: what is loaded is put in place of their tensors, not into them."""
    core = [trainer, trainer.loader_position, trainer.optimization, trainer.optimization.settings]
    held = [*core, *optimizers.values(), *schedulers.values()]
    attributes = [(each, dict(vars(each))) for each in held]
    # Others may keep something in objects of their own, as a chain of schedulers does.
    states = [(each, each.state_dict()) for each in held[len(core) :] if type(each).load_state_dict is not _LOAD]
    try:
        yield
    except BaseException:
        for each, before in attributes:
            for name in vars(each).keys() - before.keys():
                delattr(each, name)
            vars(each).update(before)
        for each, state in states:
            each.load_state_dict(state)
        raise


def _check_names(state: Mapping[str, Any], **present: Mapping[str, Any]) -> None:
    """Refuse a state of other optimizers or schedulers."""
    for what, own in present.items():
        if set(state[what]) != set(own):
            raise CheckpointMismatch(
                f"the state is of the {what}s {sorted(state[what])}, and this trainer has {sorted(own)}; build the "
                f"trainer as it was, load only the weights: apply_weights(path), or {REMEDY}"
            )


@contextlib.contextmanager
def _in_words(so_far: str) -> Iterator[None]:
    """Say of a state that is not made like one of zae's what it has led to."""
    try:
        yield
    except (ZaeError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointMismatch(
            f"the state is not one that zae has saved ({type(error).__name__}: {str(error)[:200]!r}); {so_far}. Give "
            "what state_dict() returned, or another checkpoint"
        ) from error


def _order_of(trainer: Trainer, optimizer: Any) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group: its own state knows only their places."""
    names = {id(parameter): name for name, parameter in named_parameters(trainer.unwrap()).items()}
    outside = itertools.count()
    groups = [group["params"] for group in optimizer.param_groups]
    return [[names.get(id(each)) or f"outside {next(outside)}" for each in group] for group in groups]


def _in_order(trainer: Trainer, name: str, optimizer: Any, state: Mapping[str, Any], strict: bool) -> Any:
    """Return an optimizer's state with the parameters in the order of this time, as those of a set have another."""
    own, saved, present = state["optimizer"][name], state.get("order", {}).get(name), _order_of(trainer, optimizer)
    optim.check_groups(name, optimizer, own)
    for there, here in zip(own["param_groups"], optimizer.param_groups):
        check_rates("optimizer", there, here)
    if saved is None:  # An older zae has not saved it.
        return own
    known = dict.fromkeys([*named_parameters(trainer.unwrap()), *itertools.chain(*present)])
    saved = [[fit_name(key, known) for key in keys] for keys in saved]  # An older zae saved the names of wrappers.
    if saved == present:
        return own
    if not known.keys() >= set(itertools.chain(*saved)):
        return own  # The names are others now: their places are all there is.
    places = {
        key: place for keys, group in zip(saved, own["param_groups"]) for key, place in zip(keys, group["params"])
    }
    differ = sorted(places.keys() ^ set(itertools.chain(*present)))
    if not differ and (len(own["state"]) != 1 or len(places) == 1):
        groups = zip(own["param_groups"], present)
        made = [{**group, "params": [places[key] for key in keys]} for group, keys in groups]
        # Names that torch itself keeps are of the order of this time too.
        return {**own, "param_groups": [{k: v for k, v in group.items() if k != "param_names"} for group in made]}
    if not strict:
        return own
    raise CheckpointMismatch(
        f"optimizer {name} ({type(optimizer).__name__}) was saved "
        + (
            f"with other parameters ({', '.join(differ[:_SHOWN])})"
            if differ
            else "with its parameters in another order"
        )
        + "; build it as it was, or load only the weights: apply_weights(path)"
    )


def _pending_validation(state: Mapping[str, Any]) -> str:
    """Return the moment whose validation is pending; only such a state has the key, which an older zae refuses."""
    due = state.get("validation", "")
    if due not in ("", "step", "epoch"):
        raise CheckpointMismatch(f"the state says of its validation {due!r:.80}, which is not 'step' or 'epoch'")
    return str(due)


def _outside(trainer: Trainer, name: str, optimizer: Any, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pair an optimizer's parameters outside of the model with their saved values."""
    present, saved = optim.outside_of(optimizer, trainer.unwrap()), state["outside"].get(name, [])
    shapes = [[tuple(p.shape) for p in each] for each in (present, saved)]
    if shapes[0] != shapes[1]:
        raise CheckpointMismatch(
            f"optimizer {name} trains parameters outside of the model of shapes {shapes[0]}, and the state has "
            f"{shapes[1]}; build the trainer as it was"
        )
    return list(zip(present, saved, strict=True))


def _build_factories(trainer: Trainer) -> Optimization:
    """Make what is still a factory: its state is to be loaded, and a later setup takes what is made already."""
    if not trainer.current_run.is_ready and _has_factory(trainer.optimizer):
        trainer.optimizer = trainer.build_optimizer()
    if not trainer.current_run.is_ready and _has_factory(trainer.scheduler):
        trainer.optimization.hold(trainer.optimizer, None)
        trainer.scheduler = trainer.build_scheduler()
    return _optimization_of(trainer)


def _incomplete(missing: list[str], state: Mapping[str, Any]) -> CheckpointMismatch:
    is_model = all(isinstance(value, Tensor) for value in state.values())
    return CheckpointMismatch(
        f"the state has no {', '.join(missing)}; its entries are {', '.join(map(str, state)) or 'none'}; give what "
        "state_dict() returned" + (", or load weights alone with apply_weights(...)" if is_model else "")
    )


def load_weights(module: nn.Module, weights: Weights, strict: bool) -> tuple[list[str], list[str]]:
    """Load weights into a module, or raise and leave it unchanged; return the keys that were missing and unexpected."""
    if not isinstance(weights, (str, os.PathLike, Mapping)):
        raise ConfigError(
            f"weights is a {type(weights).__name__}; give the path of a file, or a state dict: model.state_dict()"
        )
    found = weights if isinstance(weights, Mapping) else weights_file.load_weights(Path(weights))
    keys = _load(module, _fit(module, found, strict), strict)
    return list(keys.missing_keys), list(keys.unexpected_keys)


def save_evaluation_weights(trainer: Trainer, path: Path) -> Path:
    """Save the weights that evaluation uses, alone."""
    optimizers = _optimization_of(trainer).optimizers
    weights, _ = optimizer_modes.both_weights(optimizers, trainer.model_state)
    return weights_file.save_weights(path, weights, {"step": str(trainer.progress_checker.step)})


def load_evaluation_weights(trainer: Trainer, weights: Weights, strict: bool) -> tuple[list[str], list[str]]:
    """Load weights as `load_weights` does; an optimizer with modes takes them for those of evaluation."""
    keys = load_weights(trainer.unwrap(), weights, strict)
    optimizer_modes.take_for_evaluation(_optimization_of(trainer).optimizers)
    return keys


def _load(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> Any:
    """Load weights that fit; where a module's own code takes part and fails, put back what was there."""
    own = module.state_dict() if any(map(has_own_loading, module.modules())) else {}
    before = {key: copy.deepcopy(value) for key, value in own.items() if not nn.parameter.is_lazy(value)}
    try:
        return module.load_state_dict(weights, strict=strict)
    except BaseException:
        if before:
            with contextlib.suppress(Exception):  # It may fail again.
                module.load_state_dict(before, strict=False)
        raise


def load_weights_of(trainer: Trainer, path: Path) -> None:
    """Load of a checkpoint what evaluation needs: the weights, and an average of them where there is one.

    Parameters
    ----------
    trainer : Trainer
        Whose model it is.
    path : Path
        The checkpoint.
    """
    _, model, state = load_checkpoint(path)
    trainer.load_evaluation_state({"model": model, **state})


def _fit(module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> dict[str, Tensor]:
    """Return weights under the keys of a module, without what wrappers put into them; refuse those of another model."""
    own = module.state_dict()
    made, weights = _made(own), fit_state(module, weights)
    missing = [key for key in own if key not in weights]
    unexpected = [key for key in weights if key not in own]
    shapes = [
        f"{key} is {_shape_of(value)} and must be {tuple(made[key].shape)}"
        for key, value in weights.items()
        if key in made and _shape_of(value) != tuple(made[key].shape)
        if not _takes(module, key.rpartition(".")[0], weights)
    ]
    # A shape is refused with strict=False too: torch would raise in the middle of loading.
    wrong = {"shapes differ": shapes} | ({"missing": missing, "unexpected": unexpected} if strict else {})
    parts = [
        f"{len(v)} {k} ({', '.join(v[:_SHOWN])}{', ...' if len(v) > _SHOWN else ''})" for k, v in wrong.items() if v
    ]
    if parts:
        raise CheckpointMismatch(
            f"the weights do not fit {type(module).__name__}: {'; '.join(parts)}; nothing was loaded. "
            "Build the model as it was saved" + ("" if shapes else ", or load what fits with strict=False")
        )
    if not strict and (missing or unexpected):
        _log.warning("weights missing: %s; unexpected: %s", missing[:_SHOWN], unexpected[:_SHOWN])
    return weights


def _shape_of(value: Any) -> Any:
    """The shape of a tensor; of what is none, which torch would refuse in the middle of loading, its type."""
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _takes(module: nn.Module, path: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a module overrides loading and accepts weights of other shapes, as an observer does; a copy tries it."""
    prefix = f"{path}." if path else ""
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    try:
        owner = module.get_submodule(path)
        if not has_own_shapes(owner):
            return False
        copy.deepcopy(owner).load_state_dict(own, strict=False)
    except (AttributeError, RuntimeError):
        return False
    return True


def _made(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state; those of a lazy module are made by its first batch, or by what is loaded into it."""
    return {key: each for key, each in state.items() if isinstance(each, Tensor) and not nn.parameter.is_lazy(each)}


def _check_types(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Refuse to round the weights of a run, or to go on from them in another type, without a word."""
    own = _made(module.state_dict())
    wrong = [
        f"{key} was {value.dtype} and is {own[key].dtype}"
        for key, value in weights.items()
        if key in own and own[key].dtype != value.dtype
    ]
    if wrong:
        raise CheckpointMismatch(
            f"{len(wrong)} weights of {type(module).__name__} have another type ({'; '.join(wrong[:_SHOWN])}); nothing "
            "was loaded. Build the model as it was saved, or take the weights alone: apply_weights(path)"
        )


def _has_factory(given: Any) -> bool:
    return any(map(optim.is_factory, optim.named(given).values()))


def _optimization_of(trainer: Trainer) -> Optimization:
    """Return the optimizers and schedulers of a trainer, those it was given last where it is not set up."""
    if not trainer.current_run.is_ready:
        trainer.optimization.hold(trainer.optimizer, trainer.scheduler)
    return trainer.optimization
