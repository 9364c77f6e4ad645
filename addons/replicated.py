"""What engines share in which each rank has the whole model: DistributedDataParallel, and gradients without it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zae.addon import Fact
from zae.common.torch_private import arrange_buckets, can_arrange_buckets, check_reducer
from zae.distributed.blocks import check_tables
from zae.distributed.collectives import average, broadcast
from zae.errors import DistributedError
from zae.optimizers.quantized import check_replicated

if TYPE_CHECKING:
    from zae.addons.distributed import DistributedAddon as AddOnPart  # An engine derives from both.
else:
    from zae.compose.introspect import AddOnPart

__all__ = ["Replica", "ReplicatedAddon"]

_SHOWN = 10
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"  # torch < 2.13


class Replica(DistributedDataParallel):
    """DistributedDataParallel that records whether it was called, and forwards attributes to its model."""

    _used = False
    _made = False
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
        self._held = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
        # torch arranges the buckets of gradients after the first step, in the order in which its gradients came. The
        # order of a sum over three or more ranks depends on it: the first step after a resume would differ in its
        # last bits.
        arrange_buckets(self.reducer)
        self._made = True

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return parameters[:: self._step], expect_sparse[:: self._step]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_used"] = True  # Not through __setattr__, which takes longer.
        return super().forward(*args, **kwargs)

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
        own = not self._made or name == "module" or name in vars(self) or hasattr(type(self), name)
        if own or (name.startswith("_") and not hasattr(self.module, name)):
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


class ReplicatedAddon(AddOnPart):
    """Average the gradients of the copies of a model, one on each rank; a base of `MultiGPUAddon`.

    The gradients are averaged by DistributedDataParallel while the backward computes them. Where it cannot, they are
    averaged after the backward, to the same sums: for a rank without samples, parameters outside of the model, and
    steps that call parts of the model.

    Attributes
    ----------
    find_unused_parameters : bool
        As for DistributedDataParallel.
    """

    layer = "parallel"
    process_attributes = {"_inner": None, "_engine": None, "_known": [], "_outside": [], "_owners": [],
                          "_marks_used": False}  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.find_unused_parameters = False
        self._inner: Any = None  # The model inside of the wrapper.
        self._engine: Replica | None = None
        self._sparse: set[int] = set()  # The parameters with sparse gradients.
        self._known: list[int] = []  # The trained parameters that the wrapper was made for.
        self._outside: list[Tensor] = []  # Those of them that it does not hold.
        self._owners: list[dict[str, Tensor | None]] = []  # The dicts of buffers: a forward may replace one.
        self._marks_used = False  # Whether the wrapper takes parameters for used that the next step may leave out.
        self._has_unsent = False  # Whether a forward may have changed buffers since they were sent.

    def setup(self) -> None:
        """Give every rank the weights and buffers of rank 0."""
        super().setup()
        if self._is_parallel:
            check_replicated(self.optimizers)
            self._has_unsent = False
            self._begin_group_alike()

    def _begin_group_alike(self) -> None:
        """Send the weights and buffers of rank 0, with parameters outside of the model."""
        self._owners = [module._buffers for module in self.unwrap().modules()]
        self._known, held = self._trained(), {} if self._engine is None else self._engine._held
        self._outside = [each for each in self.parameters if each.requires_grad and id(each) not in held]
        own = list(self.unwrap().parameters())
        known = {id(parameter) for parameter in own}
        broadcast([*own, *(each for each in self.parameters if id(each) not in known)])
        self._send_buffers()

    def _trained(self) -> list[int]:
        return [id(parameter) for parameter in self.parameters if parameter.requires_grad]

    def _send_buffers(self) -> None:
        found = {id(each): each for owner in self._owners if owner for each in owner.values() if each is not None}
        if found:
            broadcast(each for each in found.values() if each.numel())
        self._has_unsent = False

    def teardown(self) -> None:
        """Drop the wrapper."""
        super().teardown()
        self._inner, self._engine, self._known, self._outside, self._owners = None, None, [], [], []

    def wrap_model(self, model: nn.Module) -> Any:
        """Wrap the model, unless there is nothing to train."""
        self._inner = super().wrap_model(model)
        return self._inner if not self._is_parallel or self.mode == "test" else self._wrap()

    def _check_model(self, model: nn.Module) -> None:
        """Refuse tables whose forward changes weights, and note what has sparse gradients."""
        super()._check_model(model)
        check_tables(model)
        self._sparse = _sparse_in(model)

    def _wrap(self) -> Any:
        self._check_model(self._inner)
        self._engine, self._marks_used = None, False
        if any(parameter.requires_grad for parameter in self._inner.parameters()):
            self._engine = Replica(self._inner, **self._replica_options())
        return self._engine or self._inner

    def _replica_options(self) -> dict[str, Any]:
        """Return the options of DistributedDataParallel."""
        return {
            "device_ids": None if self.device.type == "cpu" else [self.device],
            "find_unused_parameters": self.find_unused_parameters,
        }

    def describe(self) -> list[Fact]:
        """Tell of the buckets in which the wrapper averages gradients."""
        return [*super().describe(), Fact("buckets", self._bytes_of_buckets, "bytes", where="memory")]

    def _bytes_of_buckets(self, plan: Any) -> int | None:
        return plan.memory.gradients if plan.world_size > 1 else None

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank until the last micro-batch."""
        inner = super().sync_context(last)
        is_synced = last and not self._takes_turns() and not self.engine.reduces_after_backward
        return inner if self._engine is None or is_synced else self._alone(inner)

    def _takes_turns(self) -> bool:
        """Return whether a step may train with some of the optimizers: the wrapper would wait for the others."""
        return self.find_unused_parameters and len(self.optimizers) > 1

    @contextmanager
    def _alone(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        whole, self.model = self.model, self._inner
        try:
            with inner:
                yield
        finally:
            self.model = whole

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Average the gradients over the ranks."""
        if not self._is_parallel:
            return super().gradients(batch)
        if self._known != self._trained():  # A parameter was frozen, unfrozen or added.
            self.model = self._wrap()
            self._begin_group_alike()
        elif self._marks_used:
            self.model = self._wrap()
        self._has_unsent = True
        if self._engine is not None:
            vars(self._engine)["_used"] = False
        try:
            return super().gradients(batch)
        except RuntimeError as error:
            if "find_unused_parameters" in str(error) and not isinstance(error, DistributedError):
                raise self._left_out([]) from error
            raise
        finally:
            self.model = self._engine or self._inner

    def micro_batches(self, batch: Any) -> Any:
        """Do not use the wrapper in a step in which a rank has no samples: it would wait for that rank."""
        found = super().micro_batches(batch)
        if self._leaves_out or self._engine is None:
            self.model = self._inner or self.model
        return found

    def normalize(self, num_targets: list[Any]) -> None:
        """Average the gradients that the wrapper has not averaged."""
        if self._is_parallel:
            engine = self._engine
            if self._leaves_out:
                num_targets = self._finish_short(num_targets)
            elif engine is None or not engine._used or self._takes_turns():  # It misses calls of submodules.
                self._average(self.parameters, True)
            else:
                self._check_used(engine)
                self._average(self._outside, True)
        super().normalize(num_targets)

    def _finish_short(self, num_targets: list[Any]) -> list[Any]:
        """Average the gradients of a step in which some ranks had no samples."""
        has_samples = bool(num_targets)
        # The wrapper notes which parameters a backward has used, also without it, until it averages gradients itself.
        self._marks_used = self.find_unused_parameters
        if not has_samples:
            # Zeros, through backward(): a loss scale has to see one.
            self.backward(cast(Tensor, sum((p * 0).sum().real for p in self.parameters if p.requires_grad)))
        self._average(self.parameters, has_samples)
        counted = any(self.gather(any(count is not None for count in num_targets)))
        return [0.0] if counted and not has_samples else num_targets

    def _average(self, parameters: list[Tensor], has_samples: bool) -> None:
        """Average gradients without the wrapper; a rank without samples has none."""
        if not has_samples:
            for parameter in parameters:
                parameter.grad = None
        average(parameters, self.world_size, self.reduce, self._sparse)

    def _check_used(self, engine: Replica) -> None:
        """Refuse a step that left parameters without gradients: the wrapper has then not averaged any."""
        try:
            check_reducer(engine)
        except RuntimeError as error:
            held, named = engine._held, self.unwrap().named_parameters()
            names = [name for name, each in named if each.grad is None and id(each) in held]
            if names and not self.find_unused_parameters:
                raise self._left_out(names) from error
            raise

    def _left_out(self, names: list[str]) -> DistributedError:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        which = f"{len(names)} parameters ({shown})" if names else "parameters in the last batch of a step"
        cure = (
            "Let the loss depend on all that the model returns, or detach the rest"
            if self.find_unused_parameters
            else "Write find_unused_parameters=True if that is meant, or freeze them: parameter.requires_grad_(False)"
        )
        return DistributedError(
            f"train_step did not use {which} on rank {self.rank}, so they have no gradient to average over the ranks. "
            f"{cure}"
        )

    def optimizer_step(self) -> bool:
        """Send the buffers of rank 0 after a step, as DistributedDataParallel does before the next."""
        stepped = super().optimizer_step()
        if self._is_parallel:
            self._send_buffers()
        return stepped

    def zero_grad(self) -> None:
        """Send the buffers of rank 0 after a skipped step too."""
        super().zero_grad()
        if self._has_unsent:
            self._send_buffers()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Evaluate without the wrapper, as ranks have different numbers of batches."""
        before = self.model
        if self._engine is not None:
            self.model = self._inner
        try:
            with super().evaluation_context():
                yield
        finally:
            self.model = before


def _sparse_in(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    tables = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    return {id(each.weight) for each in tables if each.sparse}
