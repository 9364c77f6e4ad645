"""Give each rank its share of the samples, each with the same weight in a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zae import random_state
from zae.compose.introspect import AddOnPart
from zae.data.sharding import shard, shards_of
from zae.data.shards import EMPTY, Ranks, Shards
from zae.distributed.collectives import host_group
from zae.distributed.ranks import NotJoined
from zae.errors import ConfigError
from zae.null_context import NULL_CONTEXT, both
from zae.record import between_ranks

__all__ = ["DataShardsAddon"]

_CACHED = 8  # Loaders of training, and of validation, whose shards are kept.


class DataShardsAddon(AddOnPart):
    """Give each rank its share of every loader; a base of `DistributedAddon`."""

    layer = "parallel"
    process_attributes = {"_shared": [], "_shards": None}
    _absent: int
    _leaves_out: bool
    _is_padded: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared: list[tuple[Any, bool, Any]] = []
        self._shards: Shards | None = None
        self._absent = 0
        self._leaves_out = False
        self._is_padded = False

    @property
    def _is_parallel(self) -> bool:
        """Whether this process has joined others."""
        return not isinstance(self.engine, NotJoined) and self.world_size > 1

    def _from_main(self, value: Any) -> Any:
        values = [value if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, group=host_group())
        return values[0]

    def _all_agree(self, value: bool) -> bool:
        return float(self.reduce(torch.tensor(float(value)))) == self.world_size

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Return the share of this rank: for the same loader, the same object each time."""
        loader = super().wrap_loader(loader, training)
        if not self._is_parallel or self.engine.dp_world_size == 1:
            return loader
        for whole, use, sharded in self._shared:
            if whole is loader and use == training:
                return sharded
        between_ranks.check_loader(loader, "loader", self.gather)
        ranks = Ranks(self.engine.dp_rank, self.engine.dp_world_size, self._from_main, self._all_agree, self.gather)
        sharded = shard(loader, training, ranks)
        alike = [entry for entry in self._shared if entry[1] == training]  # Each kind has its own limit.
        others = [entry for entry in self._shared if entry[1] != training]
        self._shared = [*others, *alike[-_CACHED + 1 :], (loader, training, sharded)]
        return sharded

    def batches(self, loader: Any) -> Iterator[Any]:
        """Note how many samples the other ranks have in each batch."""
        self._shards = shards_of(loader)
        try:
            yield from super().batches(loader)
        finally:
            self._shards = None

    def micro_batches(self, batch: Any) -> Sequence[Any]:
        """Leave out, or pad, the batch of a rank without samples; it still counts."""
        batches = super().micro_batches(batch)
        self._absent = 0
        shards = self._shards
        last = self.progress_checker.epoch_batch + len(batches)
        self._leaves_out = shards is not None and shards.leaves_out and last == len(shards)
        if self._leaves_out and self.engine.needs_lockstep_forward:
            return self._padded(list(batches))
        return _PresentBatches(batches, self._note_absent) if self._leaves_out else batches

    def _padded(self, window: list[Any]) -> list[Any]:
        """Give a rank without samples the batch of rank 0, which always has some; it will weigh nothing."""
        batch = self._from_main(window[-1])
        self._is_padded = window[-1] is EMPTY
        return [*window[:-1], batch] if self._is_padded else window

    def sync_context(self, last: bool) -> Any:
        """Let a padded batch draw no random numbers, and count in no statistics of other ranks."""
        inner = super().sync_context(last)
        return self._undrawn(both(inner, _without_rows(self.unwrap()))) if last and self._is_padded else inner

    @contextmanager
    def _undrawn(self, inner: AbstractContextManager[None] = NULL_CONTEXT) -> Iterator[None]:
        """Put the random streams back where they were."""
        before = self._generators.state_dict()
        try:
            with random_state.isolated(), inner:
                yield
        finally:
            self._generators.load_state_dict(before)

    def scale_loss(self, loss: Any, num_targets: Any, count: int) -> Any:
        """Scale the loss by this rank's share of the samples, so that each sample has the same weight."""
        loss = super().scale_loss(loss, num_targets, count)
        if self._shards is None or (num_targets is not None and not self._is_padded):
            return loss
        step = self.progress_checker.epoch_batch + self.current_run.activity.micro_index
        samples_here, samples = self._shards.samples_in(step)
        share = samples_here * self.engine.dp_world_size / samples
        if share == 1:
            return loss
        return {key: part * share for key, part in loss.items()} if isinstance(loss, Mapping) else loss * share

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Refuse to train in one process with a list of devices; explain a batch of one sample."""
        if not self._is_parallel and len(self.devices) > 1:
            raise ConfigError(
                f"device is a list of {len(self.devices)}, and run_epoch or run_batch was called here, in one process; "
                "call run(), which starts the ranks"
            )
        self._is_padded = False
        try:
            outputs = super().gradients(batch)
        except ValueError as error:
            if self._is_parallel and "Expected more than 1 value per channel" in str(error):
                error.add_note(
                    f"zae: this step has left a single sample to rank {self.rank} of {self.world_size}, of which batch "
                    "normalization cannot compute a variance; leave the short last step of an epoch out, "
                    "DataLoader(..., drop_last=True), or choose another batch_size"
                )
            raise
        self._absent += self._is_padded
        return outputs[:-1] if self._is_padded else outputs

    def _note_absent(self) -> None:
        """Note that a batch of the window leaves this rank without samples."""
        self._absent += 1

    def normalize(self, num_targets: list[Any]) -> None:
        """Count no targets in a padded batch."""
        if self._is_padded and num_targets[-1] is not None:
            num_targets = [*num_targets[:-1], 0.0]
        super().normalize(num_targets)

    def zero_grad(self) -> None:
        """Count the batches without samples too, so that all ranks count alike."""
        super().zero_grad()
        self.progress_checker.batch += self._absent
        self.progress_checker.epoch_batch += self._absent
        self._absent = 0

    # -------------------------------------------------------------------------------------------------- padding

    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """Take part in the forward of the others where this rank has fewer batches."""
        batches = super().evaluation_batches(loader)
        return self._in_step(batches, loader) if self.engine.needs_lockstep_forward and self._is_parallel else batches

    def _in_step(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Yield the batches, with a forward of another one whenever this rank has none and others do."""
        shards = shards_of(loader)
        counts = self.gather(None if shards is None else len(shards))
        longest = None if None in counts else max(counts)
        spare = None
        all_have_one = False
        for index in itertools.count():
            batch = next(batches, EMPTY)
            has_samples = batch is not None and batch is not EMPTY
            if longest is None or not all_have_one:
                present = self.gather((batch is not EMPTY, has_samples))
                if not any(is_there for is_there, _ in present):
                    return
                if not any(samples for _, samples in present):  # None on each rank: a batch that was left out.
                    yield None
                    continue
                if not all_have_one and not all(samples for _, samples in present):
                    source = [samples for _, samples in present].index(True)
                    spare = self.gather(batch if self.rank == source else None)[source]
                all_have_one = True
            elif index >= longest:
                return
            if has_samples:
                spare = batch
            else:
                with self._undrawn(), self.forward_context():
                    getattr(self, self.current_run.activity.evaluation.step)(self.to_device(spare))
            if batch is not EMPTY:
                yield batch


