"""The trainer's own entries of a state: read together, and loaded entirely or not at all.

Each object reads and checks its own entries; here they are put together, in one order on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.device import as_current
from zae.errors import CheckpointMismatch, ZaeError, printable
from zae.loop import addon_state, older_states
from zae.loop.addon_state import PARTS_WITHOUT_ROWS, USER_STATE, is_in_mode
from zae.loop.progress import ProgressChecker
from zae.loop.user_state import check_user_state
from zae.model.module_state import check_module, load_broadcasts, load_flags, load_strides, read_module
from zae.model.weights import check_types, extra_names, fit_weights, named_parameters, own_names
from zae.optim import modes
from zae.optim.optimizer_state import device_of, load_optimizer_state, move_to_device, places_on_device

if TYPE_CHECKING:
    from zae.optim.optimization import Optimization
    from zae.trainer import Trainer

__all__ = ["explaining_misfits", "load_state", "load_weights", "read_state", "weights_of"]

_log = logging.getLogger("zae")
_REQUIRED_KEYS = ("model", "optimizer", "outside", "scheduler", "progress", "records", "position", "order", "module")
# Add-ons that are no longer there, of which older checkpoints have a state.
_REMOVED_ADD_ONS = ("AutoBatchAddon", "LightningAddon", "SilentFaultGuardAddon")
_OPTIONAL_KEYS = ("validation", "training_weights", "generators", "extra_state", "devices", USER_STATE)
_LOAD = torch.optim.Optimizer.load_state_dict


def _optimization_of(trainer: Trainer) -> Optimization:
    """Return the optimizers and schedulers; before the trainer is set up, those that it was given."""
    if not trainer.current_run.setup.is_done:
        trainer.optimization.index_by_name()
    return trainer.optimization


# -------------------------------------------------------------------------------------------------------- reading


def read_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a trainer without the entries of its add-ons."""
    optimization = _optimization_of(trainer)
    progress = trainer.progress_checker
    module = trainer.unwrap()
    parameters = named_parameters(module)
    trainer.run_record.note_script(trainer)
    trainer.nonfinite.read_pending(progress, trainer)
    weights, training_weights, optimizers = _read_tensors(trainer, optimization)
    # What get_extra_state returns beside tensors; files of weights contain tensors alone.
    extra = {key: weights.pop(key) for key in extra_names(weights)}
    # A pending validation may read a training metric of the epoch that was just closed.
    is_open = bool(progress.epoch_batch or progress.pending_validation)
    with as_current(trainer.device):  # Its random stream is the first of those that are saved.
        position = trainer.loader_position.state_dict()
    state = {
        "model": weights,
        "optimizer": optimizers,
        **optimization.state_dict(module, parameters),
        **progress.entries(),
        "records": {
            **trainer.history.state_dict(is_open, has_rows=not is_in_mode(trainer, PARTS_WITHOUT_ROWS)),
            **optimization.records(),
            "run": trainer.run_record.state_dict(),
        },
        "position": position,
        "module": read_module(module, parameters, trainer._in_training),
    }
    user_state = trainer.user_state.state_dict(trainer)
    if user_state or trainer.world_size > 1:  # Several ranks compare what they have.
        state[USER_STATE] = user_state
    devices = {name: places for name, saved in optimizers.items() if (places := places_on_device(saved))}
    # Some optimizers train with other weights than they evaluate with.
    rare = {"extra_state": extra, "devices": devices, "training_weights": training_weights}
    return state | {key: entry for key, entry in rare.items() if entry}


