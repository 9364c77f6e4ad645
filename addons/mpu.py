"""Data parallel training: one process for each device, gradients averaged while they are computed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zae.addons.distributed import DistributedAddon
from zae.checks import check_flags
from zae.errors import DistributedError

__all__ = ["MultiGPUAddon"]

_SHOWN = 10
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"  # torch < 2.13


class MultiGPUAddon(DistributedAddon):
    """Train one copy of the model on each of several devices, with averaged gradients (DistributedDataParallel).

    ``device=["cuda:0", "cuda:1"]``, or ``["cpu", "cpu"]``, and ``run`` starts a process for each device, ends them
    all, and leaves in the caller's objects what rank 0 ended with: weights, optimizer, scheduler, counters, history
    and the state of every add-on; other attributes that a step sets stay in the ranks. Under torchrun it joins the
    ranks that are there. A script that starts ranks begins its run under ``if __name__ == "__main__":``.

    The loader's batch size is that of each rank: a step of W ranks is one of W times that many samples, and at the
    same total it leaves the weights that one process would. Each sample counts once and alike, in an epoch of
    training as in an evaluation, whatever the sizes; all ranks make equally many steps. ``evaluate`` and
    ``inference`` outside of ``run`` compute on the first device, or, under torchrun, on all.

    Parameters
    ----------
    init_method : str, optional
        Where spawned ranks meet: ``"tcp://localhost:12355"``, ``"env://"`` (``MASTER_ADDR``, ``MASTER_PORT``) or
        ``"file:///path"``. By default a free port of the loopback interface. Under a launcher, where it says.
    backend : str
        Of torch.distributed; "auto" is NCCL for CUDA tensors and gloo for those on the CPU.
    timeout : float
        Seconds after which a rank that does not answer is given up.
    find_unused_parameters : bool
        Whether a step may leave parameters out; looking for them takes time in every step.
    static_graph : bool
        Whether every step uses the same parameters in the same way, which DistributedDataParallel then makes use of.

    Raises
    ------
    ConfigError
        An option cannot be meant, something cannot travel to another process, or a port is in use.
    LoaderError
        Of a stream, every rank would get the same samples.
    DistributedError
        A rank was killed, ended early, did not answer, or left parameters out. What a rank itself raises is raised
        here again, of the same type, with the rank's number and its traceback.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import MultiGPUAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(MultiGPUAddon)(model, ["cpu", "cpu"], optimizer=optimizer)
    >>> len(trainer.devices)
    2
    """

    def __init__(
        self, *args: Any, find_unused_parameters: bool = False, static_graph: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        flags = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        self.find_unused_parameters, self.static_graph = check_flags(**flags)
        self._engine: _Replica | None = None
        self._buffers: list[Tensor] = []
        self._outside: list[Tensor] = []

    def setup(self) -> None:
        """Begin on every rank with the weights and buffers of rank 0."""
        super().setup()
        if self._world > 1:
            self._buffers = [buffer for buffer in self.unwrap().buffers() if buffer.numel()]
            own = {id(parameter) for parameter in self.unwrap().parameters()}
            self._outside = [parameter for parameter in self.parameters if id(parameter) not in own]
            _broadcast([*self.unwrap().parameters(), *self._buffers, *self._outside])
            if self._engine is not None and not (self.find_unused_parameters or self.static_graph):
                self._engine.settle()

    def teardown(self) -> None:
        """Give the wrapper up."""
        super().teardown()
        self._engine, self._buffers, self._outside = None, [], []

    def wrap_model(self, model: nn.Module) -> Any:
        """Wrap the model, unless there is nothing to train."""
        model = super().wrap_model(model)
        if self._world == 1 or self.mode == "test" or not any(p.requires_grad for p in model.parameters()):
            return model
        # Buffers are sent after each step: a rank without samples makes no forward to do it in.
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        self._engine = _Replica(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            **options,
        )
        return self._engine

    def is_idle(self) -> bool:
        """Tell whether this process trains alone."""
        return self._world == 1 == len(self.devices)

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Let gradients gather on this rank until the last micro-batch."""
        inner = super().sync_context(last)
        return inner if last or self._engine is None else self._alone(inner)

    @contextmanager
    def _alone(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        assert self._engine is not None
        with inner, self._engine.no_sync():
            yield

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Average the gradients over the ranks."""
        engine = self._engine
        if engine is None:
            return super().gradients(batch)
        engine.used = False
        try:
            return super().gradients(batch)
        except RuntimeError as error:
            if "find_unused_parameters" in str(error) and not isinstance(error, DistributedError):
                raise self._left_out([]) from error
            raise
        finally:
            self.model = engine

    def micro_batches(self, batch: Any) -> Any:
        """Leave the wrapper out of a step in which some rank has no samples: it would wait for that rank."""
        found = super().micro_batches(batch)
        if self._leaves_out and self._engine is not None:
            self.model = self._engine.module
        return found

    def normalize(self, num_targets: list[Any]) -> None:
        """Bring together the gradients that the wrapper has not."""
        if self._engine is not None:
            if self._leaves_out:
                num_targets = self._finish_short(num_targets)
            elif not self._engine.used:  # Only parts of the model were called, which the wrapper does not see.
                self._average(self.parameters, True)
            else:
                self._check_used()
                self._average(self._outside, True)
        super().normalize(num_targets)

    def _finish_short(self, num_targets: list[Any]) -> list[Any]:
        """Average the gradients of a step in which some ranks had no samples."""
        has_samples = bool(num_targets)
        if not has_samples:
            # Zeros, by the way that every gradient takes: a loss scale wants to have seen a backward.
            self.backward(cast(Tensor, sum((p * 0).sum() for p in self.parameters if p.requires_grad)))
        self._average(self.parameters, has_samples)
        counted = any(self.gather(any(count is not None for count in num_targets)))
        return [0.0] if counted and not has_samples else num_targets

    def _average(self, parameters: list[Tensor], has_samples: bool) -> None:
        """Average gradients by hand; one that no rank has stays None."""
        if not parameters:
            return
        own = torch.tensor([float(has_samples and p.grad is not None) for p in parameters])
        present = [p for p, ranks in zip(parameters, self.reduce(own).tolist()) if ranks]
        for parameter in parameters:
            if not has_samples:
                parameter.grad = None
        for group in _alike(present):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in group]
            flat = self.reduce(torch.cat([grad.reshape(-1) for grad in grads])).div_(self._world)
            for parameter, part in zip(group, flat.split([p.numel() for p in group])):
                parameter.grad = part.view_as(parameter)

    def _check_used(self) -> None:
        """Refuse a step that left parameters out: the wrapper has then not averaged the others either."""
        if self.find_unused_parameters or self.static_graph:
            return
        if any(p.grad is None and p.requires_grad for p in self._trained()):
            raise self._left_out(
                [name for name, p in self.unwrap().named_parameters() if p.grad is None and p.requires_grad]
            )

    def _trained(self) -> Iterable[Tensor]:
        return self.parameters[: len(self.parameters) - len(self._outside)]

    def _left_out(self, names: list[str]) -> DistributedError:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        which = f"{len(names)} parameters ({shown})" if names else "parameters in the last batch of a step"
        return DistributedError(
            f"train_step left out {which} on rank {self._rank}: they got no gradient, and the ranks cannot agree on "
            "one. Write find_unused_parameters=True if that is meant, or freeze them: parameter.requires_grad_(False)"
        )

    def optimizer_step(self) -> bool:
        """Give every rank the buffers of rank 0 after a step, as DistributedDataParallel does before the next."""
        stepped = super().optimizer_step()
        if self._engine is not None:
            _broadcast(self._buffers)
        return stepped

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Evaluate without the wrapper: the ranks have different numbers of batches."""
        before = self.model
        if self._engine is not None:
            self.model = self._engine.module
        try:
            with super().evaluation_context():
                yield
        finally:
            self.model = before

    def __getstate__(self) -> dict[str, Any]:
        """Leave the wrapper behind."""
        return {**super().__getstate__(), "_engine": None, "_buffers": [], "_outside": []}


class _Replica(DistributedDataParallel):
    """DistributedDataParallel that notes its use, and whose model's own attributes can be reached as without it."""

    used = False

    def settle(self) -> None:
        """Let the buckets of gradients be arranged now, by the order of the parameters.

        That is otherwise done after the first step, by the order in which its gradients came. The order of a sum over
        three or more ranks hangs on it: the first step after a resume would differ in its last bits.
        """
        module, self.module = self.module, _Zero(self.module)
        try:
            self(torch.zeros((), device=next(module.parameters()).device)).backward()
        finally:
            self.module = module
        for parameter in module.parameters():
            parameter.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]


class _Zero(nn.Module):
    """A module whose output is zero and depends on every parameter of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, zero: Tensor) -> Tensor:
        return sum(((p * 0).sum() for p in self.trained), zero)


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can be put into one."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Give tensors the values that they have on rank 0."""
    with torch.no_grad():
        for group in _alike(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            dist.broadcast(flat, src=0)
            if dist.get_rank():
                for tensor, part in zip(group, flat.split([t.numel() for t in group])):
                    tensor.copy_(part.view_as(tensor))
