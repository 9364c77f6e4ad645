"""`find_batch_size`: the largest micro-batch that fits in memory, with as many samples in a step as before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from zae.addons.accumulation import AccumulationWindow, GradientAccumulationAddon
from zae.arguments import Count, check_argument
from zae.data.loaders import describe
from zae.device import is_out_of_memory, release_memory
from zae.errors import ConfigError
from zae.tuning.trials import trial, trial_loader

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["BatchSize", "find_batch_size"]


@dataclass
class BatchSize:
    """A batch size that fits in memory.

    Attributes
    ----------
    micro_batch_size : int
        The ``batch_size`` of the DataLoader.
    gradient_accumulation_steps : int
        Batches in each optimizer step: the option of GradientAccumulationAddon.
    tried : dict of int to bool
        The sizes that were tried, and whether they fit.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    tried: dict[int, bool] = field(default_factory=dict)

    @property
    def effective_batch_size(self) -> int:
        """The samples in each optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    def __str__(self) -> str:
        tried = ", ".join(f"{size} {'fits' if fits else 'does not fit'}" for size, fits in self.tried.items())
        return (
            f"batch_size={self.micro_batch_size}, gradient_accumulation_steps={self.gradient_accumulation_steps}: "
            f"{self.effective_batch_size} samples a step; tried: {tried}"
        )


def find_batch_size(trainer: Trainer, loader: DataLoader[Any], *, effective_batch_size: int | None = None) -> BatchSize:
    """Find the largest micro-batch that fits in memory; the samples in an optimizer step stay the same.

    Two steps of a copy of the trainer are made with each size that is tried: a divisor of the samples in a step, at
    most as many as the dataset has. The trainer, files and random streams are not changed. Batches are
    taken from the beginning of the dataset: where samples differ in length, put the longest ones there, or leave room.
    The copy lies beside the model of the trainer: call it before the first run, with the model still on the CPU.

    Parameters
    ----------
    trainer : Trainer
        In one process.
    loader : DataLoader
        Its ``batch_size`` times the trainer's ``gradient_accumulation_steps`` are the samples in a step.
    effective_batch_size : int, optional
        Another number of samples in a step.

    Returns
    -------
    BatchSize
        What to write: ``DataLoader(batch_size=...)`` and ``gradient_accumulation_steps=...``.

    Raises
    ------
    ConfigError
        One sample alone does not fit; the loader has no ``batch_size``; otherwise as `find_lr`.

    Examples
    --------
    >>> import torch, zae
    >>> class Task(zae.Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch[0]).square().mean()}
    ...     test_step = train_step
    >>> trainer = Task(lambda: torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.AdamW)
    >>> data = torch.utils.data.TensorDataset(torch.ones(100, 4))
    >>> print(zae.find_batch_size(trainer, torch.utils.data.DataLoader(data, batch_size=64)))
    batch_size=64, gradient_accumulation_steps=1: 64 samples a step; tried: 64 fits
    """
    if type(loader) is not DataLoader or loader.batch_size is None:
        raise ConfigError(
            f"find_batch_size makes batches of other sizes, which {describe(loader)} cannot; give a DataLoader with "
            "batch_size=..., over a dataset with a length"
        )
    present_size = trainer.step_window.samples or loader.batch_size * trainer.step_window.batches
    effective = check_argument("effective_batch_size", effective_batch_size or present_size, Count)
    tried: dict[int, bool] = {}
    with trial_loader(loader, "find_batch_size") as trial_data:
        sizes = [size for size in range(1, effective + 1) if effective % size == 0 and size <= len(trial_data.dataset)]
        # The last size that fits is at low, the first one that does not at high.
        low = -1
        high = len(sizes)
        while high - low > 1:
            at = high - 1 if high == len(sizes) else (low + high) // 2
            fits = _fits(trainer, trial_data, sizes[at], effective // sizes[at])
            tried[sizes[at]] = fits
            low, high = (at, high) if fits else (low, at)
    if low < 0:
        raise ConfigError(
            "find_batch_size: one sample alone does not fit in memory; train in lower precision (AMPAddon), with a "
            "smaller model, or in parts on several devices (FSDPAddon)"
        )
    return BatchSize(sizes[low], effective // sizes[low], tried)


def _fits(trainer: Trainer, loader: Any, size: int, count: int) -> bool:
    """Return whether two steps of a copy fit in memory, with batches of this size and so many of them in a step."""
    twin = trial(trainer, "find_batch_size", GradientAccumulationAddon)
    twin.step_window = AccumulationWindow(min(count, 2))  # The second one has the gradients of the first in memory.
    batches = DataLoader(loader.dataset, size, collate_fn=loader.collate_fn, drop_last=True)
    try:
        twin.run(None, batches, max_steps=2)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        del twin
        release_memory()
    return True
