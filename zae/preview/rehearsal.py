"""`run(..., rehearse=True)`: make two steps, a validation, a save and a load with copies of a trainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zae.common import random_state
from zae.common.optimizer_state import check_optimizer_states, difference
from zae.composition.introspect import slots_of
from zae.errors import CheckpointMismatch, RehearsalError
from zae.preview.dry_run import (
    NotTried,
    begin_call,
    borrow,
    copy_to_train,
    copy_trainer,
    first_batches,
    in_words,
)

if TYPE_CHECKING:
    from zae.preview.preview import Preview

__all__ = ["Rehearsal"]

_log = logging.getLogger("zae")
_EPOCHS = 2  # Of one step: a scheduler may fail on its second one.
_OF_THIS_PLACE = ("position", "StateManagerAddon")  # Entries that a load adapts to the loader and the folder.


class Rehearsal:
    """Tries with copies what a call of `Trainer.run` does later; neither the trainer nor its loaders change.

    Parameters
    ----------
    preview : Preview
        The preview of the call.
    save : callable
        `zae.storage.share.try_save`, with the function that loads.
    """

    def __init__(self, preview: Preview, save: Callable[..., dict[str, Any]]) -> None:
        self.preview, self.save = preview, save
        self.run, self.trainer = preview.run, preview.run.trainer
        self.is_stepped = False

    def try_all(self) -> None:
        """Raise one RehearsalError with all that would fail; warn of what cannot be tried."""
        faults, found = dict[str, Exception](), self.preview
        attempts: dict[str, Callable[[], object]] = {
            "the plan of the run": found.plan,
            "a step of training": self.step,
            "a batch of valid_loader": self.validate,
            "a save and a load of the state": self.save_and_load,
        }
        if self.trainer.mode == "test":
            attempts = {"a batch of loader": lambda: self.twin.evaluate(_few(self.run.loader))}
        elif self.run.valid_loader is None:
            del attempts["a batch of valid_loader"]
        if "state" not in slots_of(type(self.trainer)):
            attempts.pop("a save and a load of the state", None)
        for what, attempt in attempts.items():
            try:
                with random_state.isolated():
                    attempt()
            except NotTried as reason:
                _log.warning("%s is not rehearsed: %s", what, reason)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                faults[what] = error
        said = {what: in_words(error) for what, error in faults.items()}
        if found.found.faults and not said:
            said = {"the plan of the run": "; ".join(found.found.faults)}
        if said:
            lines = "".join(f"\n  {what}: {text}" for what, text in said.items())
            raise RehearsalError(
                f"{len(said)} of {len(attempts)} rehearsed parts of this run would fail; correct them and call run "
                f"again (nothing was trained or changed):{lines}"
            ) from next(iter(faults.values()), None)

    @cached_property
    def twin(self) -> Any:
        """A copy that trains in this process, and neither saves nor logs."""
        return copy_to_train(self.trainer)

    def _begin_call(self, twin: Any, loader: Any) -> Any:
        """Begin a call of run with a copy."""
        return begin_call(twin, loader, _few(self.run.valid_loader), self.run.limits)

    def step(self) -> None:
        """Make two epochs of one step."""
        twin, size = self.twin, getattr(self.trainer, "gradient_accumulation_steps", 1)
        with borrow(self.run.loader) as loader:
            batches = [*islice(loader, _EPOCHS * size)]
            self._begin_call(twin, loader)
            with twin.ready():
                twin.on_run_begin()
                for epoch in range(_EPOCHS):
                    twin.on_epoch_begin()
                    twin.run_epoch(batches[epoch * size : (epoch + 1) * size] or batches[:size])
        self.is_stepped = True

    def validate(self) -> None:
        """Validate, and do what follows an epoch."""
        call = self._begin_call(self.twin, self.run.loader)
        with self.twin.ready():
            for _ in range(_EPOCHS):
                self.twin.progress_checker.pending_validation = "epoch"
                call.end_epoch()

    def save_and_load(self) -> None:
        """Save the state into a temporary folder, and load it into a copy that has not trained."""
        trainer, settings = self.trainer, copy.copy(self.trainer.optimization.settings)
        try:
            state = trainer.state_dict()
        finally:
            trainer.optimization.settings = settings  # A state notes those that it was read with.
        if self.is_stepped:
            state |= self.twin.state_dict()
            check_optimizer_states(self.twin.optimizers, state["optimizer"])
        found = self.save(state, Path(trainer.save_path), trainer.checkpointer.model_format)
        if not self.is_stepped:  # Then there may be no optimizer yet.
            return
        twin = copy_trainer(trainer)
        self._begin_call(twin, self.run.loader)  # A schedule may need its length.
        twin.load_state_dict(found)
        read = twin.state_dict()
        for name in read.keys() - _OF_THIS_PLACE:
            if text := difference(found.get(name), read[name], name):
                raise CheckpointMismatch(f"the state differs after it was saved and loaded: {text}")


def _few(loader: Any) -> Any:
    """Return the first batches of a loader, or of each of several."""
    if isinstance(loader, Mapping):
        return {name: _few(each) for name, each in loader.items()}
    return None if loader is None else first_batches(loader, _EPOCHS)
