"""Read the trainer's own part of a state, and load it entirely or not at all."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.common import optim, optimizer_modes
from zae.common.optimizer_settings import REMEDY
from zae.common.optimizer_state import check_rates
from zae.data.position import LoaderPosition
from zae.errors import CheckpointMismatch, ZaeError, printable
from zae.loop import addon_state
from zae.loop.history import History
from zae.loop.progress import ProgressChecker
from zae.schedulers import is_plateau
from zae.storage.model_weights import (
    Weights,
    apply_weights,
    check_types,
    fit_name,
    fit_weights,
    named_parameters,
)
from zae.storage.weights_file import save_weights

if TYPE_CHECKING:
    from zae.loop.optimization import Optimization
    from zae.trainer import Trainer

__all__ = [
    "load_core",
    "load_evaluation_weights",
    "read_core",
    "save_evaluation_weights",
]

_log = logging.getLogger("zae")
_KEYS = ("model", "optimizer", "outside", "scheduler", "progress", "records", "position")
_OPTIONAL = ("order", "validation", "training_weights", "generators")
_SHOWN = 10
_LOAD = torch.optim.Optimizer.load_state_dict


def read_core(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a trainer without its add-ons."""
    optimization = _optimization_of(trainer)
    optimization.note_settings()
    trainer.nonfinite.read_pending(trainer)
    # All that is not whole on each rank is brought together by these two seams, in one order on every rank.
    is_part = addon_state.is_loading(trainer, addon_state.ENTRIES)
    read_model, read_optimizer = (dict, _nothing) if is_part else (trainer.model_state, trainer.optimizer_state)
    weights, training_weights = optimizer_modes.both_weights({} if is_part else trainer.optimizers, read_model)
    pending = trainer.progress_checker.pending_validation
    return {
        "model": weights,
        **optimization.state_dict(read_optimizer),
        # Parameters that an optimizer trains outside of the model, a learnt loss weight for instance.
        "outside": {name: optim.outside_of(each, trainer.unwrap()) for name, each in trainer.optimizers.items()},
        "order": {name: _order_of(trainer, each) for name, each in trainer.optimizers.items()},
        "progress": trainer.progress_checker.state_dict(),
        "records": {
            # A pending validation may read a training metric of the epoch that was just closed.
            **trainer.history.state_dict(bool(trainer.progress_checker.epoch_batch or pending)),
            "settings": optimization.settings.state_dict(),
            "grad_norm": trainer.grad_norm,
        },
        "position": trainer.loader_position.state_dict(),
        **({"validation": pending} if pending else {}),
        # Some optimizers train with other weights than they evaluate with.
        **({"training_weights": training_weights} if training_weights else {}),
    }


def _nothing(name: str) -> dict[str, Any]:
    """Stand in for ``optimizer_state`` where only the entries of add-ons are read: nothing is gathered."""
    return {}