@contextmanager
def _without_rows(model: nn.Module) -> Iterator[None]:
    """Let synchronized batch normalizations exchange the statistics of no rows, and normalize as in an evaluation.

    What other normalizations compute of a padded batch is lost, since every rank gets the buffers of rank 0.
    """
    rows: dict[nn.Module, Tensor] = {}

    def take(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        rows[module] = inputs[0]
        return inputs[0][:0]

    def give_back(module: Any, inputs: tuple[Tensor, ...], of_no_rows: Tensor) -> Tensor:
        output = rows.pop(module)
        if module.running_mean is not None:
            statistics = module.running_mean.clone(), module.running_var.clone()
            output = nn.functional.batch_norm(output, *statistics, module.weight, module.bias, eps=module.eps)
        return output + of_no_rows.sum()  # A sum of nothing: its backward takes part in that of the other ranks.

    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm) and module.training]
    hooks: list[Any] = [norm.register_forward_pre_hook(take) for norm in norms]
    hooks += [norm.register_forward_hook(give_back) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _PresentBatches(Sequence[Any]):
    """The batches of a window in which some rank has no samples."""

    def __init__(self, batches: Sequence[Any], note_absent: Callable[[], None]) -> None:
        self._batches = batches
        self._note_absent = note_absent

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the batches of a window are yielded once, in order: iterate over it")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if batch is EMPTY:
                self._note_absent()
            else:
                yield batch