def _read_tensors(
    trainer: Trainer, optimization: Optimization
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Return the weights, the training weights that differ from them, and the states of the optimizers."""
    if is_in_mode(trainer, addon_state.ENTRIES):  # Then one rank alone reads, and needs the rest.
        return {}, {}, {}
    weights, training_weights = modes.both_weights(optimization.optimizers, trainer.model_state)
    optimizers = {}
    for name, optimizer in optimization.optimizers.items():
        optimizers[name] = addon_state.gather_tensors(trainer, trainer.engine.optimizer_state(optimizer))
    return dict(weights), training_weights, optimizers


# -------------------------------------------------------------------------------------------------------- loading


def load_state(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> None:
    """Check the whole state, and only then load it; on an error nothing is loaded."""
    optimization = _optimization_of(trainer)
    position = trainer.loader_position
    user_state = check_user_state(state.get(USER_STATE))
    if is_in_mode(trainer, addon_state.ENTRIES):
        trainer.user_state.load_state_dict(trainer, user_state)
        return
    if not is_in_mode(trainer, addon_state.FROM_FILE):
        trainer.current_run.activity.check_load()
    _check_keys(state, strict)
    module = trainer.unwrap()
    if not trainer.current_run.setup.is_done and optimization.has_factory:  # A later setup uses what they make.
        optimization.build(trainer.build_optimizer, trainer.build_scheduler)
    trainer.run_record.note_script(trainer)
    with explaining_misfits():
        state = older_states.convert_wrapped(state, optimization, module, trainer.is_main)
    is_ours = is_in_mode(trainer, addon_state.FROM_FILE)  # Else others hold the tensors too.

    def load_optimizer(name: str, values: Any) -> None:
        if not is_ours:
            values = copy.deepcopy(values)
        places = (state.get("devices") or {}).get(name)
        if places:
            values = move_to_device(values, places, device_of(optimization.optimizers[name]))
        load_optimizer_state(optimization.optimizers[name], values)

    entry = state["module"]
    check_module(entry)
    weights, is_strict = _fitting_weights(trainer, state, strict)
    with explaining_misfits():
        is_same = trainer.history.has_criterion_of(state["records"])
        trainer.run_record.check_classes(state["records"])
        load_optimization = optimization.prepare(state, module, strict, load_optimizer, keeps_best=is_same)
        outside = optimization.pair_outside(state["outside"], module)
        progress = ProgressChecker.from_state(state)
        history = trainer.history.with_records(state["records"])
    # A seed overrides the random streams of a state before any run.
    is_unused = trainer.seed is not None and not progress.batch and not progress.run_starts

    several = [*optimization.optimizers.values(), *optimization.schedulers.values()]
    with _restoring_on_error([trainer, position, optimization, trainer.run_record], several):
        with explaining_misfits():
            position.load_state_dict(state["position"])
            load_strides(module, entry)  # Before the optimizers: their state is in the order of the parameters.
            with trainer.user_state.watching_loads(trainer):
                load_optimization()
            trainer.run_record.load_state_dict(state["records"], len(progress.run_calls.starts))
        progress.is_seeded = trainer.progress_checker.is_seeded
        if is_unused:
            # A trainer that has trained is seeded again; one that is set up for the first time was just seeded.
            progress.is_seeded = progress.is_seeded and not trainer.progress_checker.batch
            trainer.loader_position = position.fresh()
        trainer.progress_checker = progress
        trainer.history = history
        trainer.load_model_state(weights, is_strict)  # Last: most models are not copied, and cannot be restored.
    load_broadcasts(module, entry)
    trainer._in_training = load_flags(module, entry, trainer._in_training, trainer.is_main)
    with torch.no_grad():
        for parameter, value in outside:
            parameter.copy_(value)
    trainer.user_state.load_state_dict(trainer, user_state)
    if state.get("training_weights"):
        modes.treat_as_training(optimization.optimizers)


def _fitting_weights(trainer: Trainer, state: Mapping[str, Any], strict: bool) -> tuple[dict[str, Tensor], bool]:
    """Return the weights that training continues from, under the model's keys, and whether they must be all."""
    further: dict[str, Any] = {}
    for key in ("training_weights", "extra_state"):  # The second by the keys of get_extra_state.
        entry = state.get(key, {})
        if not isinstance(entry, Mapping):
            raise CheckpointMismatch(f"the {key} of the state is {entry!r:.80}, and must be a dict")
        further |= entry
    module = trainer.unwrap()
    needed = _needed_keys(trainer)
    weights = fit_weights(module, {**state["model"], **further}, strict, needed)
    check_types(module, weights)
    return weights, strict and needed is None


# -------------------------------------------------------------------------------------------------- weights alone


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights that evaluation uses, whole on this rank."""
    return modes.both_weights(_optimization_of(trainer).optimizers, trainer.model_state)[0]


def load_weights(trainer: Trainer, weights: Mapping[str, Tensor], strict: bool) -> tuple[list[str], list[str]]:
    """Load weights alone, and return the missing and the unexpected keys; on an error the model is unchanged.

    An optimizer with modes uses them for evaluation.
    """
    optimization = _optimization_of(trainer)
    module = trainer.unwrap()
    needed = _needed_keys(trainer)
    fitted = fit_weights(module, weights, strict, needed)
    present = module.state_dict()
    trainer.load_model_state(fitted, strict and needed is None)
    modes.treat_as_evaluation(optimization.optimizers)
    missing = [key for key in present if key not in fitted and (needed is None or key in needed)]
    return missing, [key for key in fitted if key not in present]


def _needed_keys(trainer: Trainer) -> set[str] | None:
    """Return the keys of the model that saved weights must have; None means all keys."""
    names = own_names(trainer.unwrap())
    needed = trainer.weights_to_save(names)
    return None if needed is names else {names[name] for name in needed}


# ---------------------------------------------------------------------------------------- states that do not fit


def _check_keys(state: Mapping[str, Any], strict: bool) -> None:
    """Refuse a state that lacks an entry, or has one that no add-on of this trainer loads.

    The state of an add-on that zae no longer has is left out, with a line that says so.
    """
    missing = [key for key in _REQUIRED_KEYS if key not in state]
    removed = [key for key in state if key in _REMOVED_ADD_ONS]
    leftover = [str(key) for key in state if key not in (*_REQUIRED_KEYS, *_OPTIONAL_KEYS, *_REMOVED_ADD_ONS)]
    if missing:
        raise CheckpointMismatch(
            f"the state has no {', '.join(missing)}; its entries are {', '.join(map(str, state)) or 'none'}; give what "
            "state_dict() returned, or load weights alone with apply_weights(...)"
        )
    if removed:
        _log.warning("the state of %s is not loaded: zae no longer has this add-on", ", ".join(removed))
    if leftover:
        names = ", ".join(leftover)
        text = f"this trainer has no add-on for the state of {names}; add it with .add_on({names})"
        if strict:
            raise CheckpointMismatch(f"{text}, or load with strict=False to ignore it")
        _log.warning("%s", printable(text))


@contextlib.contextmanager
def _restoring_on_error(plain: Iterable[Any], stateful: list[Any]) -> Iterator[None]:
    """On an error, restore the attributes of these objects: loading replaces tensors and does not change them."""
    attributes = [(part, dict(vars(part))) for part in (*plain, *stateful)]
    # Others may have objects inside, as a chain of schedulers does.
    states = [(part, part.state_dict()) for part in stateful if type(part).load_state_dict is not _LOAD]
    try:
        yield
    except BaseException:
        for part, before in attributes:
            for name in vars(part).keys() - before.keys():
                delattr(part, name)
            vars(part).update(before)
        for part, state in states:
            part.load_state_dict(state)
        raise


@contextlib.contextmanager
def explaining_misfits() -> Iterator[None]:
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
