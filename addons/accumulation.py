"""Gradient accumulation: one optimizer step of several loader batches, the last short window included."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from zae.addon import AddOnBase, replaces
from zae.common.argument_checks import check_count
from zae.data.loaders import length_of
from zae.errors import LoaderError

__all__ = ["GradientAccumulationAddon"]


class GradientAccumulationAddon(AddOnBase):
    """Make each optimizer step of several loader batches.

    A window's gradient is the mean over its true number of batches: of 5 batches with
    ``gradient_accumulation_steps=4``, the first step divides by 4 and the second by 1. When ``train_step`` returns
    ``num_targets``, every target of a window weighs alike instead. Of a loader with a length, one batch is held at a
    time; of any other, the batches of one window are, because its length must be known before its first backward: what
    drawing them takes from the global random streams is taken before the dropout of the first. They are held too where
    your class overrides ``gradients``, and may call it twice on one window (SAM, a closure).

    Parameters
    ----------
    gradient_accumulation_steps : int
        Loader batches for one optimizer step; 1 changes nothing.

    Raises
    ------
    ConfigError
        It is not a whole number of at least 1.
    LoaderError
        A loader gave fewer batches than its length.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import GradientAccumulationAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(GradientAccumulationAddon)(
    ...     model, "cpu", optimizer=optimizer, gradient_accumulation_steps=4)
    >>> trainer.run(1, [torch.ones(8, 2)] * 5)["step"]
    2
    """

    layer = "loop"
    slot = "accumulation"

    def __init__(self, *args: Any, gradient_accumulation_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradient_accumulation_steps = check_count("gradient_accumulation_steps", gradient_accumulation_steps)

    def is_idle(self) -> bool:
        """Tell whether each batch is a step."""
        return self.gradient_accumulation_steps == 1

    def batches(self, loader: Any) -> Iterator[Any]:
        """Group the loader's batches into windows."""
        batches = super().batches(loader)
        length = length_of(loader)
        if length is None:
            yield from _look_ahead(batches, self.gradient_accumulation_steps)
            return
        left, holds = length - self.progress_checker.epoch_batch, self._may_repeat()
        while left > 0:
            window = _Window(batches, min(self.gradient_accumulation_steps, left), holds)
            left -= len(window)
            yield window
        for _ in batches:  # A loader may count its batches only when it is asked for one more.
            raise LoaderError(f"the loader has a length of {length}, but yielded more batches; fix its __len__")

    def _may_repeat(self) -> bool:
        """Whether an override of ``gradients`` may compute those of one window several times."""
        own = [c for c in type(self).__mro__ if not c.__module__.startswith("zae.")]
        return any(name in vars(c) for c in own for name in ("gradients", "run_batch"))

    @replaces
    def micro_batches(self, batch: Any) -> Sequence[Any]:
        """Return the batches of a window; anything else is a window with one batch."""
        return batch if isinstance(batch, (_Window, _List)) else super().micro_batches(batch)

    def steps_in(self, loader: Any) -> int | None:
        """Count windows, the short one at the end too."""
        length = super().steps_in(loader)
        return None if length is None else -(-length // self.gradient_accumulation_steps)

    def plan_lines(self, plan: Any) -> list[str]:
        """Say how many batches make a step."""
        plan.batches_per_step = self.gradient_accumulation_steps
        return super().plan_lines(plan)


class _List(list[Any]):
    """A window whose batches are all there; not a batch that happens to be a list."""


class _Window(Sequence[Any]):
    """Batches that are fetched one by one, so many in all, and held only for who may want them again."""

    def __init__(self, batches: Iterator[Any], count: int, holds: bool) -> None:
        self._batches, self._count, self._holds = batches, count, holds
        self._held: list[Any] = []
        self._given = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the batches of a window are given once, in their order: iterate over it")

    def __iter__(self) -> Iterator[Any]:
        if self._given and not self._holds:  # Those that follow are of the next window.
            raise TypeError(
                "the batches of a window are given once; to take its gradients several times, override "
                "gradients(batch) and call super().gradients(batch) there each time"
            )
        yield from self._held
        for batch in itertools.islice(self._batches, self._count - self._given):
            self._given += 1
            if self._holds:
                self._held.append(batch)
            yield batch
        if self._given < self._count:
            raise LoaderError(
                f"the loader ended after {self._given} of the {self._count} batches of a window that its length "
                "promised; fix its __len__, or remove it (batches that are None count as well)"
            )


def _look_ahead(batches: Iterator[Any], count: int) -> Iterator[_List]:
    """Fetch whole windows: nobody knows how long the last one is."""
    while window := _List(itertools.islice(batches, count)):
        yield window
