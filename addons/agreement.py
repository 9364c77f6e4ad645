"""What ranks agree on between two steps: which call they make, whether to stop, and that their weights are alike."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zae.common.model_weights import named_parameters
from zae.composition.introspect import AddOnPart, replaces
from zae.errors import DistributedError
from zae.launch import shards
from zae.launch.collectives import gather_objects
from zae.launch.drift import DriftCheck, Meetings, note_culprit
from zae.launch.stop_flag import StopFlag
from zae.loop.addon_state import ALONE, ENTRIES, is_in_mode
from zae.sinks.fingerprint import fingerprints
from zae.storage.checkpoint import Group

__all__ = ["AgreementAddon"]


class AgreementAddon(AddOnPart):
    """Let the ranks stop together, and find ranks whose weights have drifted apart; a base of `DistributedAddon`."""

    layer = "parallel"
    process_attributes = {"_outer_error": None, "_beside": None}
    timeout: float  # Set by DistributedAddon.
    _rank: int  # Set by ShardingAddon.
    _world: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop_flag, self._drift = StopFlag(), DriftCheck()
        self._outer_error: BaseException | None = None
        self._beside: Any = None  # The process group of saves in shards.

    def setup(self) -> None:
        """Note the exception that is being handled already, which the other ranks have too."""
        self._outer_error = sys.exc_info()[1]
        super().setup()

    def meet(self, call: str) -> None:
        """Wait until all ranks make this call; the error names it where one does not."""
        super().meet(call)
        if self._world > 1:
            Meetings.meet(call, self.timeout)

    def save_model(self, path: str | Path | None = None, **options: Any) -> Path:
        """Save the weights; where they lie in parts, all ranks call it, and raise the error of rank 0."""
        save = partial(super().save_model, path, **options)
        if self.can_save_alone:
            return save()
        self.meet("save_model")
        return Group(self.rank, self.gather).together(save, Path(path or "the model"))[self.rank]

    @replaces
    def gather_beside(self, value: Any) -> list[Any]:
        """Return the values of all ranks, through a separate process group; the loop makes the first call."""
        values = [value] * self._world
        if self._world > 1:
            try:
                if self._beside is None:
                    self._beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
                values = gather_objects(value, self._beside)
            except RuntimeError as error:
                raise DistributedError(
                    f"rank {self._rank} of {self._world}: another rank has ended, or did not answer within the "
                    f"timeout of {self.timeout:g} s, while a checkpoint was written; resume from the one before"
                ) from error
        return values

    @replaces
    def stop(self, reason: str) -> None:
        """End the run on all ranks after the next step, whichever rank calls it; see `checkpoint`."""
        if self._world == 1:
            return super().stop(reason)
        self._stop_flag.reason = reason

    @replaces
    def request(self, action: str) -> None:
        """Ask for something on all ranks, whichever rank calls it; they agree on it as on `stop`."""
        if self._world == 1:
            return super().request(action)
        self._stop_flag.requests.add(action)

    def on_run_begin(self) -> None:
        """Reset the request to stop, and check that all ranks begin at the same place."""
        self._stop_flag.reason, progress = None, self.progress_checker
        self._stop_flag.requests.clear()
        _check_places(self.gather((progress.epoch, progress.step, progress.epoch_batch)))
        self._drift.begin(progress.step)
        super().on_run_begin()

    def on_validation_begin(self) -> None:
        """Note that the ranks meet at this step."""
        super().on_validation_begin()
        self._stop_flag.is_meeting = True

    def checkpoint(self) -> None:
        """Agree on whether to stop, and on what `request` was called with.

        After a step they agree on what was asked at the step before, so that no step waits for it. After a validation,
        an epoch and the last step of the run, where the ranks meet in any case, they agree on what is asked now.
        """
        if self._world > 1:
            progress = self.progress_checker
            waits = not progress.epoch_batch or progress.step >= self.current_run.last_step
            if waits:
                self._check_drift()
            reason, requests = self._stop_flag.agree(waits, self.gather)
            if reason is not None:
                super().stop(reason)
            for action in requests:
                super().request(action)
        super().checkpoint()

    def replicas(self) -> dict[str, Tensor]:
        """Return by name the tensors that each rank with that name must hold bitwise alike: the parameters.

        They are compared at the end of each epoch and whenever the state is saved. Buffers are not among them: those
        of a module may differ between ranks. A part of a sharded one has the name of that part.
        """
        found: dict[str, Tensor] = dict(named_parameters(self.unwrap()))
        known = {id(each) for each in found.values()}
        others = (each for each in self.parameters if id(each) not in known)
        found |= {f"parameter {index} outside of the model": each for index, each in enumerate(others)}
        return {shards.name_of_part(name, each): each for name, each in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Compare the weights that several ranks hold whole before they are saved."""
        if self._world > 1 and not self._is_failing() and not is_in_mode(self, ENTRIES, ALONE):
            self._check_drift()
        return super().state_dict()

    def _check_drift(self) -> None:
        """Refuse to continue with ranks whose weights differ."""

        def hashes() -> dict[str, int]:
            replicas = self.replicas()
            return dict(zip(replicas, fingerprints(replicas.values())))

        self._drift.check(self.progress_checker.step, hashes, self.gather)

    def _is_failing(self) -> bool:
        """Return whether an exception of this run is being handled, so that the other ranks may not be here."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._outer_error

    def on_exception(self, error: BaseException) -> None:
        """Look which other rank is the cause, where a launcher has started the ranks."""
        super().on_exception(error)
        if self._world > 1:
            note_culprit(error, self.timeout)

    def teardown(self) -> None:
        """Leave nothing under way on the process group."""
        self._stop_flag.drop(is_failing=self._is_failing())
        super().teardown()


def _check_places(places: list[tuple[int, int, int]]) -> None:
    """Refuse to begin a run with processes that are at different epochs, steps or batches."""
    if len(set(places)) > 1:
        stand = ", ".join(f"rank {rank} at step {place[1]}" for rank, place in enumerate(places))
        raise DistributedError(
            f"the processes do not continue from the same state: {stand}. All of them must load the same checkpoint: "
            "let save_path (or resume) name a folder that all machines share"
        )
