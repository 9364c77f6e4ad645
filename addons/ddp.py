"""What engines share in which each rank has the whole model: DistributedDataParallel, and gradients without it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zae.arguments import checked
from zae.distributed.blocks import check_shapes, check_tables
from zae.distributed.collectives import average
from zae.errors import DistributedError
from zae.model.weights import named_parameters
from zae.null_context import NULL_CONTEXT, both
from zae.parts import Engine, SingleProcess
from zae.torch_private import arrange_buckets, can_arrange_buckets, check_reducer

if TYPE_CHECKING:
    from zae.addons.distributed import DistributedAddon as AddOnPart  # An engine derives from both.
else:
    from zae.compose.introspect import AddOnPart

__all__ = ["DDPEngine", "Replica", "ReplicatedAddon"]

_SHOWN = 10
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"  # torch < 2.13


class Replica(DistributedDataParallel):
    """DistributedDataParallel that records whether it was called, and forwards attributes to its model.

    While it is idle it only calls the model: nothing is exchanged, and the backward averages no gradients.
    """

    _used = False
    _is_idle = False  # Whether calls go to the model itself.
    _is_made = False
    _step = -1

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if not can_arrange_buckets():  # torch would arrange them after the first step, unless it looks for unused ones.
            options["find_unused_parameters"] = True
        # The last parameters come first, where buckets are arranged at once: their gradients are there first.
        vars(self)["_step"] = 1 if options["find_unused_parameters"] else -1
        options[_SYNC_BUFFERS] = False
        super().__init__(module, **options)
        if hasattr(module, "dim"):
            del self.dim  # Used for several devices in one process; a model may have an attribute of this name.
        self._trained_by_id = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
        # torch arranges the buckets of gradients after the first step, in the order in which its gradients came. The
        # order of a sum over three or more ranks depends on it: the first step after a resume would differ in its
        # last bits.
        arrange_buckets(self.reducer)
        self._is_made = True

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return parameters[:: self._step], expect_sparse[:: self._step]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_idle:
            return self.module(*args, **kwargs)
        vars(self)["_used"] = True  # Not through __setattr__, which takes longer.
        return super().forward(*args, **kwargs)

    @contextmanager
    def _idling(self) -> Iterator[None]:
        """Call the model itself within the block."""
        before = self._is_idle
        vars(self)["_is_idle"] = True
        try:
            yield
        finally:
            vars(self)["_is_idle"] = before

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that the wrapper does not have on the model."""
        if type(value) is bool and name in vars(self):  # The wrapper sets one in each step.
            vars(self)[name] = value
            return
        is_own = not self._is_made or name == "module" or name in vars(self) or hasattr(type(self), name)
        if is_own or (name.startswith("_") and not hasattr(self.module, name)):
            super().__setattr__(name, cast(Any, value))
        else:
            setattr(self.module, name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True


class DDPEngine(Engine):
    """The engine of ranks with a copy of the model each, whose gradients DistributedDataParallel averages.

    It averages them while the backward computes them. Where it cannot, they are averaged after the backward, to the
    same sums: for a rank without samples, parameters outside of the model, and steps that call parts of the model.

    Parameters
    ----------
    inner : Engine
        The engine of the ranks.
    device : torch.device
        That of this rank.

    Attributes
    ----------
    find_unused_parameters : bool
        As for DistributedDataParallel.
    takes_turns : bool
        Whether a step may train with some of several optimizers: the wrapper would wait for the others.
    is_short : bool
        Whether some rank has no samples in the present step, in which the wrapper would wait for it.
    """

    def __init__(self, inner: SingleProcess, device: torch.device, is_lockstep: bool = False) -> None:
        super().__init__(inner)
        self._device = device
        self.needs_lockstep_forward = is_lockstep
        self.find_unused_parameters = False
        self.takes_turns = False
        self.is_short = False
        self.release()

    def release(self) -> None:
        """Drop the wrapper, and what is known of the model in it."""
        self.module: Any = None  # The model inside of the wrapper.
        self.replica: Replica | None = None  # The wrapper, if there is something to train.
        self._sparse: set[int] = set()  # The ids of the parameters with sparse gradients.
        self._wrapped_ids: list[int] = []  # The ids of the trained parameters that the wrapper was made for.
        self._outside: list[Tensor] = []  # Those of them that it does not hold.
        self._marks_used = False  # Whether the wrapper takes parameters for used that the next step may leave out.

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has wrapped no model."""
        other = DDPEngine(self.inner, self._device, self.needs_lockstep_forward)
        return {**vars(other), "find_unused_parameters": self.find_unused_parameters}

    # ------------------------------------------------------------------------------------------------- the wrapper

    def wrap(self, module: nn.Module, trains: bool) -> Any:
        """Return the wrapper, unless there is nothing to train."""
        self.release()
        self.module = self.inner.wrap(module, trains)
        if trains:
            self._make_replica()
        return self.replica or self.module

    def _make_replica(self) -> None:
        check_shapes(self.module)
        check_tables(self.module)
        self._sparse = _sparse_in(self.module)
        self.replica = None
        self._marks_used = False
        if any(parameter.requires_grad for parameter in self.module.parameters()):
            device_ids = None if self._device.type == "cpu" else [self._device]
            unused = self.find_unused_parameters
            self.replica = Replica(self.module, device_ids=device_ids, find_unused_parameters=unused)

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Send the weights and buffers of rank 0, with parameters outside of the model."""
        self.inner.begin(module, parameters)
        self._wrapped_ids = _trained(parameters)
        tensors = {} if self.replica is None else self.replica._trained_by_id
        self._outside = [
            parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in tensors
        ]

    # ------------------------------------------------------------------------------------------------------ a step

    def begin_step(self, module: nn.Module, parameters: Sequence[Tensor]) -> nn.Module:
        """Return what this step calls; make the wrapper anew where a parameter was frozen, unfrozen or added."""
        if self._wrapped_ids != _trained(parameters):
            self._make_replica()
            self.begin(module, parameters)
        elif self._marks_used:
            self._make_replica()
        if self.replica is not None:
            vars(self.replica)["_used"] = False
        return self.replica or cast(nn.Module, self.module)

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Let the wrapper average gradients in the backward of the last micro-batch, where all ranks have it."""
        inner = self.inner.sync_context(last)
        averages_late = self.is_short or self.takes_turns
        return both(inner, self.without_wrapper()) if averages_late or not last else inner

    def without_wrapper(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the wrapper go to the model itself, and exchange nothing."""
        return NULL_CONTEXT if self.replica is None else self.replica._idling()

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients that the wrapper has not averaged: all ranks add them up."""
        if self.is_short:
            # The wrapper notes which parameters a backward has used, also without it, until it averages itself.
            self._marks_used = self.find_unused_parameters
            rest = parameters
        elif self.replica is None or not self.replica._used or self.takes_turns:  # It misses calls of submodules.
            rest = parameters
        else:
            self._check_used(self.replica)
            rest = self._outside
        average(rest, self.world_size, self.reduce, self._sparse)

    def _check_used(self, replica: Replica) -> None:
        """Refuse a step that left parameters without gradients: the wrapper has then not averaged any."""
        try:
            check_reducer(replica)
        except RuntimeError as error:
            tensors = replica._trained_by_id
            named = named_parameters(self.module).items()
            names = [name for name, parameter in named if parameter.grad is None and id(parameter) in tensors]
            if names and not self.find_unused_parameters:
                raise self.left_out(names) from error
            raise

    def left_out(self, names: list[str]) -> DistributedError:
        """Return the error of a step that has left these parameters without gradients."""
        listing = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        which = f"{len(names)} parameters ({listing})" if names else "parameters in the last batch of a step"
        remedy = (
            "Let the loss depend on all that the model returns, or detach the rest"
            if self.find_unused_parameters
            else "Write find_unused_parameters=True if that is meant, or freeze them: parameter.requires_grad_(False)"
        )
        return DistributedError(
            f"train_step did not use {which} on rank {self.rank}, so they have no gradient to average over the ranks. "
            f"{remedy}"
        )


class ReplicatedAddon(AddOnPart):
    """Give each rank a copy of the model, with averaged gradients; a base of `MultiGPUAddon`.

    Parameters
    ----------
    lockstep : bool, optional
        Whether every rank calls each step as often as the others, so that a step may exchange tensors with them. By
        default it is so where the model has a ``torch.nn.SyncBatchNorm``.

    Attributes
    ----------
    find_unused_parameters : bool
        As for DistributedDataParallel.
    """

    layer = "parallel"
    find_unused_parameters: bool

    replicated_options = {
        "lockstep": "micro_batches",
    }

    @checked
    def __init__(self, *args: Any, lockstep: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lockstep = lockstep
        self.find_unused_parameters = False

    @property
    def _ddp(self) -> DDPEngine | None:
        """The engine that averages gradients, once the ranks have joined."""
        return self.engine.find(DDPEngine)

    def build_engine(self) -> SingleProcess:
        """Return the engine that averages gradients."""
        is_lockstep = self.lockstep
        if is_lockstep is None:
            is_lockstep = any(isinstance(module, nn.SyncBatchNorm) for module in self.unwrap().modules())
        return DDPEngine(super().build_engine(), self.device, is_lockstep)

    def teardown(self) -> None:
        """Drop the wrapper."""
        super().teardown()
        if self._ddp is not None:
            self._ddp.release()

    def wrap_model(self, model: nn.Module) -> Any:
        """Wrap the model, unless there is nothing to train."""
        if self._ddp is not None:
            self._ddp.find_unused_parameters = self.find_unused_parameters
        return super().wrap_model(model)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Let ``self.model`` be the model itself: the wrapper would wait for ranks with fewer batches."""
        ddp = self._ddp
        before = self.model
        if ddp is not None and ddp.replica is not None:
            self.model = ddp.module
        try:
            with NULL_CONTEXT if ddp is None else ddp.without_wrapper(), super().evaluation_context():
                yield
        finally:
            self.model = before

    def _check_model(self, model: nn.Module) -> None:
        """Refuse tables whose forward changes weights."""
        super()._check_model(model)
        check_tables(model)

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Average the gradients over the ranks."""
        ddp = self._ddp
        if ddp is None or not self._is_parallel:
            return super().gradients(batch)
        ddp.takes_turns = ddp.find_unused_parameters and len(self.optimizers) > 1
        self.model = ddp.begin_step(self.unwrap(), self.parameters)
        try:
            return super().gradients(batch)
        except RuntimeError as error:
            if "find_unused_parameters" in str(error) and not isinstance(error, DistributedError):
                raise ddp.left_out([]) from error
            raise

    def micro_batches(self, batch: Any) -> Any:
        """Do not use the wrapper in a step in which a rank has no samples: it would wait for that rank."""
        batches = super().micro_batches(batch)
        if self._ddp is not None:
            self._ddp.is_short = self._leaves_out and not self._ddp.needs_lockstep_forward
        return batches


def _trained(parameters: Sequence[Tensor]) -> list[int]:
    """Return the ids of the parameters that are trained."""
    return [id(parameter) for parameter in parameters if parameter.requires_grad]


def _sparse_in(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return {id(table.weight) for table in tables if table.sparse}
