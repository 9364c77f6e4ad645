"""Compute the gradients of some steps twice, and compare them bitwise before the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from zae import optim
from zae.addon import AddOnBase, Fact, repeats
from zae.addons.silent_fault_guard.same_gradients import Computed, Start, compare
from zae.errors import ConfigError, SilentFaultError
from zae.loop.progress import Every

__all__ = ["SilentFaultGuardAddon"]


class SilentFaultGuardAddon(AddOnBase):
    """Compute the gradients of every k-th step twice, and compare them bitwise before the optimizer steps.

    A processor or a memory that computes a wrong number now and then raises no error: the run goes on with wrong
    weights. Both computations begin with the same random streams, buffers and batches, so that losses, gradients and
    buffers (the statistics of BatchNorm) are equal to the last bit, or something has failed. On several ranks the
    gradients of each rank are compared as they are before they are averaged, and then the averages: the rank with the
    fault is known. `FSDPAddon` sums gradients while it computes them: there the rank is known where its loss differs
    too. Weights, records and the position in the data are bitwise those without the add-on.

    ``train_step`` is called twice for a batch of such a step: what it counts or writes itself, it does twice. A step
    that is checked takes the time of two forwards and backwards, with their communication, and the memory of the
    gradients a second time, on several ranks up to three times more.

    Parameters
    ----------
    fault_check_every : Every or int
        Which steps are checked: the default is each 100th.

    Attributes
    ----------
    faults : list of dict
        ``step``; ``rank``, None where only the averages differ; ``where`` ("gradient", "loss", "buffer" or "averaged
        gradient"), ``name`` of the parameter
        or buffer that differs most, ``difference``, ``elements`` of it that differ, and ``names`` (how many differ).
    fault_checks : int
        How many steps were checked.

    Raises
    ------
    ConfigError
        An option has an invalid value.
    SilentFaultError
        Two computations of the gradients differ.
    StepError
        ``train_step`` changes a parameter.

    Examples
    --------
    >>> import torch
    >>> from zae.addons import SilentFaultGuardAddon
    >>> from zae.testing import PlainTask
    >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 8
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> trainer = PlainTask.add_on(SilentFaultGuardAddon)(model, "cpu", optimizer=optimizer, fault_check_every=4)
    >>> metrics = trainer.run(1, batches)
    >>> trainer.fault_checks, trainer.faults
    (2, [])
    """

    layer = "control"
    traits = ("repeats_gradients",)
    state_attributes = ("faults", "fault_checks")
    process_attributes = {"_begin": None}
    excludes = {
        "repeats_gradients": "it computes the gradients of a step again as well, in other parts; leave AutoBatchAddon "
        "out, and write GradientAccumulationAddon with a smaller batch size, which zae.find_batch_size finds",
        "keeps_gradients": "its engine adds up gradients in buffers that it clears with the step alone, so that they "
        "cannot be computed twice; leave SilentFaultGuardAddon out, or train with FSDPAddon",
    }

    def __init__(
        self,
        *args: Any,
        fault_check_every: Every | int = Every(steps=100),  # noqa: B008  (it is frozen)
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fault_check_every = Every.parse(fault_check_every, "fault_check_every", Every(steps=100))
        if self.fault_check_every.steps is None:
            raise ConfigError(f"fault_check_every={fault_check_every!r}; steps are checked: write a number of them")
        self.faults: list[dict[str, Any]] = []
        self.fault_checks = 0
        self._begin: Start | None = None  # Of a step that is checked.

    def _is_checked(self) -> bool:
        """Return whether the next step is computed twice."""
        is_due = self.fault_check_every.due_at_step(self.progress_checker.step + 1)
        return is_due and self.mode == "train" and not optim.has_lazy(self.parameters)

    # ---------------------------------------------------------------------------------------------- the computations

    @repeats
    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Compute the gradients, of a step that is checked twice."""
        self.current_run.computation = 1
        if not self._is_checked():
            return super().gradients(batch)
        self.step_window.is_repeated = True  # Its batches are needed again.
        own = vars(self).values()
        has_ranks = self.world_size > 1
        self._begin = Start(self.unwrap(), self.parameters, own, self._rewind_generators, has_ranks)
        try:
            first, _ = self._compute(batch, 1)
            self._begin.check_parameters()
            second, outputs = self._compute(batch, 2)
            self.fault_checks += 1
            if found := self._differences(first, second):
                self._refuse(found)
            return outputs
        finally:
            self._begin = None
            self.step_window.is_repeated = False

    def _compute(self, batch: Any, number: int) -> tuple[Computed, list[tuple[Mapping[str, Any], float]]]:
        """Compute the gradients for the n-th time, from the same start."""
        assert self._begin is not None
        self.current_run.computation = number
        if number > 1:
            self._begin.restore()
        local: dict[str, Tensor] = {}
        with self._begin.watched(local if self.world_size > 1 else None):
            outputs = super().gradients(batch)
        return self._begin.computed(local, [values["loss"] for values, _ in outputs]), outputs

    def _rewind_generators(self) -> Callable[[], None]:
        """Return a function that puts the generators of all add-ons back to where they are now."""
        state = self._generators.state_dict()
        return lambda: self._generators.load_state_dict(state)

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Begin each batch with the random streams of its first computation."""
        if self._begin is not None:
            self._begin.begin_batch()
        return super().sync_context(last)

    def to_device(self, batch: Any) -> Any:
        """Give each computation new containers of the same tensors."""
        moved = super().to_device(batch)
        return moved if self._begin is None else self._begin.keep_batch(batch, moved)

    # -------------------------------------------------------------------------------------------------- what differs

    def _differences(self, first: Computed, second: Computed) -> list[dict[str, Any]]:
        """Return what differs on each rank, in an order that all ranks have."""
        own = compare(first, second)
        found = [] if own is None else [{"step": self.progress_checker.step + 1, "rank": self.rank, **own}]
        everywhere = [each for several in self.gather(found) for each in several]
        local = [each for each in everywhere if each["where"] != "averaged gradient"]
        # A rank with a fault is the cause of other averages on all of them.
        return local or [{**each, "rank": None} for each in sorted(everywhere, key=_by_size)[-1:]]

    def _refuse(self, found: list[dict[str, Any]]) -> None:
        """Note faults in the state and in every logger, and end the run."""
        self.faults = [*self.faults, *found]
        worst = max(found, key=_by_size)
        rank = {} if worst["rank"] is None else {"fault/rank": worst["rank"]}
        self.log({**rank, "fault/difference": worst["difference"], "fault/count": len(self.faults)}, worst["step"])
        raise SilentFaultError(
            f"step {found[0]['step']}: two computations of its gradients differ {_describe(found, self.world_size)}. "
            "The optimizer has not stepped. A processor, its memory or a connection may be faulty: test this machine, "
            "or leave it out, and resume from the last checkpoint. Or the step does not compute the same twice: write "
            "torch.use_deterministic_algorithms(True), and draw random numbers from torch, numpy.random and random, or "
            "from a generator that is an attribute of the task"
        )

    def describe(self) -> list[Fact]:
        """Tell which steps are computed twice."""
        steps = self.fault_check_every.steps
        which = "in each step" if steps == 1 else f"in one of {steps} steps"
        return [*super().describe(), Fact("gradients are computed twice, and compared", which, where="gradients")]


def _by_size(fault: Mapping[str, Any]) -> float:
    return math.inf if math.isnan(fault["difference"]) else fault["difference"]


def _describe(found: list[dict[str, Any]], world: int) -> str:
    """Say where computations differ, and by how much."""
    texts = []
    for each in found[:4]:
        others = f" and {each['names'] - 1} more" if each["names"] > 1 else ""
        rank = f" on rank {each['rank']}" if each["rank"] is not None else " after the sum over the ranks"
        what = f"the {each['where']} of {each['name']}{others}{rank if world > 1 else ''}"
        texts.append(f"in {what}: {each['elements']} elements, by at most {each['difference']:.3g}")
    return "; ".join(texts) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
