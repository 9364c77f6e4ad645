"""Read the trainer's own part of a state, and load it entirely or not at all.

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

from zae.common.device import as_current
from zae.common.model_weights import check_types, extra_names, fit_weights, own_names
from zae.errors import CheckpointMismatch, ZaeError, printable
from zae.loop import addon_state, module_state
from zae.loop.progress import ProgressChecker
from zae.optim import modes
from zae.optim.state import device_of, move_to_device, places_on_device

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["CoreState"]

_log = logging.getLogger("zae")
_KEYS = ("model", "optimizer", "outside", "scheduler", "progress", "records", "position")
_OPTIONAL = ("order", "validation", "training_weights", "generators", "module", "extra_state", "devices")
_LOAD = torch.optim.Optimizer.load_state_dict


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
        optimization.note_settings()
        trainer.nonfinite.read_pending(progress, trainer)
        weights: dict[str, Tensor] = {}
        training_weights: dict[str, Tensor] = {}
        optimizers: dict[str, Any] = {}
        if not addon_state.is_in_mode(trainer, addon_state.ENTRIES):  # Then one rank alone reads, and needs the rest.
            weights, training_weights = modes.both_weights(optimization.optimizers, trainer.model_state)
            alone = addon_state.is_in_mode(trainer, addon_state.ALONE)
            for name, optimizer in optimization.optimizers.items():
                optimizers[name] = addon_state.gather_tensors(
                    trainer, trainer.engine.optimizer_state(optimizer, alone=alone)
                )
        devices = {name: places_on_device(each) for name, each in optimizers.items()}
        devices = {name: places for name, places in devices.items() if places}
        # What get_extra_state returns beside tensors; files of weights contain tensors alone.
        extra = {key: weights[key] for key in extra_names(weights)}
        weights = {key: each for key, each in weights.items() if key not in extra} if extra else weights
        # A pending validation may read a training metric of the epoch that was just closed.
        is_open = bool(progress.epoch_batch or progress.pending_validation)
        with as_current(trainer.device):  # Its random stream is the first of those that are saved.
            position = trainer.loader_position.state_dict()
        return {
            "model": weights,
            "optimizer": optimizers,
            **optimization.state_dict(trainer.unwrap()),
            **progress.entries(),
            "records": {**trainer.history.state_dict(is_open), **optimization.records()},
            "position": position,
            "module": module_state.read_module(trainer.unwrap(), trainer._in_training),
            **({"extra_state": extra} if extra else {}),
            **({"devices": devices} if devices else {}),
            # Some optimizers train with other weights than they evaluate with.
            **({"training_weights": training_weights} if training_weights else {}),
        }

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Check the whole state, and only then load it; on an error nothing is loaded."""
        trainer = self.trainer
        optimization = self.optimization
        position = trainer.loader_position
        if addon_state.is_in_mode(trainer, addon_state.ENTRIES):
            return
        if not addon_state.is_in_mode(trainer, addon_state.FROM_FILE):
            trainer.current_run.check_load()
        _check_keys(state, strict)
        module = trainer.unwrap()
        if not trainer.current_run.is_ready and optimization.has_factory:  # A later setup uses what they make.
            optimization.build(trainer.build_optimizer, trainer.build_scheduler)
        optimization.note_settings()
        is_ours = addon_state.is_in_mode(trainer, addon_state.FROM_FILE)  # Else others hold the tensors too.

        def load_optimizer(name: str, values: Any) -> None:
            if not is_ours:
                values = copy.deepcopy(values)
            places = (state.get("devices") or {}).get(name)
            if places:
                values = move_to_device(values, places, device_of(self.optimization.optimizers[name]))
            trainer.engine.load_optimizer_state(self.optimization.optimizers[name], values)

        entry = state.get("module")
        if entry is not None:
            module_state.check_entry(entry)
        weights, is_strict = self._fitting_weights(state, strict)
        with _explaining_misfits():
            is_same = trainer.history.has_criterion_of(state["records"])
            load_optimization = optimization.prepare(state, module, strict, load_optimizer, keeps_best=is_same)
            outside = optimization.pair_outside(state["outside"], module)
            progress = ProgressChecker.from_state(state)
            history = trainer.history.with_records(state["records"])
        # A seed overrides the random streams of a state before any run.
        is_unused = trainer.seed is not None and not progress.batch and not progress.run_starts

        several = [*optimization.optimizers.values(), *optimization.schedulers.values()]
        with _restoring_on_error([trainer, position, optimization, optimization.settings], several):
            with _explaining_misfits():
                position.load_state_dict(state["position"])
                if entry is not None:  # Before the optimizers: their state is in the order of the parameters.
                    module_state.load_strides(module, entry)
                load_optimization()
            progress.is_seeded = trainer.progress_checker.is_seeded
            if is_unused:
                # A trainer that has trained is seeded again; one that is set up for the first time was just seeded.
                progress.is_seeded = progress.is_seeded and not trainer.progress_checker.batch
                trainer.loader_position = position.fresh()
            trainer.progress_checker = progress
            trainer.history = history
            trainer.load_model_state(weights, is_strict)  # Last: most models are not copied, and cannot be restored.
        if entry is not None:
            module_state.load_broadcasts(module, entry)
            trainer._in_training = module_state.load_flags(module, entry, trainer._in_training, trainer.is_main)
        with torch.no_grad():
            for parameter, value in outside:
                parameter.copy_(value)
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
        own = module.state_dict()
        self.trainer.load_model_state(fitted, strict and needed is None)
        modes.treat_as_evaluation(self.optimization.optimizers)
        missing = [key for key in own if key not in fitted and (needed is None or key in needed)]
        return missing, [key for key in fitted if key not in own]

    def _needed(self) -> set[str] | None:
        """Return the keys of the model that saved weights must have; None means all keys."""
        names = own_names(self.trainer.unwrap())
        kept = self.trainer.weights_to_save(names)
        return None if kept is names else {names[each] for each in kept}

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
    """Refuse a state that lacks an entry, or has one that no add-on of this trainer loads."""
    missing = [key for key in _KEYS if key not in state]
    leftover = [str(key) for key in state if key not in (*_KEYS, *_OPTIONAL)]
    if missing:
        is_model = all(isinstance(value, Tensor) for value in state.values())
        raise CheckpointMismatch(
            f"the state has no {', '.join(missing)}; its entries are {', '.join(map(str, state)) or 'none'}; give what "
            "state_dict() returned" + (", or load weights alone with apply_weights(...)" if is_model else "")
        )
    if leftover:
        names = ", ".join(leftover)
        text = f"this trainer has no add-on for the state of {names}; add it with .add_on({names})"
        if strict:
            raise CheckpointMismatch(f"{text}, or load with strict=False to ignore it")
        _log.warning("%s", printable(text))


@contextlib.contextmanager
def _restoring_on_error(plain: Iterable[Any], stateful: list[Any]) -> Iterator[None]:
    """On an error, restore the attributes of these objects: loading replaces tensors and does not change them."""
    attributes = [(each, dict(vars(each))) for each in (*plain, *stateful)]
    # Others may have objects inside, as a chain of schedulers does.
    states = [(each, each.state_dict()) for each in stateful if type(each).load_state_dict is not _LOAD]
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
