"""Data parallel loading: a share of the samples for each rank, with the same weight for each sample of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zae.addon import AddOnBase
from zae.data import sharding
from zae.errors import ConfigError

__all__ = ["ShardingAddon"]

_CACHED = 8  # Loaders of training, and of validation, whose shares are kept.


class ShardingAddon(AddOnBase):
    """Give each rank its share of every loader; a base of the add-ons that train on several devices."""

    layer = "parallel"
    process_attributes = {"_shared": [], "_shares": None}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rank, self._world = 0, 1
        self._shared: list[tuple[Any, bool, Any]] = []
        self._shares: sharding.Shares | None = None
        self._micro = self._absent = 0
        self._leaves_out = False

    def _from_main(self, value: Any) -> Any:
        values = [value if self._rank == 0 else None]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def _all_agree(self, value: bool) -> bool:
        return float(self.reduce(torch.tensor(float(value)))) == self._world

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Return the share of this rank: for the same loader, the same object each time."""
        loader = super().wrap_loader(loader, training)
        if self._world == 1:
            return loader
        shares = [share for known, use, share in self._shared if known is loader and use == training]
        if not shares:
            ranks = sharding.Ranks(self._rank, self._world, self._from_main, self._all_agree)
            shares = [sharding.shard(loader, training, ranks)]
            alike = [each for each in self._shared if each[1] == training]  # Each kind has a limit of its own.
            others = [each for each in self._shared if each[1] != training]
            self._shared = [*others, *alike[-_CACHED + 1 :], (loader, training, shares[0])]
        if training:
            sharding.set_epoch(shares[0], self.progress_checker.epoch)
        return shares[0]

    def batches(self, loader: Any) -> Iterator[Any]:
        """Note how many samples the other ranks have in each batch."""
        self._shares = sharding.shares_of(loader)
        try:
            yield from super().batches(loader)
        finally:
            self._shares = None

    def micro_batches(self, batch: Any) -> Sequence[Any]:
        """Leave out the batch of a rank without samples; it still counts."""
        found = super().micro_batches(batch)
        self._micro, self._absent = -1, 0
        shares = self._shares
        last = self.progress_checker.epoch_batch + len(found)
        self._leaves_out = shares is not None and shares.leaves_out and last == len(shares)
        return _Given(found, self) if self._leaves_out else found

    def sync_context(self, last: bool) -> Any:
        """Count the micro-batches of this step."""
        self._micro += 1
        return super().sync_context(last)

    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Scale the loss by this rank's share of the samples, so that each sample has the same weight."""
        loss = super().scale_loss(loss, num_targets, count)
        if self._shares is None or num_targets is not None:
            return loss
        own, together = self._shares.share(self.progress_checker.epoch_batch + self._micro)
        share = own * self._world / together
        if share == 1:
            return loss
        return {key: each * share for key, each in loss.items()} if isinstance(loss, Mapping) else loss * share

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Refuse to train in one process with a list of devices; explain a batch of one sample."""
        if self._world == 1 and len(self.devices) > 1:
            raise ConfigError(
                f"device is a list of {len(self.devices)}, and run_epoch or run_batch was called here, in one process; "
                "call run(), which starts the ranks"
            )
        try:
            return super().gradients(batch)
        except ValueError as error:
            if self._world > 1 and "Expected more than 1 value per channel" in str(error):
                error.add_note(
                    f"zae: this step has left a single sample to rank {self._rank} of {self._world}, of which batch "
                    "normalization cannot compute a variance; leave the short last step of an epoch out, "
                    "DataLoader(..., drop_last=True), or choose another batch_size"
                )
            raise

    def zero_grad(self) -> None:
        """Count the batches without samples too, so that all ranks count alike."""
        super().zero_grad()
        self.progress_checker.batch += self._absent
        self.progress_checker.epoch_batch += self._absent
        self._absent = 0


class _Given(Sequence[Any]):
    """The batches of a window in which some rank has no samples."""

    def __init__(self, batches: Sequence[Any], trainer: ShardingAddon) -> None:
        self._batches, self._trainer = batches, trainer

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the batches of a window are yielded once, in order: iterate over it")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if sharding.is_empty(batch):
                self._trainer._absent += 1
            else:
                yield batch
