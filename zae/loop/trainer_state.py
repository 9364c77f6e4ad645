"""Read the trainer's own part of a state, and load it entirely or not at all.

Each object reads and checks its own entries; here they are put together, in one order on every rank. The second half of
the file is the entry "module": what a model is beside its tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zae.device import as_current
from zae.errors import CheckpointMismatch, ZaeError, printable
from zae.loop import addon_state, older_states
from zae.loop.addon_state import PARTS_WITHOUT_ROWS, USER_STATE, is_in_mode
from zae.loop.progress import ProgressChecker
from zae.loop.user_state import check_user_state
from zae.model.weights import (
    check_types,
    extra_names,
    fit_weights,
    named_parameters,
    own_names,
    plain_names,
    plain_state,
)
from zae.optim import modes
from zae.optim.optimizer_state import device_of, load_optimizer_state, move_to_device, places_on_device
from zae.values.strides import contiguous_strides, copy_with_strides, is_laid_out, strides_to_save, with_strides
from zae.values.walk import is_sharded

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["CoreState"]

_log = logging.getLogger("zae")
_KEYS = ("model", "optimizer", "outside", "scheduler", "progress", "records", "position", "order", "module")
# Add-ons that are no longer there, of which older checkpoints have a state.
_REMOVED = ("AutoBatchAddon", "LightningAddon", "SilentFaultGuardAddon")
_OPTIONAL = ("validation", "training_weights", "generators", "extra_state", "devices", USER_STATE)
_LOAD = torch.optim.Optimizer.load_state_dict
_SHOWN = 5


class CoreState:
    """The state of a trainer without the entries of its add-ons.

    Before the trainer is set up, its optimizers are those that it was given.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.optimization = trainer.optimization
        if not trainer.current_run.is_ready:
            self.optimization.index_by_name()

    def read(self) -> dict[str, Any]:
        """Return the state."""
        trainer = self.trainer
        optimization = self.optimization
        progress = trainer.progress_checker
        module = trainer.unwrap()
        parameters = named_parameters(module)
        trainer.run_record.note_script(trainer)
        trainer.nonfinite.read_pending(progress, trainer)
        weights, training_weights, optimizers = self._read_tensors()
        devices = {}
        for name, each in optimizers.items():
            if places := places_on_device(each):
                devices[name] = places
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
            "module": _read_module(module, parameters, trainer._in_training),
        }
        user_state = trainer.user_state.state_dict(trainer)
        if user_state or trainer.world_size > 1:  # Several ranks compare what they have.
            state[USER_STATE] = user_state
        if extra:
            state["extra_state"] = extra
        if devices:
            state["devices"] = devices
        if training_weights:  # Some optimizers train with other weights than they evaluate with.
            state["training_weights"] = training_weights
        return state

    def _read_tensors(self) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
        """Return the weights, the training weights that differ from them, and the states of the optimizers."""
        trainer = self.trainer
        if is_in_mode(trainer, addon_state.ENTRIES):  # Then one rank alone reads, and needs the rest.
            return {}, {}, {}
        in_use = self.optimization.optimizers
        weights, training_weights = modes.both_weights(in_use, trainer.model_state)
        optimizers = {}
        for name, optimizer in in_use.items():
            state = trainer.engine.optimizer_state(optimizer)
            optimizers[name] = addon_state.gather_tensors(trainer, state)
        return dict(weights), training_weights, optimizers

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Check the whole state, and only then load it; on an error nothing is loaded."""
        trainer = self.trainer
        optimization = self.optimization
        position = trainer.loader_position
        user_state = check_user_state(state.get(USER_STATE))
        if is_in_mode(trainer, addon_state.ENTRIES):
            trainer.user_state.load_state_dict(trainer, user_state)
            return
        if not is_in_mode(trainer, addon_state.FROM_FILE):
            trainer.current_run.activity.check_load()
        _check_keys(state, strict)
        module = trainer.unwrap()
        if not trainer.current_run.is_ready and optimization.has_factory:  # A later setup uses what they make.
            optimization.build(trainer.build_optimizer, trainer.build_scheduler)
        trainer.run_record.note_script(trainer)
        with _explaining_misfits():
            state = older_states.convert_wrapped(state, optimization, module, trainer.is_main)
        is_ours = is_in_mode(trainer, addon_state.FROM_FILE)  # Else others hold the tensors too.

        def load_optimizer(name: str, values: Any) -> None:
            if not is_ours:
                values = copy.deepcopy(values)
            places = (state.get("devices") or {}).get(name)
            if places:
                values = move_to_device(values, places, device_of(self.optimization.optimizers[name]))
            load_optimizer_state(self.optimization.optimizers[name], values)

        entry = state["module"]
        _check_module(entry)
        weights, is_strict = self._fitting_weights(state, strict)
        with _explaining_misfits():
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
            with _explaining_misfits():
                position.load_state_dict(state["position"])
                _load_strides(module, entry)  # Before the optimizers: their state is in the order of the parameters.
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
        _load_broadcasts(module, entry)
        trainer._in_training = _load_flags(module, entry, trainer._in_training, trainer.is_main)
        with torch.no_grad():
            for parameter, value in outside:
                parameter.copy_(value)
        trainer.user_state.load_state_dict(trainer, user_state)
        if state.get("training_weights"):
            modes.treat_as_training(optimization.optimizers)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that evaluation uses, whole on this rank."""
        return modes.both_weights(self.optimization.optimizers, self.trainer.model_state)[0]

    def load_weights(self, weights: Mapping[str, Tensor], strict: bool) -> tuple[list[str], list[str]]:
        """Load weights alone, and return the missing and the unexpected keys; on an error the model is unchanged.

        An optimizer with modes uses them for evaluation.
        """
        module = self.trainer.unwrap()
        needed = self._needed()
        fitted = fit_weights(module, weights, strict, needed)
        present = module.state_dict()
        self.trainer.load_model_state(fitted, strict and needed is None)
        modes.treat_as_evaluation(self.optimization.optimizers)
        missing = [key for key in present if key not in fitted and (needed is None or key in needed)]
        return missing, [key for key in fitted if key not in present]

    def _needed(self) -> set[str] | None:
        """Return the keys of the model that saved weights must have; None means all keys."""
        names = own_names(self.trainer.unwrap())
        needed = self.trainer.weights_to_save(names)
        return None if needed is names else {names[each] for each in needed}

    def _fitting_weights(self, state: Mapping[str, Any], strict: bool) -> tuple[dict[str, Tensor], bool]:
        """Return the weights that training continues from, under the model's keys, and whether they must be all."""
        training_weights = state.get("training_weights", {})
        if not isinstance(training_weights, Mapping):
            raise CheckpointMismatch(
                f"the training_weights of the state are {training_weights!r:.80}, and must be a dict"
            )
        module = self.trainer.unwrap()
        needed = self._needed()
        saved = {**state["model"], **training_weights, **self._extra_in(state)}
        weights = fit_weights(module, saved, strict, needed)
        check_types(module, weights)
        return weights, strict and needed is None

    @staticmethod
    def _extra_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what modules have saved beside their tensors, by the keys of their ``get_extra_state``."""
        extra = state.get("extra_state", {})
        if not isinstance(extra, Mapping):
            raise CheckpointMismatch(f"the extra_state of the state is {extra!r:.80}, and must be a dict")
        return extra


def _check_keys(state: Mapping[str, Any], strict: bool) -> None:
    """Refuse a state that lacks an entry, or has one that no add-on of this trainer loads.

    The state of an add-on that zae no longer has is left out, with a line that says so.
    """
    missing = [key for key in _KEYS if key not in state]
    removed = [key for key in state if key in _REMOVED]
    leftover = [str(key) for key in state if key not in (*_KEYS, *_OPTIONAL, *_REMOVED)]
    if missing:
        is_model = all(isinstance(value, Tensor) for value in state.values())
        other = ", or load weights alone with apply_weights(...)"
        if not is_model:
            other = ", an override of which returns {**super().state_dict(), ...}"
        raise CheckpointMismatch(
            f"the state has no {', '.join(missing)}; its entries are {', '.join(map(str, state)) or 'none'}; give what "
            f"state_dict() returned{other}"
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
        for each, before in attributes:
            for name in vars(each).keys() - before.keys():
                delattr(each, name)
            vars(each).update(before)
        for each, state in states:
            each.load_state_dict(state)
        raise


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


# ------------------------------------------------------------------------- what a model is beside its tensors


def _read_module(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], in_training: Collection[nn.Module] | None
) -> dict[str, Any]:
    """Return what is frozen, what stays in evaluation mode, and the order of tensors in memory.

    ``in_training`` has the modules in training mode, where an evaluation has changed it.
    """
    evaluating = []
    for path, each in _named_modules(module).items():
        trains = each.training if in_training is None else each in in_training
        if not trains:
            evaluating.append(path)
    return {
        "frozen": [name for name, each in parameters.items() if not each.requires_grad],
        "evaluating": evaluating,
        "strides": _read_strides(module),
    }


def _read_strides(module: nn.Module) -> dict[str, list[int]] | None:
    """Return the strides of tensors that are not contiguous; None where this rank has only parts of the tensors."""
    found = {}
    for name, each in plain_state(module, keep_vars=True).items():
        if not isinstance(each, Tensor):
            continue
        if is_sharded(each):
            return None
        strides = strides_to_save(each)
        if strides is not None:
            found[name] = list(strides)
    return found


def _check_module(entry: Any) -> None:
    """Refuse an entry that `_read_module` does not return."""
    names = [entry.get(key) for key in ("frozen", "evaluating")] if isinstance(entry, Mapping) else [None]
    strides = entry.get("strides") if isinstance(entry, Mapping) else ()
    if not all(isinstance(name, list) for name in names) or not isinstance(strides, (Mapping, type(None))):
        raise CheckpointMismatch(
            f"the entry 'module' of the state is {entry!r:.60}, not what is frozen and evaluating; load another "
            "checkpoint, or the weights alone: apply_weights(path)"
        )


def _load_strides(module: nn.Module, entry: Mapping[str, Any]) -> None:
    """Give the tensors of a model the order in memory that they had when they were saved; their values stay."""
    saved = entry["strides"]
    for name, tensor in plain_state(module, keep_vars=True).items():
        if saved is None or not isinstance(tensor, Tensor) or not is_laid_out(tensor):
            continue
        strides = tuple(saved.get(name) or contiguous_strides(tensor.shape))
        if len(strides) == tensor.dim() and tensor.stride() != strides and 0 not in strides:
            # The model, the optimizers and the engine keep the same tensor.
            tensor.data = copy_with_strides(tensor.detach(), strides)


def _load_broadcasts(module: nn.Module, entry: Mapping[str, Any]) -> None:
    """Make views again of tensors that repeated some of their elements; it comes after their values are loaded."""
    state = plain_state(module, keep_vars=True)
    for name, strides in (entry["strides"] or {}).items():
        tensor = state.get(name)
        if 0 not in strides or not isinstance(tensor, Tensor) or not is_laid_out(tensor):
            continue
        view = with_strides(tensor.detach(), strides)
        if torch.equal(view, tensor):
            tensor.data = view


def _load_flags(
    module: nn.Module, entry: Mapping[str, Any], in_training: list[nn.Module] | None, is_main: bool
) -> list[nn.Module] | None:
    """Freeze and unfreeze parameters, set the mode of each module; return the modules to put into training mode later.

    That is None where the modules are in training mode now, as for ``in_training``.
    """
    frozen, evaluating = set(entry["frozen"]), set(entry["evaluating"])
    changed = []
    for name, parameter in named_parameters(module).items():
        can_train = parameter.is_floating_point() or parameter.is_complex()
        is_trained = can_train and name not in frozen
        if parameter.requires_grad != is_trained and parameter.is_leaf:
            parameter.requires_grad_(is_trained)
            changed.append(name)
    if changed and is_main:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        _log.warning(
            "the checkpoint sets requires_grad of %s, as training had left it; the script has the opposite",
            ", ".join(changed[:_SHOWN]) + more,
        )
    trained = [each for path, each in _named_modules(module).items() if path not in evaluating]
    if in_training is not None:
        return trained
    for submodule in module.modules():
        submodule.training = False
    for each in trained:
        each.training = True
    return None


def _named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their plain names, without the wrappers of torch; the model itself is ''."""
    modules = {f"{path}." if path else "": each for path, each in module.named_modules()}
    plain = plain_names(module, modules)
    return {plain[path].rstrip("."): each for path, each in modules.items()}