def load_core(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> None:
    """Check the whole state, and only then load it; on an error nothing is loaded."""
    if addon_state.is_loading(trainer, addon_state.ENTRIES):
        return
    _check_keys(state, strict)
    optimization = _build_factories(trainer)
    optimizers, schedulers = optimization.optimizers, optimization.schedulers
    optimization.note_settings()
    weights = _fitting_weights(trainer, state, strict)
    with _explaining_misfits():
        _check_names(state, optimizer=optimizers, scheduler=schedulers)
        optimization.settings.check_classes(state)
        states = {name: _match_order(trainer, name, each, state, strict) for name, each in optimizers.items()}
        outside = [(p, value) for name, o in optimizers.items() for p, value in _match_outside(trainer, name, o, state)]
        progress, history = ProgressChecker(), trainer.history.loaded(state["records"])
        grad_norm = state["records"]["grad_norm"]
        progress.load_state_dict(state["progress"])
        progress.pending_validation = _pending_validation(state)

    with _restoring_on_error(trainer, optimizers, schedulers):
        with _explaining_misfits():
            _load_position(trainer, state["position"], progress)
            for name in optimizers:
                # It keeps the tensors: two trainers would share those of a state in memory.
                trainer.load_optimizer_state(name, _kept_or_copied(trainer, states[name]))
            for name, scheduler in schedulers.items():
                scheduler.load_state_dict(_scheduler_state(trainer, name, scheduler, state))
            trainer.progress_checker, trainer.history, trainer.grad_norm = progress, history, grad_norm
            optimization.settings.load(state["records"].get("settings"))
            if not history.has_criterion_of(state["records"]):
                _recompute_best(history, state["records"]["monitor"])
        trainer.load_model_state(weights, strict)  # Last: most models are not copied, and cannot be restored.
    with torch.no_grad():
        for parameter, value in outside:
            parameter.copy_(value)
    for optimizer in optimizers.values():
        optim.match_layout(optimizer)
        if progress.step:  # Else a scheduler that is stepped before it warns.
            optimizer._opt_called = True  # type: ignore[attr-defined]
    if state.get("training_weights"):
        optimizer_modes.take_for_training(trainer.optimizers)


def _kept_or_copied(trainer: Trainer, state: Any) -> Any:
    """Return a state that was read from a file, which the trainer may keep, or a copy of any other."""
    return state if addon_state.is_loading(trainer, addon_state.FROM_FILE) else copy.deepcopy(state)


def _check_keys(state: Mapping[str, Any], strict: bool) -> None:
    """Refuse a state that lacks an entry, or has one that no add-on of this trainer loads."""
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
    """Return the weights that training continues from, under the keys of the model."""
    training_weights = state.get("training_weights", {})
    if not isinstance(training_weights, Mapping):
        raise CheckpointMismatch(f"the training_weights of the state are {training_weights!r:.80}, and must be a dict")
    weights = fit_weights(trainer.unwrap(), {**state["model"], **training_weights}, strict)
    check_types(trainer.unwrap(), weights)
    return weights


def _load_position(trainer: Trainer, position: Mapping[str, Any], progress: ProgressChecker) -> None:
    """Load the position in the data; ``seed=`` overrides the random streams of a state before any run."""
    if trainer.seed is None or progress.batch or progress.run_starts:
        trainer.loader_position.load_state_dict(position)
        return
    unused = LoaderPosition(trainer.fast_data)
    unused.load_state_dict(position)  # Only to check it.
    # A trainer that has trained is seeded again; one that is set up for the first time was just seeded.
    trainer.is_seeded = trainer.is_seeded and not trainer.progress_checker.batch
    trainer.loader_position = LoaderPosition(trainer.fast_data)


def _scheduler_state(trainer: Trainer, name: str, scheduler: Any, state: Mapping[str, Any]) -> Any:
    """Return a scheduler's state; one that waits for a metric starts again if the monitor has changed."""
    own = copy.deepcopy(state["scheduler"][name])
    check_rates("scheduler", own, scheduler.state_dict())
    if is_plateau(scheduler) and not trainer.history.has_criterion_of(state["records"]):
        return {**own, "mode": scheduler.mode, "best": scheduler.mode_worse, "num_bad_epochs": 0}
    return own


def _recompute_best(history: History, saved: Any) -> None:
    """Determine the best epoch by the present monitor, with a warning."""
    history.recompute_best()
    said = "the state was saved with monitor=%s, and here it is %s: the best epoch so far is determined again by it"
    _log.warning(said, printable(str(saved)), history.criterion)


@contextlib.contextmanager
def _restoring_on_error(
    trainer: Trainer, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]
) -> Iterator[None]:
    """On an error, restore the attributes of all of them: loading replaces their tensors and does not change them."""
    core = [trainer, trainer.loader_position, trainer.optimization, trainer.optimization.settings]
    held = [*core, *optimizers.values(), *schedulers.values()]
    attributes = [(each, dict(vars(each))) for each in held]
    # Others may have objects inside, as a chain of schedulers does.
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
    """Refuse a state with other names of optimizers or schedulers."""
    for what, own in present.items():
        if set(state[what]) != set(own):
            raise CheckpointMismatch(
                f"the state is of the {what}s {sorted(state[what])}, and this trainer has {sorted(own)}; build the "
                f"trainer as it was, load only the weights: apply_weights(path), or {REMEDY}"
            )


