"""What `zae.plan` tries out on copies, so that nothing that is the trainer's own is touched."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from zae import checks, optim, rng, scheduling, session
from zae.data_state import undrawn
from zae.device import to_device
from zae.optimizer_modes import has_modes
from zae.optimizer_state import copy_optimizer
from zae.records import Metrics

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["first_batch", "metric_names", "simulated", "states_after_a_step"]


class NoBatch(Exception):
    """A loader from which a batch cannot be taken and put back."""


def simulated(trainer: Trainer, total_steps: int | None = None) -> tuple[dict[str, Optimizer], dict[str, Any]]:
    """Copy optimizers without their parameters, and schedulers that drive the copies.

    Parameters
    ----------
    trainer : Trainer
        Set up or not; factories are called, with copies.
    total_steps : int, optional
        The planned number of optimizer steps, for a scheduler's factory that asks for it.

    Returns
    -------
    optimizers, schedulers : dict
        By name.
    """
    with rng.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A scheduler of a copy sees no optimizer step.
        twins: dict[str, Optimizer] = {}
        memo: dict[int, Any] = {}
        for name, optimizer in optim.named(trainer.optimizer).items():
            if not isinstance(optimizer, Optimizer):
                optimizer = optimizer([nn.Parameter(p.detach()) for p in trainer._module.parameters()])
            twins[name] = _twin(optimizer)
            memo[id(optimizer)] = twins[name]
        schedulers = {}
        for name, scheduler in optim.named(trainer.scheduler).items():
            if optim.is_factory(scheduler):
                made = scheduling.call_factory(scheduler, optim.driven_by(twins, name), lambda: total_steps)
            else:
                made = copy.deepcopy(scheduler, dict(memo))
            schedulers[name] = made
        return twins, schedulers


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same groups and settings, and one number in place of the parameters of each type."""
    twin = SGD([torch.zeros(1)], lr=0.0)
    twin.defaults = {**optimizer.defaults, "twin_of": type(optimizer).__name__}
    twin.param_groups = [
        {"params": [torch.zeros(1, dtype=d) for d in types]}
        | {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
        for types in [{p.dtype for p in group["params"]}]
    ]
    return twin


def _copied(value: Any) -> Any:
    """Copy a setting of a group: a rate that is a tensor is written in place, by schedulers for instance."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else copy.copy(value)


def first_batch(loader: Any) -> Any:
    """Take a batch such that the loader, and every random stream, is as it was.

    Raises
    ------
    NoBatch
        There is no such way: an iterator would have lost the batch.
    """
    if isinstance(loader, (list, tuple)):
        return copy.deepcopy(next((batch for batch in loader if batch is not None), None))
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise NoBatch
    twin = copy.copy(loader)
    # Set around DataLoader's guard, which is there for the sake of its iterators; this copy has none.
    for name, value in {"_iterator": None, "num_workers": 0, "persistent_workers": False, "timeout": 0,
                        "prefetch_factor": None}.items():  # fmt: skip
        object.__setattr__(twin, name, value)
    with rng.isolated(*rng.generators_of(loader)), undrawn(loader):
        return next(iter(twin), None)


def metric_names(trainer: Trainer, loader: Any, split: str) -> list[str] | None:
    """Try one batch with a copy of the model, and name what would be recorded.

    Parameters
    ----------
    trainer : Trainer
        Its attributes are copied as far as the copying of lists, dicts and sets goes.
    loader : iterable or dict of them
        Where the batch is from.
    split : {"train", "valid"}
        Which step is tried.

    Returns
    -------
    list of str or None
        None where no batch can be taken.
    """
    if isinstance(loader, Mapping):
        per_loader = {name: metric_names(trainer, each, split) for name, each in loader.items()}
        if any(names is None for names in per_loader.values()):
            return None
        lists = {name: names or [] for name, names in per_loader.items()}
        common = [key for key in next(iter(lists.values()), []) if all(key in names for names in lists.values())]
        return common + [f"{name}/{key}" for name, names in lists.items() for key in names]
    try:
        batch = first_batch(loader)
    except NoBatch:
        return None
    if batch is None:
        return None
    twin = _copy_of(trainer)
    twin.mode = "train" if split == "train" else "test"
    twin.model.train(split == "train")
    log = twin.log_train if split == "train" else twin.log_test
    with rng.isolated(), torch.set_grad_enabled(split == "train"):
        batch = to_device(batch, twin.device)
        with twin.forward_context():
            out: Any = twin.train_step(batch) if split == "train" else twin.test_step(batch)
        out = checks.as_mapping(twin, out, batch)
        log.record(out)
        names = list(log.means())
        own = session.own_metrics(twin)
    return [*names, *(name for name in own if name not in names)]


def _copy_of(trainer: Any) -> Any:
    """A trainer of its own: the model copied, containers copied, everything else shared and only looked at."""
    twin = object.__new__(type(trainer))
    twin.__dict__.update({k: copy.copy(v) if type(v) in (list, dict, set) else v for k, v in trainer.__dict__.items()})
    twin._module = twin.model = copy.deepcopy(trainer.unwrap())  # A compiled one would be compiled again.
    twin.log_train, twin.log_test = trainer.log_train.empty_copy(), trainer.log_test.empty_copy()
    twin.train_metrics = Metrics()
    first = next(iter(twin._module.parameters()), None)
    twin.device = trainer.device if first is None else first.device
    return twin


def states_after_a_step(trainer: Trainer) -> dict[str, Any]:
    """Return what each optimizer is going to keep.

    Parameters
    ----------
    trainer : Trainer
        Before or after training.

    Returns
    -------
    dict of str to object
        Before the first step, tensors without data.
    """
    states = {}
    for name, optimizer in optim.named(trainer.optimizer).items():
        if not isinstance(optimizer, Optimizer):
            with rng.isolated():
                optimizer = optimizer([nn.Parameter(p.detach()) for p in trainer._module.parameters()])
        states[name] = optimizer.state or _state_of_a_step(optimizer)
    return states


def _state_of_a_step(optimizer: Optimizer) -> Any:
    """What an optimizer keeps after its first step, which is tried on tensors without data."""
    # What else it holds is copied, large tensors without their data: a step may change it in place.
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in _tensors(vars(optimizer))
                            if each.dim()}  # fmt: skip
    for parameter in optim.parameters_of(optimizer):
        memo[id(parameter)] = shape = torch.zeros_like(parameter, device="meta").requires_grad_()
        shape.grad = torch.zeros_like(shape)
    try:
        twin = copy_optimizer(optimizer, memo, state=defaultdict(dict))
        for group in twin.param_groups:
            group.update(foreach=False, fused=False)
        with rng.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_modes(optimizer):
                twin.train()  # type: ignore[attr-defined]
            type(optimizer).step(twin)
    except Exception:
        return [p for group in optimizer.param_groups for p in group["params"]] * 2  # As much as Adam keeps.
    return twin.state


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
