"""Sharded training: each rank holds a part of every parameter, gradient and optimizer state (fully_shard, FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zae.addons.distributed import DistributedAddon
from zae.common import random_state
from zae.common.argument_checks import check_flags, check_model
from zae.common.model_weights import without_wrappers
from zae.common.optim import has_lazy
from zae.common.torch_private import overflow_flags
from zae.errors import ConfigError
from zae.launch import shards
from zae.launch.blocks import check_blocks, class_name, is_wanted, repeated_modules, split_by_block
from zae.launch.ddp import alike, broadcast
from zae.preview.memory import shard_memory

__all__ = ["FSDPAddon"]

_SHOWN = 10


class FSDPAddon(DistributedAddon):
    """Divide parameters, gradients and optimizer states among several devices (``fully_shard``, FSDP2).

    A block of the model is gathered just before it computes, and freed afterwards. With W ranks, each holds a W-th of
    the state, and two gathered blocks. Batches, steps and records are those of `MultiGPUAddon`, and so are the
    weights: a rank gets every W-th sample. Ranks are started by ``run``, or by torchrun.

    ``mesh={"replicate": 2, "shard": 4}`` divides the state among groups of four ranks, and averages gradients over all
    eight (hybrid sharding). The optimizer may be an instance or a factory. Checkpoints, ``state_dict`` and
    ``save_model`` contain whole tensors under the names of the plain model: they load into one process, and into any
    other engine. All ranks call these methods, and ``evaluate``, since each gathers shards.

    Parameters
    ----------
    fsdp_blocks : list, callable, optional
        The modules that are gathered one at a time: classes, names of classes or of modules, or a function of name and
        module; in ``"layers.*"`` the star is one part of a name. By default the modules that a ``ModuleList``,
        ``ModuleDict`` or ``Sequential`` repeats; ``plan()`` shows them.
    reshard_after_forward : bool
        Free a block after its forward, and gather it again for the backward; False needs more memory and sends less.
    mp_policy : MixedPrecisionPolicy, optional
        The types in which blocks compute and gradients are averaged; parameters keep their own. Or use `AMPAddon`.
    activation_checkpointing : bool
        Compute the forward of a block again in its backward, instead of keeping its activations.
    compile_blocks : bool or str
        Compile each block, with inductor or the named backend of ``torch.compile``.
    cpu_offload : bool
        Keep the shards in the memory of the host; only with an accelerator.
    meta_init : bool
        Call the factory that was given as ``model`` on the meta device, where it needs no memory. Rank 0 alone calls
        it again, on the host, and sends one tensor after another: the weights are those of one process.

    Raises
    ------
    ConfigError
        An option is invalid, no module is a block of ``fsdp_blocks``, or the composition cannot be sharded.
    DistributedError
        As for `MultiGPUAddon`; and where only some ranks call a method that gathers shards.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import FSDPAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(FSDPAddon)(model, ["cpu", "cpu"], optimizer=optimizer)
    >>> len(trainer.devices)
    2
    """

    slot = "parallel.data"
    mesh_dimensions = ("replicate", "shard")
    process_attributes = {"_sharded": None}

    def __init__(
        self,
        *args: Any,
        fsdp_blocks: Any = None,
        reshard_after_forward: bool = True,
        mp_policy: Any = None,
        activation_checkpointing: bool = False,
        compile_blocks: bool | str = False,
        cpu_offload: bool = False,
        meta_init: bool = False,
        **kwargs: Any,
    ) -> None:
        flags = {
            "reshard_after_forward": reshard_after_forward,
            "activation_checkpointing": activation_checkpointing,
            "cpu_offload": cpu_offload,
            "meta_init": meta_init,
        }
        self.reshard_after_forward, self.activation_checkpointing, self.cpu_offload, self.meta_init = check_flags(
            **flags
        )
        self._factory: Callable[[], nn.Module] | None = None
        self._sharded: Any = None  # The FSDPModule, which later runs find as it is.
        if self.meta_init:
            args, kwargs = self._on_meta(args, kwargs)
        super().__init__(*args, **kwargs)
        self.fsdp_blocks, self.mp_policy, self.compile_blocks = fsdp_blocks, mp_policy, compile_blocks
        if not callable(fsdp_blocks) or isinstance(fsdp_blocks, type):
            given = [] if fsdp_blocks is None else fsdp_blocks
            self.fsdp_blocks = list(given) if isinstance(given, (list, tuple, set)) else [given]
            for each in self.fsdp_blocks:
                if not isinstance(each, (str, type)):
                    raise ConfigError(f"fsdp_blocks={fsdp_blocks!r}; give classes, names, or a function of both")
        if not isinstance(compile_blocks, (bool, str)):
            raise ConfigError(f"compile_blocks={compile_blocks!r}; it must be True, False or the name of a backend")
        if self.cpu_offload and all(each.type == "cpu" for each in self.devices):
            raise ConfigError("cpu_offload=True moves shards from an accelerator to the host, and there is none here; "
                              "leave it out")  # fmt: skip

    def _on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the model be made on the meta device."""
        given = args[0] if args else kwargs.get("model")
        if isinstance(given, nn.Module) or not callable(given):
            raise ConfigError("meta_init=True needs a function that returns the model: Task(lambda: Net(), ...)")
        self._factory = given

        def on_meta() -> nn.Module:
            with torch.device("meta"):
                made: nn.Module = given()
            return made

        return ((on_meta, *args[1:]), kwargs) if args else (args, {**kwargs, "model": on_meta})

    @property
    def can_save_alone(self) -> bool:  # type: ignore[override]
        """False where the state lies in parts on several ranks."""
        return self._world == 1

    @property
    def pads(self) -> bool:  # type: ignore[override]
        """True with several ranks: each forward gathers blocks."""
        return self._world > 1

    def is_idle(self) -> bool:
        """Return whether there is one process."""
        return self._world == 1 == len(self.devices)

    def setup(self) -> None:
        """Send the parameters outside of the model from rank 0; those of the model are sent as they are sharded."""
        super().setup()
        if self._world > 1:
            broadcast(each for each in self.parameters if not shards.is_sharded(each))

    # ------------------------------------------------------------------------------------------------ the model

    def materialize(self, module: nn.Module) -> None:
        """Leave a module on the meta device to `wrap_model`; in one process, give it its weights."""
        if not _is_meta(module):
            super().materialize(module)
        elif self._world == 1:
            _fill(module, self._call_factory())
            super().materialize(module)

    def _call_factory(self) -> nn.Module:
        """Call the factory as one process does."""
        assert self._factory is not None
        seeded = random_state.isolated() if self.seed is None else random_state.seeded(self.seed)
        return check_model(self._factory, seeded)

    def wrap_model(self, model: nn.Module) -> Any:
        """Shard the model in place, once, with the weights of rank 0."""
        model = super().wrap_model(model)
        if self._world == 1:
            return model
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):  # Of an earlier run.
            self._sharded = model
            return model
        self._check_model(model)
        before, on_meta = dict(model.named_parameters()), _is_meta(model)
        if not on_meta:
            plain = [each for each in model.parameters() if not shards.is_sharded(each)]
            broadcast([*plain, *(each for each in model.buffers() if each.numel())])
        self._shard(model)
        self._sharded = model
        self._note_replaced(before, dict(model.named_parameters()))
        if on_meta:
            self._send_weights(model)
        return model

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that cannot be sharded."""
        super()._check_model(model)
        if without_wrappers(model) is not model or getattr(self, "compile_mode", None) is not None:
            raise ConfigError(
                "CompileAddon, torch.compile or DataParallel is around the whole model, whose blocks could then not be "
                "gathered one at a time; leave it out, and write compile_blocks=True"
            )
        if has_lazy([*model.parameters(), *model.buffers()]):
            raise ConfigError(
                "the model is lazy, and a parameter without a shape cannot be sharded; call it once with a batch "
                "before run(): model(inputs)"
            )

    def _shard(self, model: nn.Module) -> None:
        """Checkpoint activations, compile and shard each block, the innermost first, and then the rest."""
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options: dict[str, Any] = {"mesh": self._data_mesh(), "reshard_after_forward": self.reshard_after_forward}
        if self.mp_policy is not None:
            options["mp_policy"] = self.mp_policy
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        for block in sorted(self.blocks().items(), key=lambda item: -item[0].count(".")):
            self._prepare_block(block[1])
            fully_shard(block[1], **options)
        fully_shard(model, **options)

    def _prepare_block(self, block: nn.Module) -> None:
        if self.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if self.compile_blocks:
            block.compile(backend="inductor" if self.compile_blocks is True else self.compile_blocks)

    def _data_mesh(self) -> Any:
        """Return the dimensions of the mesh that shard and replicate the model."""
        names = tuple(name for name in self._mesh().sizes if name in ("replicate", "shard"))
        mesh = self.build_mesh()
        return mesh[names] if set(names) < set(mesh.mesh_dim_names) else mesh

    def _send_weights(self, model: nn.Module) -> None:
        """Give a module on the meta device the weights that rank 0 makes, one tensor after another."""
        made = self._call_factory() if self._rank == 0 else None
        model.to_empty(device=self.device)
        sources = {} if made is None else {**dict(made.named_parameters()), **dict(made.named_buffers())}
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                if made is not None:
                    value.copy_(sources[name])
                broadcast([value] if value.numel() else [])
                tensor.copy_(shards.like(value, tensor))

    def blocks(self) -> dict[str, nn.Module]:
        """Return the modules that are gathered one at a time, by name.

        Returns
        -------
        dict of str to Module
            Those of ``fsdp_blocks``; by default the repeated children of ``ModuleList``, ``ModuleDict`` and
            ``Sequential``, the outermost ones.
        """
        named = {name: each for name, each in self.unwrap().named_modules() if name}
        if callable(self.fsdp_blocks):
            return check_blocks({name: each for name, each in named.items() if self.fsdp_blocks(name, each)})
        if not self.fsdp_blocks:
            return repeated_modules(self.unwrap())
        found: dict[str, nn.Module] = {}
        for wanted in self.fsdp_blocks:
            chosen = {name: each for name, each in named.items() if is_wanted(wanted, name, each)}
            if not chosen:
                known = sorted({type(each).__name__ for each in named.values()})
                raise ConfigError(
                    f"fsdp_blocks: no module of {type(self.unwrap()).__name__} is {wanted!r}; its classes are "
                    f"{', '.join(known[:_SHOWN])}, its modules {', '.join(list(named)[:_SHOWN])}"
                )
            found.update(chosen)
        return check_blocks(found)

    def plan_lines(self, plan: Any) -> list[str]:
        """Name the blocks."""
        lines = super().plan_lines(plan)
        if plan.world_size == 1:
            return lines
        if plan.leaves_out:
            self._check_padding()
        kinds: dict[str, list[str]] = {}
        for name, block in self.blocks().items():
            kinds.setdefault(class_name(block), []).append(name)
        each = [f"{len(names)} of {kind} ({_range(names)})" for kind, names in kinds.items()]
        return [*lines, f"sharded in blocks: {', '.join(each) or 'none'}; the rest of the model is one more"]

    def plan_memory(self, plan: Any) -> None:
        """Divide all that belongs to the model, and add the blocks that are gathered."""
        super().plan_memory(plan)
        if plan.world_size == 1:
            return
        groups = split_by_block((name for name, _ in self.unwrap().named_parameters()), self.blocks())
        keeps, accumulates = not self.reshard_after_forward, plan.batches_per_step > 1
        shard_memory(plan.memory, groups, plan.mesh.get("shard", 1), self.mp_policy, keeps, accumulates, self.meta_init)

    # ------------------------------------------------------------------------------------------------ a step

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Accumulate whole gradients on this rank, and average shards of them in the last micro-batch."""
        if self._world > 1:
            self._sharded.set_requires_gradient_sync(last)
        return super().sync_context(last)

    def normalize(self, num_targets: list[Any]) -> None:
        """Average the gradients of parameters outside of the model."""
        if self._world > 1:
            self._average_outside()
        super().normalize(num_targets)

    def _average_outside(self) -> None:
        for group in alike([each for each in self.parameters if not shards.is_sharded(each)]):
            present = self.reduce(torch.tensor([float(each.grad is not None) for each in group])).tolist()
            for parameter, count in zip(group, present):
                if count:
                    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.reduce(own).div_(self._world)

    def unscale(self) -> None:
        """Let all ranks skip a step in which the float16 gradients of one have overflowed."""
        super().unscale()
        scaler = getattr(self, "scaler", None)
        if self._world > 1 and scaler is not None:
            for optimizer in self.optimizers.values():
                for flag in overflow_flags(scaler, optimizer):
                    flag.copy_(self.reduce(flag).clamp(max=1))

    def zero_grad(self) -> None:
        """Send the buffers of rank 0 after a step, which may have changed them."""
        super().zero_grad()
        if self._world > 1:
            broadcast(each for each in self.unwrap().buffers() if each.numel())

    # ------------------------------------------------------------------------------ evaluation and state

    def _reshard(self) -> None:
        """Free the gathered blocks: those that a forward without a backward has left are not gathered again."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.unwrap().modules() if self._world > 1 else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Free the gathered blocks before and after, when other weights may be in the model."""
        self._reshard()
        try:
            with super().evaluation_context():
                yield
        finally:
            self._reshard()

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights, whole on this rank."""
        self._reshard()
        return super().model_state()

    def load_model_state(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load whole weights, of which each rank keeps its part."""
        self._reshard()
        super().load_model_state(weights, strict)

    def _take_back(self, state: dict[str, Any], rest: Mapping[str, Any], loader: Any) -> None:
        if _is_meta(self.unwrap()):
            _fill(self.unwrap(), self._call_factory())
        super()._take_back(state, rest, loader)


def _is_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in (*module.parameters(), *module.buffers()))


def _fill(module: nn.Module, made: nn.Module) -> None:
    """Put the parameters and buffers of one module into another one that was made alike."""
    for own, other in zip(module.modules(), made.modules(), strict=True):
        own._parameters.update(other._parameters)
        own._buffers.update(other._buffers)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
