"""Batches of samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
from torch.utils.data import Sampler

from zae.common.argument_checks import check_count, check_flags
from zae.errors import ConfigError

__all__ = ["LengthGroupedBatchSampler"]


class LengthGroupedBatchSampler(Sampler[list[int]]):
    """Batches of samples of similar length, so that little of a batch is padding.

    The samples of an epoch are shuffled, sorted by length within groups of ``group_size`` samples, cut into batches,
    and the batches are shuffled. The order is a function of ``seed`` and epoch, without a state: a run that is resumed
    continues with the next batch, and several ranks take whole batches in turn, each sample once.

    Parameters
    ----------
    lengths : sequence of int
        The length of each sample of the dataset.
    batch_size : int, optional
        Samples of a batch.
    max_tokens : int, optional
        In place of ``batch_size``: the most that the samples of a batch times the longest of them may be. The number of
        batches then differs between epochs.
    group_size : int, optional
        Samples that are sorted together; by default 50 batches.
    drop_last : bool
        Whether the batch of ``batch_size`` that is smaller than the others is left out.
    shuffle : bool
        Whether the order is random; without it all samples are sorted, the longest first, which shows early whether
        the memory suffices.
    seed : int
        Seeds the order.

    Raises
    ------
    ConfigError
        If a sample is longer than ``max_tokens``, or both or none of ``batch_size`` and ``max_tokens`` are given.

    Examples
    --------
    >>> from zae.data import LengthGroupedBatchSampler
    >>> sampler = LengthGroupedBatchSampler([5, 1, 9, 2, 8, 1], batch_size=2)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 3], [1, 5], [2, 4]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        group_size: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise ConfigError("give one of batch_size and max_tokens: samples of a batch, or tokens of one")
        try:
            self.lengths = np.asarray(lengths, dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lengths must have a whole number for each sample ({error})") from None
        if self.lengths.ndim != 1 or not len(self.lengths) or self.lengths.min() < 0:
            raise ConfigError(
                f"lengths must have a number for each sample, none negative; its shape is {self.lengths.shape}"
            )
        self.batch_size = check_count("batch_size", batch_size, optional=True)
        self.max_tokens = check_count("max_tokens", max_tokens, optional=True)
        longest = int(self.lengths.argmax())
        if self.max_tokens is not None and self.lengths[longest] > self.max_tokens:
            raise ConfigError(
                f"sample {longest} has length {self.lengths[longest]}, and a batch max_tokens={self.max_tokens}; write "
                "a larger max_tokens, or leave the sample out"
            )
        self.drop_last, self.shuffle = check_flags(drop_last=drop_last, shuffle=shuffle)
        if self.drop_last and self.max_tokens is not None:
            raise ConfigError("drop_last=True is for batches of batch_size; those of max_tokens differ in size anyway")
        self.seed, self.epoch = check_count("seed", seed, least=0), 0
        group = check_count("group_size", group_size, optional=True)
        typical = self.batch_size or max(1, (self.max_tokens or 0) // max(1, int(self.lengths.mean())))
        self.group_size = group or 50 * typical
        self._made: tuple[int, list[list[int]]] = (-1, [])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration yields; a trainer calls it, a loop of your own has to."""
        self.epoch = epoch

    @property
    def signature(self) -> str:
        """What decides the order; a checkpoint contains it."""
        size = f"max_tokens {self.max_tokens}" if self.batch_size is None else f"batch_size {self.batch_size}"
        seen = blake2b(self.lengths.tobytes(), digest_size=4).hexdigest()
        return f"{size}, groups of {self.group_size}, lengths {seen}, seed {self.seed if self.shuffle else None}"

    def _batches(self) -> list[list[int]]:
        """Return the batches of this epoch; those of the last one are kept, since a length is asked for as well."""
        if self._made[0] != self.epoch:
            draw = np.random.default_rng([self.seed, self.epoch])
            order = draw.permutation(len(self.lengths)) if self.shuffle else np.arange(len(self.lengths))
            size = self.group_size if self.shuffle else len(order)
            groups = [order[start : start + size] for start in range(0, len(order), size)]
            order = np.concatenate([each[np.argsort(-self.lengths[each], kind="stable")] for each in groups])
            batches = self._cut(order.tolist())
            if self.shuffle:
                batches = [batches[index] for index in draw.permutation(len(batches))]
            self._made = (self.epoch, batches)
        return self._made[1]

    def _cut(self, order: list[int]) -> list[list[int]]:
        """Cut an order into batches."""
        if self.batch_size is not None:
            end = len(order) - (len(order) % self.batch_size if self.drop_last else 0)
            return [order[start : min(start + self.batch_size, end)] for start in range(0, end, self.batch_size)]
        batches: list[list[int]] = []
        longest = 0
        for index in order:
            longest = max(longest, int(self.lengths[index]))
            if batches and (len(batches[-1]) + 1) * longest <= self.max_tokens:
                batches[-1].append(index)
            else:
                batches.append([index])
                longest = int(self.lengths[index])
        return batches

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._batches())