@contextlib.contextmanager
def _explaining_misfits() -> Iterator[None]:
    """Raise CheckpointMismatch for what a state that zae has not saved leads to."""
    try:
        yield
    except (ZaeError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointMismatch(
            f"the state is not one that zae has saved ({type(error).__name__}: {str(error)[:200]!r}); nothing was "
            "loaded. Give what state_dict() returned, or another checkpoint"
        ) from error


def _order_of(trainer: Trainer, optimizer: Any) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group; its own state has only their numbers."""
    names = {id(parameter): name for name, parameter in named_parameters(trainer.unwrap()).items()}
    outside = itertools.count()
    groups = [group["params"] for group in optimizer.param_groups]
    return [[names.get(id(each)) or f"outside {next(outside)}" for each in group] for group in groups]


def _match_order(trainer: Trainer, name: str, optimizer: Any, state: Mapping[str, Any], strict: bool) -> Any:
    """Return an optimizer's state in the present order of its parameters: those of a set have another each time."""
    own, saved, present = state["optimizer"][name], state.get("order", {}).get(name), _order_of(trainer, optimizer)
    optim.check_groups(name, optimizer, own)
    for there, here in zip(own["param_groups"], optimizer.param_groups):
        check_rates("optimizer", there, here)
    if saved is None:  # An older zae did not save it.
        return own
    known = dict.fromkeys([*named_parameters(trainer.unwrap()), *itertools.chain(*present)])
    saved = [[fit_name(key, known) for key in keys] for keys in saved]  # An older zae saved the names of wrappers.
    if saved == present:
        return own
    if not known.keys() >= set(itertools.chain(*saved)):
        return own  # The names have changed: only the numbers are left.
    places = {
        key: place for keys, group in zip(saved, own["param_groups"]) for key, place in zip(keys, group["params"])
    }
    differ = sorted(places.keys() ^ set(itertools.chain(*present)))
    if not differ and (len(own["state"]) != 1 or len(places) == 1):
        groups = zip(own["param_groups"], present)
        made = [{**group, "params": [places[key] for key in keys]} for group, keys in groups]
        # torch's own list of names would be in the old order.
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


def _match_outside(
    trainer: Trainer, name: str, optimizer: Any, state: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
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
    """Call the factories of optimizers and schedulers, whose state is loaded; a later setup uses the results."""
    optimization = _optimization_of(trainer)
    if not trainer.current_run.is_ready and optimization.has_factory:
        optimization.build(trainer.build_optimizer, trainer.build_scheduler)
    return optimization


def _incomplete(missing: list[str], state: Mapping[str, Any]) -> CheckpointMismatch:
    is_model = all(isinstance(value, Tensor) for value in state.values())
    return CheckpointMismatch(
        f"the state has no {', '.join(missing)}; its entries are {', '.join(map(str, state)) or 'none'}; give what "
        "state_dict() returned" + (", or load weights alone with apply_weights(...)" if is_model else "")
    )


def save_evaluation_weights(trainer: Trainer, path: Path) -> Path:
    """Save the weights that evaluation uses."""
    optimizers = _optimization_of(trainer).optimizers
    weights, _ = optimizer_modes.both_weights(optimizers, trainer.model_state)
    return save_weights(path, weights, {"step": str(trainer.progress_checker.step)})


def load_evaluation_weights(trainer: Trainer, weights: Weights, strict: bool) -> tuple[list[str], list[str]]:
    """Load weights as `apply_weights` does; an optimizer with modes uses them for evaluation."""
    keys = apply_weights(trainer.unwrap(), weights, strict, trainer.load_model_state)
    optimizer_modes.take_for_evaluation(_optimization_of(trainer).optimizers)
    return keys


def _optimization_of(trainer: Trainer) -> Optimization:
    """Return the optimizers and schedulers of a trainer; before it is set up, those that it was given."""
    if not trainer.current_run.is_ready:
        trainer.optimization.hold()
    return trainer.optimization
