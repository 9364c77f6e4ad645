"""Context parallel training: each rank computes a part of every sequence, with attention over all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from zae.addons.distributed import DistributedAddon
from zae.common.torch_private import call_instead, is_compiled
from zae.composition.metaclass import slots_of
from zae.errors import ConfigError
from zae.launch.context.arguments import check_names, input_dimensions
from zae.launch.context.division import Ranks
from zae.launch.context.model import DividedModel
from zae.launch.context.ring import check_ring, ring
from zae.launch.ddp import BUCKET, broadcast
from zae.launch.pipeline.parts import average
from zae.sinks.fingerprint import fingerprint

__all__ = ["ContextParallelAddon"]


class ContextParallelAddon(DistributedAddon):
    """Divide long sequences among several devices, which train one copy of the model each on their part.

    ``train_step`` stays as it is. Where it calls ``self.model(...)``, each rank computes its part of the sequence, and
    the call returns the outputs for all of it; losses and metrics are then those of one process. In the forward
    ``torch.nn.functional.scaled_dot_product_attention`` gathers keys and values of all ranks. A rank holds the
    activations of its part, the keys and values of all of the sequence, and the outputs.

    Only attention may bring positions together, and the model must not count them: give it their positions. This is
    checked: at the first batch of each epoch and of each evaluation the model is called with the first positions of the
    batch, whole and divided. A run ends with an error where outputs, gradients or buffers differ. Dropout draws masks
    of the whole sequence on each rank, as one process; other random numbers for a part of a sequence
    are refused, as is dropout within ``scaled_dot_product_attention``.

    With `MultiGPUAddon`, ``Task.add_on(MultiGPUAddon, ContextParallelAddon)`` and ``mesh={"replicate": 2, "context":
    4}``, groups of four ranks divide the sequences of the same batches, and gradients are averaged over all eight. With
    `FSDPAddon` and ``mesh={"shard": 2, "context": 4}`` all eight hold a part of the model. Alone, it averages gradients
    after the backward. Checkpoints are those of `MultiGPUAddon` or `FSDPAddon`, and load into one process.

    Where logits are larger than what computes them, let the model return a loss for each position:
    ``self.model(tokens, targets)``, with both in ``context_inputs``.

    Parameters
    ----------
    context_inputs : dict of str to int, or list of str, optional
        The parameters of the model's ``forward`` that have a sequence, with its dimension; of a list it is 1. By
        default the first parameter. Other inputs are whole on each rank. Of a mask of queries and keys write both,
        ``{"mask": (2, 3)}``: the first one is divided.
    context_positions : str, optional
        The parameter of ``forward`` that gets the positions, of shape (1, length), where a call does not give them:
        "position_ids" for models of Transformers.
    context_attention : {"gather", "ring"}
        "gather" gathers keys and values. "ring" is the attention of ``torch.distributed.tensor.experimental``, which
        sends them around; it needs GPUs, and causal attention.

    Raises
    ------
    ConfigError
        An option is invalid, or the model computes something else with a divided sequence, with what differs.
    DistributedError
        As for `MultiGPUAddon`; and where the ranks of a sequence get different batches.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import ContextParallelAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cls = Task.add_on(ContextParallelAddon)
    >>> trainer = cls(model, ["cpu", "cpu"], optimizer=optimizer, context_inputs={"input": 1})
    >>> len(trainer.devices)
    2
    """

    slot = "parallel.context"
    mesh_dimensions = ("context",)
    outside = ("FSDPAddon", "MultiGPUAddon")
    process_attributes = {"_divided": None}
    excludes = {
        "AccelerateAddon": "Accelerate gives each process other batches; leave it out, and train with MultiGPUAddon or "
        "FSDPAddon",
        "CompileAddon": "compiled code does not call the attention that gathers keys and values; leave CompileAddon "
        "out",
        "PipelineAddon": "the stages of a pipeline take whole sequences; take one of them, with FSDPAddon if the model "
        "does not fit: leave PipelineAddon out",
        "TensorParallelAddon": "divided layers take whole sequences; leave TensorParallelAddon out, and write "
        "Task.add_on(FSDPAddon, ContextParallelAddon)",
    }

    def __init__(
        self,
        *args: Any,
        context_inputs: Mapping[str, Any] | Sequence[str] | None = None,
        context_positions: str | None = None,
        context_attention: str = "gather",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.context_inputs = input_dimensions(self.unwrap(), context_inputs)
        self.context_positions, self.context_attention = context_positions, context_attention
        if context_positions is not None:
            check_names(self.unwrap(), [context_positions], "context_positions")
        check_ring(context_attention, self.devices)
        if getattr(self, "compile_blocks", False):
            raise ConfigError(
                "compile_blocks: compiled code does not call the attention that gathers keys and values; leave it out"
            )
        self._divided: DividedModel | None = None

    def is_idle(self) -> bool:
        """Return whether there is one process."""
        return self._world == 1 == len(self.devices)

    @property
    def _averages(self) -> bool:
        """Whether no other add-on averages gradients."""
        return self._world > 1 and "parallel.data" not in slots_of(type(self))

    # ------------------------------------------------------------------------------------------------ the model

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model and a mesh that cannot divide a sequence."""
        super()._check_model(model)
        if self._mesh().sizes.get("context", 1) == 1:
            raise ConfigError(
                f"mesh={self.mesh!r} leaves 1 rank for each sequence; write mesh={{'context': 2}}, or leave "
                "ContextParallelAddon out"
            )
        if names := [name or type(each).__name__ for name, each in self.unwrap().named_modules() if is_compiled(each)]:
            raise ConfigError(
                f"{names[0]} is compiled, and compiled code does not call the attention that gathers keys and values; "
                "do not compile modules of the model"
            )

    def wrap_model(self, model: nn.Module) -> Any:
        """Prepare the divided call, with the weights of rank 0."""
        model = super().wrap_model(model)
        if self._world == 1:
            return model
        self._check_model(model)
        if self._averages:
            broadcast(each for each in (*model.parameters(), *model.buffers()) if each.numel())
        if self._divided is None:
            ranks = Ranks(self.build_mesh().get_group("context"), fingerprint)
            way = ring(self.build_mesh()) if self.context_attention == "ring" else None
            self._divided = DividedModel(self.unwrap(), self.context_inputs, self.context_positions, ranks, way)
        return model

    def setup(self) -> None:
        """Send the parameters outside of the model from rank 0."""
        super().setup()
        if self._averages:
            known = {id(each) for each in self.unwrap().parameters()}
            broadcast(each for each in self.parameters if id(each) not in known)

    def plan_lines(self, plan: Any) -> list[str]:
        """Name what is divided."""
        ranks = plan.mesh.get("context", 1)
        inputs = ", ".join(f"{name} (dimension {dims[0]})" for name, dims in self.context_inputs.items())
        line = f"sequences divided over {ranks} ranks: {inputs}"
        return [*super().plan_lines(plan), *([line] if plan.world_size > 1 else [])]

    def plan_memory(self, plan: Any) -> None:
        """Add what it takes to send the weights."""
        super().plan_memory(plan)
        if plan.world_size > 1 and "parallel.data" not in slots_of(type(self)):
            plan.memory.start = plan.memory.parameters + min(plan.memory.parameters, BUCKET)

    # ------------------------------------------------------------------------------------------------ a step

    def _begin_check(self) -> None:
        if self._divided is not None:
            self._divided.check.begin()

    @contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Check the first calls of the model in each epoch."""
        self._begin_check()
        with super().epoch_context():
            yield

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Check the first calls of the model in each evaluation, and in the training after it."""
        self._begin_check()
        try:
            with super().evaluation_context():
                yield
        finally:
            self._begin_check()

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Note which micro-batch of a window it is."""
        inner = super().sync_context(last)
        if self._divided is not None:
            self._divided.check.is_first, self._divided.check.last = self.current_run.micro_index == 0, last
        return inner

    def forward_context(self) -> AbstractContextManager[None]:
        """Divide what the model is called with."""
        inner = super().forward_context()
        return inner if self._divided is None or self._world == 1 else self._dividing(inner, self._divided)

    @contextmanager
    def _dividing(self, inner: AbstractContextManager[None], divided: DividedModel) -> Iterator[None]:
        divided.begin_step()
        with inner, call_instead(divided.model, divided):
            yield

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Differentiate the loss; the ranks add up the gradients of keys and values."""
        if self._divided is None or self._world == 1:
            return super().backward(loss, **kwargs)
        with self._divided.differentiating():
            super().backward(loss, **kwargs)

    def normalize(self, num_targets: list[Any]) -> None:
        """Average the gradients where no other add-on does."""
        if self._averages:
            average([each for each in self.parameters if each.requires_grad], None, self._world)
        super().normalize(num_targets)
