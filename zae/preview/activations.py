"""Measure the activations of a batch: the bytes that a forward keeps for its backward, with a copy of the trainer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zae.common import optim, random_state
from zae.common.device import to_device
from zae.common.torch_private import find, is_compiled_by_hand, sparse_parts
from zae.common.walk import tensors_in
from zae.composition.introspect import add_ons_of, is_engine_slot, slots_of
from zae.preview.dry_run import NotTried, begin_call, copy_to_train, first_batch

__all__ = ["measure_activations"]

_MODE: Any = find("torch.utils._python_dispatch", "TorchDispatchMode")
_COMPILED = "the model is compiled, and the compiler decides what is kept"


def measure_activations(run: Any) -> int:
    """Return the bytes on the device that ``train_step`` leaves for the backward of one batch.

    They are those of all storages that the step has made and that are still there when it has returned. The batch
    itself, parameters and buffers are not counted. `NotTried` is raised where that cannot be found without a side
    effect; what the step raises is raised.
    """
    _check(run.trainer)
    batch, storages = first_batch(run.loader), _Storages()
    with random_state.isolated():
        twin = copy_to_train(run.trainer)
        begin_call(twin, [batch], None, run.limits)
        with twin.ready():  # Its add-ons choose the precision and wrap the model.
            if isinstance(twin.model, torch.nn.Module) and any(map(is_compiled_by_hand, twin.model.modules())):
                raise NotTried(_COMPILED)
            if hasattr(run.trainer, "prepare_copy") and (reason := run.trainer.prepare_copy(twin.unwrap())):
                raise NotTried(reason)
            twin.unwrap().train()
            if hasattr(run.trainer, "largest_part"):
                batch = run.trainer.largest_part(batch)
            batch = to_device(batch, twin.device)
            with storages, twin.forward_context():
                output = twin.train_step(batch)
            gc.collect()  # Tensors in reference cycles would be counted or not, depending on when Python collects them.
            kept = storages.count(twin.device)
            del output  # The backward begins from it.
    return kept


def _check(trainer: Any) -> None:
    """Raise `NotTried` where one process cannot make the step of a run, eagerly."""
    if _MODE is None:
        raise NotTried("this release of torch has no TorchDispatchMode")
    cls, module = type(trainer), trainer.unwrap()
    engines = [each for each in add_ons_of(cls) if is_engine_slot(each.slot)]
    if len(engines) > 1 or not all(hasattr(each, "prepare_copy") for each in engines):
        names = " and ".join(each.__name__ for each in engines)
        raise NotTried(
            f"plan() does not start the ranks of {names}; plan without it for the activations of one process"
        )
    if "compile" in slots_of(cls) or any(map(is_compiled_by_hand, (trainer.model, *module.modules()))):
        raise NotTried(_COMPILED)
    if optim.has_lazy([*module.parameters(), *module.buffers()]):
        raise NotTried("the model is lazy: its first batch makes its weights")


class _Storages(_MODE or object):  # type: ignore[misc]
    """Notes each storage that an operation makes, with a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not used again as long as the reference is there. The size is 0 for a storage that was
        # there before: an operation reads it first.
        self.made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs), is_made=False)
        result = function(*args, **kwargs)
        self._note(result, is_made=True)
        return result

    def _note(self, value: Any, is_made: bool) -> None:
        for storage in _storages_in(value):
            reference = StorageWeakRef(storage)
            size = storage.nbytes() if is_made else 0
            self.made.setdefault(reference.cdata, (reference, size, storage.device.type))

    def count(self, device: torch.device) -> int:
        """Return the bytes of the storages on a type of device that are still there."""
        kept = (size for reference, size, kind in self.made.values() if kind == device.type and not reference.expired())
        return sum(kept)


def _storages_in(value: Any) -> Iterator[Any]:
    """Yield the storages of the tensors in a value, those within a tensor subclass and a sparse tensor included."""
    for each in tensors_in(value):
        if hasattr(each, "__tensor_flatten__"):
            yield from _storages_in([getattr(each, name) for name in each.__tensor_flatten__()[0]])
        elif each.layout is torch.sparse_coo:
            yield from _storages_in(sparse_parts(each))
        elif each.layout is torch.strided:
            yield each.untyped_storage()
