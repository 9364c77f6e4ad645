"""Gradient accumulation: one optimizer step for several loader batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zae.addon import AddOnBase, replaces
from zae.arguments import Count
from zae.data.loaders import batch_size_of, describe, length_of
from zae.data.sharding import shards_of
from zae.errors import ConfigError, LoaderError, StepError
from zae.parts import StepWindow
from zae.values.walk import leading_dimension, owners_of_user

__all__ = ["AccumulationWindow", "GradientAccumulationAddon"]

_REPEATED = ("gradients", "run_batch")


class AccumulationWindow(StepWindow):
    """A window of several batches, which are taken from the loader one by one.

    Parameters
    ----------
    batches : int
        The batches of a step.
    samples : int, optional
        The samples of a step over all ranks, instead of ``batches``.
    """

    def __init__(self, batches: int = 1, samples: int | None = None) -> None:
        self.batches = batches
        self.samples = samples

    def batches_of(self, batch_size: int | None, ranks: int) -> int | None:
        """Return how many batches make a step of a loader; refuse samples that are not a multiple."""
        if self.samples is None:
            return self.batches
        return None if batch_size is None else _quotient(self.samples, batch_size, ranks)

    def group(
        self, batches: Iterator[Any], count: int, remaining: int | None, holds: bool = False
    ) -> Iterator[Sequence[Any]]:
        """Yield the windows of an epoch.

        Parameters
        ----------
        batches : iterator
            Those of the loader.
        count : int
            The batches of a window, as `batches_of` says.
        left : int or None
            How many there are; None is unknown. Then whole windows are fetched: the number of batches in one has to be
            known before its first backward.
        holds : bool
            Whether to keep the batches of each window, as they may be needed again.
        """
        if remaining is None:
            yield from _look_ahead(batches, count)
            return
        while remaining > 0:
            window = _Window(batches, min(count, remaining), holds)
            remaining -= len(window)
            yield window


class GradientAccumulationAddon(AddOnBase):
    """Accumulate the gradients of several loader batches in each optimizer step.

    The gradient of a window is the mean over its true number of batches: with 5 batches and
    ``gradient_accumulation_steps=4``, the first step divides by 4 and the second by 1. Where ``train_step`` returns
    ``num_targets``, each target of a window has the same weight instead; with ``global_batch_size``, each sample.

    One batch is in memory at a time. All batches of a window are where the loader has no length, and where your class
    overrides ``gradients``, which may compute those of one window twice (SAM, a closure).

    Parameters
    ----------
    gradient_accumulation_steps : int
        Loader batches in each optimizer step; 1 changes nothing.
    global_batch_size : int, optional
        Samples in each optimizer step, over all ranks; a multiple of the loader's ``batch_size`` times the number of
        ranks. It takes the place of ``gradient_accumulation_steps``.

    Raises
    ------
    ConfigError
        One is not an integer of at least 1; both are given; or ``global_batch_size`` is not a multiple.
    LoaderError
        A loader yielded fewer or more batches than its length, or does not state its batch size.

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
    step_window: AccumulationWindow

    replicated_options = {
        "gradient_accumulation_steps": "micro_batches",
        "global_batch_size": "micro_batches",
    }

    def __init__(
        self, *args: Any, gradient_accumulation_steps: Count = 1, global_batch_size: Count | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if global_batch_size is not None and gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} and "
                f"global_batch_size={global_batch_size} both say how long a step is; leave one of them out"
            )
        self.step_window = AccumulationWindow(gradient_accumulation_steps, global_batch_size)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Loader batches in each optimizer step; 1 where ``global_batch_size`` says it."""
        return self.step_window.batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.step_window.batches = steps

    @property
    def global_batch_size(self) -> int | None:
        """Samples in each optimizer step, over all ranks, where they were given."""
        return self.step_window.samples

    @global_batch_size.setter
    def global_batch_size(self, samples: int | None) -> None:
        self.step_window.samples = samples

    def batches(self, loader: Any) -> Iterator[Any]:
        """Group the loader's batches into windows."""
        batches = super().batches(loader)
        window = self.step_window
        if window.batches == 1 and window.samples is None:
            yield from batches  # Each batch is a step.
            return
        length = length_of(loader)
        count = self._batches_per_step(loader)
        remaining = None if length is None else length - self.progress_checker.epoch_batch
        # An override of these may compute the gradients of one window several times.
        may_repeat = bool(owners_of_user(type(self), *_REPEATED))
        yield from window.group(batches, count, remaining, may_repeat)
        for _ in batches:  # A loader may count its batches only when it is asked for one more.
            raise LoaderError(f"the loader has a length of {length}, but yielded more batches; fix its __len__")

    def _batches_per_step(self, loader: Any) -> int:
        """Return how many batches of a rank's loader make a step."""
        window = self.step_window
        samples = self.step_window.samples
        if samples is None:
            return window.batches
        shards = shards_of(loader)
        count = window.batches_of(
            batch_size_of(loader), self.engine.dp_world_size if shards is None else shards.ranks.size
        )
        if count is None:
            raise LoaderError(
                f"global_batch_size={samples} needs the batch size of the loader, which it does not "
                f"state ({describe(loader)}); write gradient_accumulation_steps=... instead"
            )
        _check_drop_last(loader, samples)
        return count

    def count_targets(self, values: Mapping[str, Any], batch: Any) -> Any:
        """Count the samples of a batch, where the size of a step is given in samples."""
        count = super().count_targets(values, batch)
        if count is not None or self.step_window.samples is None:
            return count
        samples = leading_dimension(batch)
        if samples is None:
            raise StepError(
                f"global_batch_size={self.global_batch_size} weighs the samples of a step alike, and a batch of type "
                f"{type(batch).__name__} does not tell how many it has; return their number from train_step: "
                "'num_targets'"
            )
        return samples

    @replaces
    def micro_batches(self, batch: Any) -> Sequence[Any]:
        """Return the batches of a window; anything else is a window with one batch."""
        return batch if isinstance(batch, (_Window, _List)) else super().micro_batches(batch)

    def steps_per_epoch(self, loader: Any) -> int | None:
        """Return the number of windows, with the short one at the end."""
        length = super().steps_per_epoch(loader)
        return None if length is None else -(-length // self._batches_per_step(loader))


def _quotient(together: int, batch_size: int, ranks: int) -> int:
    """Return how many batches of each rank make a step of so many samples; refuse a fraction."""
    count, remainder = divmod(together, batch_size * ranks)
    if not remainder:
        return count
    sizes = f"a batch of the loader has {batch_size} samples" + f", on each of {ranks} ranks" * (ranks > 1)
    if together % ranks:
        raise ConfigError(
            f"global_batch_size={together} cannot be divided by {ranks} ranks; choose one that every number of ranks "
            "divides that this run may have"
        )
    fitting = max(n for n in range(1, batch_size + 1) if together // ranks % n == 0)
    raise ConfigError(
        f"global_batch_size={together} is not a multiple of {batch_size * ranks}: {sizes}; write "
        f"batch_size={fitting} in the DataLoader, or another global_batch_size"
    )


def _check_drop_last(loader: Any, together: int) -> None:
    """Refuse to leave out samples, of which another number of ranks would leave out others."""
    sampler = getattr(loader, "batch_sampler", None)
    samples = length_of(getattr(sampler, "sampler", None))
    if getattr(sampler, "drop_last", False) and samples is not None and samples % together:
        raise ConfigError(
            f"drop_last=True leaves out other samples on another number of ranks: {samples} are not a multiple of "
            f"global_batch_size={together}; write drop_last=False in the DataLoader"
        )


class _List(list[Any]):
    """A window with all of its batches; a class, as a batch may be a list."""


class _Window(Sequence[Any]):
    """The next ``count`` batches, fetched one by one, and kept only where they may be needed again."""

    def __init__(self, batches: Iterator[Any], count: int, holds: bool) -> None:
        self._batches = batches
        self._count = count
        self._holds = holds
        self._window: list[Any] = []
        self._yielded = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the batches of a window are yielded once, in order: iterate over it")

    def __iter__(self) -> Iterator[Any]:
        if self._yielded and not self._holds:  # The batches that follow belong to the next window.
            raise TypeError(
                "the batches of a window are yielded once; to compute its gradients several times, override "
                "gradients(batch) and call super().gradients(batch) there each time"
            )
        yield from self._window
        for batch in itertools.islice(self._batches, self._count - self._yielded):
            self._yielded += 1
            if self._holds:
                self._window.append(batch)
            yield batch
        if self._yielded < self._count:
            raise LoaderError(
                f"the loader ended after {self._yielded} of the {self._count} batches of a window that its length "
                "promised; fix its __len__, or remove it (batches that are None count as well)"
            )


def _look_ahead(batches: Iterator[Any], count: int) -> Iterator[_List]:
    """Fetch whole windows: the length of the last one is not known before."""
    while window := _List(itertools.islice(batches, count)):
        yield window
