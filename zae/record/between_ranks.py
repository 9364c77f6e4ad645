"""Compare between the ranks what all of them must have alike, before a step or an exchange can go wrong by it.

A rank with another clip, rate or average trains on in silence where each rank holds a part of the weights; one with
another number of epochs, batches or micro-batches waits for the others until the timeout. So the ranks gather what
they have, once, and all of them raise the same error. What is not listed here may differ: loggers, bars, callbacks,
folders, seeds, numbers of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zae.errors import DistributedError, LoaderError
from zae.record import parts
from zae.values.plain_values import content_digest

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["READ_BY", "check_begin", "check_loader", "check_optimizers", "check_schedules"]

READ_BY = {
    "n_epoch": "Run.has_more_epochs",
    "max_steps": "Run.after_step",
    "steps_per_epoch": "Run.after_step",
    "valid_every": "Run.after_step, Run.end_epoch",
    "limit_batches": "Run.new_call",
    "overfit_batches": "Run.new_call",
    "valid_loader": "Run.after_step, Run.end_epoch",
    "parameter": "Engine.wrap, Trainer.normalize",
    "buffer": "Engine.sync_buffers",
    "optimizer": "Trainer.optimizer_step",
    "scheduler": "Trainer.scheduler_step",
}
"""What must be the same on all ranks beside the options that classes declare, and where the loop reads it."""

_OF_SAMPLES = (
    *("len(", "loader.", "loader ", "number of batches of "),
    *("valid_loader.", "valid_loader ", "valid_loader["),
)
"""What the names begin with of what a loader has for its samples."""

_Gather = Callable[[Any], list[Any]]


def check_begin(trainer: Trainer, gather: _Gather, has_whole_model: bool) -> None:
    """Compare options, the arguments of ``run``, loaders and parameters, as the ranks have just joined."""
    record, readers = parts.replicated_options(trainer)
    run = trainer.current_run
    if run.is_call:
        record |= parts.of_call(run)
        record |= _of_loader(run.loader, "loader")
        valid = run.valid_loader if isinstance(run.valid_loader, Mapping) else {"": run.valid_loader}
        for name, loader in valid.items():
            if loader is not None:
                record |= _of_loader(loader, f"valid_loader[{name!r}]" if name else "valid_loader")
    if has_whole_model:
        record |= parts.of_parameters(trainer.unwrap())
    _compare(record, gather, readers)


def check_loader(loader: Any, name: str, gather: _Gather) -> None:
    """Compare a loader that an evaluation, or an own loop, reads."""
    _compare(_of_loader(loader, name), gather, {})


def _of_loader(loader: Any, name: str) -> parts.Record:
    return parts.of_loader(loader, name) | parts.of_samples(loader, name)


def check_optimizers(optimizers: Mapping[str, Optimizer], gather: _Gather) -> None:
    """Compare the optimizers, before an engine takes them."""
    _compare(parts.of_optimizers(optimizers), gather, {})


def check_schedules(schedulers: Mapping[str, Any], gather: _Gather) -> None:
    """Compare the schedules, as a run begins."""
    _compare(parts.of_schedules(schedulers), gather, {})


def _compare(record: Mapping[str, Any], gather: _Gather, readers: Mapping[str, str]) -> None:
    """Raise on all ranks where one has another value; the whole records are sent only then."""
    if len(set(gather(content_digest([*record.items()])))) == 1:
        return
    ranks: list[Mapping[str, Any]] = gather(dict(record))
    names = dict.fromkeys(name for rank in ranks for name in rank)
    by_name = {name: [rank.get(name, _ABSENT) for rank in ranks] for name in names}
    differing = [name for name, values in by_name.items() if any(value != values[0] for value in values)]
    if not differing:  # Two numbers that are written in two ways, 1 and 1.0.
        return
    name = differing[0]
    values = by_name[name]
    if _is_of_data(name):
        raise LoaderError(_explain_data(name, values))
    reader = readers.get(name) or READ_BY.get(name.partition(" ")[0], "Trainer.wrap_loader")
    others = f" (and so do {len(differing) - 1} more: {', '.join(differing[1:4])})" if differing[1:] else ""
    raise DistributedError(
        f"{name} differs between the ranks{others}, which would train apart, or wait for each other: it is "
        f"{_by_rank(values)}. It is read in {reader}; give all ranks the same script, arguments and environment. Only "
        "what a rank shows, logs or keeps to itself may differ"
    )


def _is_of_data(name: str) -> bool:
    """Return whether a name is of the samples of a loader, and not of its settings."""
    if name.endswith(".is_sharded"):
        return False
    return name.startswith(_OF_SAMPLES)


_ABSENT = "absent"


def _by_rank(values: list[Any]) -> str:
    """Return each value with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if value is _ABSENT else repr(value), []).append(rank)
    return " and ".join(
        f"{text} on rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}" for text, group in ranks.items()
    )


def _explain_data(name: str, values: list[Any]) -> str:
    rank = next(rank for rank, value in enumerate(values) if value != values[0])
    is_shown = name.startswith("len(") or " of " in name
    shown = f" ({values[0]} and {values[rank]})" if is_shown else ""
    return (
        f"the ranks have different data: {name} differs between rank 0 and rank {rank}{shown}, and what the script "
        "has divided by rank would be divided again. Give each rank the whole dataset, which is divided for you; or "
        "set loader.is_sharded = True, and each rank gets all that its own loader yields. Data that the script draws "
        "at random are made with the same seed on all ranks"
    )
