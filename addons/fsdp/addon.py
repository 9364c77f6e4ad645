"""Sharded training: each rank holds a part of every parameter, gradient and optimizer state (fully_shard, FSDP2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from zae.addon import Description
from zae.addons.distributed import DistributedAddon
from zae.addons.fsdp.meta_init import MetaInit, is_meta
from zae.distributed import shards
from zae.distributed.blocks import (
    check_divisible,
    check_shapes,
    choose_blocks,
    describe_blocks,
    parse_blocks,
    repeated_modules,
)
from zae.distributed.collectives import broadcast
from zae.distributed.mesh import DATA
from zae.distributed.ranks import RanksEngine
from zae.errors import ConfigError
from zae.model.weights import without_wrappers
from zae.parts import Engine, Precision, SingleProcess, gather_dp
from zae.values.walk import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FSDPAddon", "FSDPEngine"]

_log = logging.getLogger("zae")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def free_gathered_blocks(model: nn.Module) -> None:
    """Free the blocks that a forward without a backward has left gathered: torch does not gather them again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be sharded."""
    if without_wrappers(model) is not model:
        raise ConfigError(
            "torch.compile or DataParallel is around the whole model, whose blocks could then not be "
            "gathered one at a time; leave it out, and write compile_blocks=True"
        )
    check_divisible({"": model})


class FSDPEngine(Engine):
    """The engine of ranks that each hold a shard of every parameter.

    Parameters
    ----------
    inner : Engine
        The engine of the ranks.
    mesh : callable
        Returns the dimensions of the DeviceMesh along which parameters are sharded, and replicated; all ranks call it.
    blocks : callable
        Returns the modules of a model that are gathered one at a time, by name.
    compile_block : callable, optional
        Compiles a block in place, before it is sharded.
    methods : sequence of str
        Methods of the model, beside its forward, that compute with its parameters.
    fill : callable, optional
        Gives a sharded model that was made on the meta device its weights.
    **options
        Arguments of ``fully_shard``.

    Attributes
    ----------
    parameters_by_name : dict of str to Tensor
        The parameters that were sharded, by name.
    """

    can_save_alone = False  # The state lies in parts on the ranks.
    needs_lockstep_forward = True  # Each forward gathers blocks.

    def __init__(
        self,
        inner: SingleProcess,
        mesh: Callable[[], DeviceMesh],
        blocks: Callable[[nn.Module], Mapping[str, nn.Module]] = repeated_modules,
        compile_block: Callable[[nn.Module], None] | None = None,
        methods: Sequence[str] = (),
        fill: Callable[[nn.Module], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner)
        self._mesh = mesh
        self._blocks = blocks
        self._compile_block = compile_block
        self._methods = methods
        self._fill = fill
        self._options = options
        self._sharded: Any = None  # The FSDPModule; later runs find it as it is.
        self.parameters_by_name: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has sharded no model."""
        return {**vars(self), "_sharded": None, "parameters_by_name": {}}

    def wrap(self, module: nn.Module, trains: bool) -> Any:
        """Shard the module in place, with the weights of rank 0."""
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        model = self.inner.wrap(module, trains)
        is_of_earlier_run = isinstance(model, FSDPModule)
        if is_of_earlier_run:
            self._sharded = model
            self.parameters_by_name = self.parameters_by_name or dict(model.named_parameters())
            return model
        blocks = self._blocks(without_wrappers(model))
        check_shapes(model)
        check_model(model)
        has_weights = not is_meta(model)
        if has_weights:
            # Rank 0 sends what it has: each rank then keeps its own part of the same weights. What tensor parallelism
            # has divided was sent before.
            plain = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
            broadcast([*plain, *(buffer for buffer in model.buffers() if buffer.numel())])
        mesh = self._mesh()
        # The innermost blocks first; what is in no block is sharded with the model itself.
        for _, block in sorted(blocks.items(), key=lambda item: -item[0].count(".")):
            if self._compile_block is not None:
                self._compile_block(block)
            fully_shard(block, mesh=mesh, **self._options)
        fully_shard(model, mesh=mesh, **self._options)
        for name in self._methods:
            register_fsdp_forward_method(model, name)
        if not has_weights and self._fill is not None:
            self._fill(model)
        self._sharded = model
        self.parameters_by_name = dict(model.named_parameters())
        return model

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Accumulate whole gradients on this rank; in the last micro-batch the backward averages shards of them."""
        assert self._sharded is not None
        self._sharded.set_requires_gradient_sync(last)
        return self.inner.sync_context(last)

    def free_gathered_blocks(self) -> None:
        """Free the blocks that a forward without a backward has left gathered."""
        if self._sharded is not None:
            free_gathered_blocks(self._sharded)


class FSDPAddon(DistributedAddon):
    """Divide parameters, gradients and optimizer states among several devices (``fully_shard``, FSDP2).

    A block of the model is gathered just before it computes, and freed afterwards. Batches, steps, records and weights
    are those of `MultiGPUAddon`.

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
    compile_blocks : bool or str
        Compile each block, with inductor or the named backend of ``torch.compile``.
    cpu_offload : bool
        Keep the shards in the memory of the host; only with an accelerator.
    meta_init : bool
        Call the factory that was given as ``model`` on the meta device, where it needs no memory. Rank 0 alone calls
        it again, on the host, and sends one tensor after another: the weights are those of one process.
    fsdp_methods : list of str
        Other methods of the model than ``forward`` that compute with its parameters and are called from outside of it:
        ``["encode"]`` for ``self.model.encode(inputs)``. None of them calls another one, and ``forward`` calls none.

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
    traits = ("divides_weights",)
    mesh_dimensions = ("replicate", "shard")
    lockstep_forward = True
    process_attributes = {"_is_prepared": False}
    excludes = {
        "compiles_model": "blocks are compiled one at a time, before they are sharded; leave CompileAddon out, and "
        "write compile_blocks=True"
    }
    _meta: Any

    replicated_options = {
        "fsdp_blocks": "wrap_model",
        "reshard_after_forward": "wrap_model",
        "mp_policy": "wrap_model",
        "cpu_offload": "wrap_model",
        "meta_init": "materialize",
        "fsdp_methods": "wrap_model",
    }

    def __init__(
        self,
        *args: Any,
        fsdp_blocks: Any = None,
        reshard_after_forward: bool = True,
        mp_policy: Any = None,
        compile_blocks: bool | Annotated[str, "the name of a backend"] = False,
        cpu_offload: bool = False,
        meta_init: bool = False,
        fsdp_methods: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.meta_init = meta_init
        self._meta = None  # What makes the model, with meta_init.
        self._is_prepared = False  # Whether one process has prepared the blocks.
        if self.meta_init:
            self._meta, args, kwargs = MetaInit.in_place_of_model(args, kwargs)
        super().__init__(*args, **kwargs)
        self.fsdp_blocks = parse_blocks(fsdp_blocks)
        self.mp_policy = mp_policy
        self.compile_blocks = compile_blocks
        self.fsdp_methods = list(fsdp_methods)
        if self.cpu_offload and all(device.type == "cpu" for device in self.devices):
            raise ConfigError(
                "cpu_offload=True moves shards from an accelerator to the host, and there is none here; leave it out"
            )

    def build_engine(self) -> SingleProcess:
        """Return the engine that shards the model, and knows how it is divided."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.mp_policy is not None:
            options["mp_policy"] = self.mp_policy
            if type(self.precision_part) is Precision:
                self.precision_part = Precision(_NAMES.get(self.mp_policy.param_dtype, "fp32"))
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        engine = super().build_engine()
        ranks = engine.find(RanksEngine)
        assert ranks is not None
        return FSDPEngine(
            engine,
            mesh=partial(ranks.device_mesh, self.device, DATA),
            blocks=partial(choose_blocks, selection=self.fsdp_blocks),
            compile_block=partial(_compile, how=self.compile_blocks) if self.compile_blocks else None,
            methods=self.fsdp_methods,
            fill=partial(self._meta.send, seed=self.seed, device=self.device, is_main=self.is_main)
            if self.meta_init
            else None,
            **options,
        )

    @property
    def _fsdp(self) -> FSDPEngine | None:
        """The engine that has sharded the model, once the ranks have joined."""
        return self.engine.find(FSDPEngine)

    # ------------------------------------------------------------------------------------------------ the model

    def materialize(self, module: nn.Module) -> None:
        """Leave a module on the meta device to `wrap_model`; in one process, give it its weights."""
        if is_meta(module) and self._is_parallel:
            return
        if is_meta(module):
            self._meta.fill(module, self.seed)
        super().materialize(module)

    def wrap_model(self, model: nn.Module) -> Any:
        """Shard the model in place, once; in one process, compile the blocks as ranks do."""
        wrapped = super().wrap_model(model)
        if not self._is_parallel and not self._is_prepared and len(self.devices) == 1:
            self._is_prepared = True
            self._prepare_alone()
        return wrapped

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that cannot be sharded."""
        super()._check_model(model)
        check_model(model)
        self.blocks()

    def _prepare_alone(self) -> None:
        """In one process, compile the blocks, and tell what only ranks do."""
        if self.compile_blocks:
            for block in self.blocks().values():
                _compile(block, self.compile_blocks)
        if self.mp_policy is not None:
            _log.warning(
                "mp_policy is that of sharded parameters, and one process shards none: it computes in the types of the "
                "parameters. To try the precision here, add AMPAddon with precision='bf16'"
            )

    def changed_modules(self, how: str) -> Mapping[str, Any]:
        """Add the blocks, where they are compiled."""
        changed = super().changed_modules(how)
        return {**changed, **self.blocks()} if how == "compiled" and self.compile_blocks else changed

    def blocks(self) -> dict[str, nn.Module]:
        """Return the modules that are gathered one at a time, by name.

        Returns
        -------
        dict of str to Module
            Those of ``fsdp_blocks``; by default the repeated children of ``ModuleList``, ``ModuleDict`` and
            ``Sequential``, the outermost ones.
        """
        return choose_blocks(self.unwrap(), self.fsdp_blocks)

    def describe(self) -> list[Description]:
        """Name the blocks."""
        return [
            *super().describe(),
            Description("sharded in blocks", self._describe_sharded, where="wrap_model"),
        ]

    def _describe_sharded(self, plan: Any) -> str | None:
        """Name the blocks that several ranks shard."""
        if plan.world_size == 1:
            return None
        return f"{describe_blocks(self.blocks()) or 'none'}; the rest of the model is one more"

    # ------------------------------------------------------------------------------------------------ a step

    def forward_context(self) -> AbstractContextManager[None]:
        """In the first step of an epoch, look for parameters that were replaced and forwards that change weights."""
        inner = super().forward_context()
        fsdp = self._fsdp
        is_first = torch.is_grad_enabled() and not self.progress_checker.epoch_batch
        if fsdp is None or self.compile_blocks or not is_first:
            return inner
        fsdp.free_gathered_blocks()
        return shards.forward_keeps_weights(self.unwrap(), fsdp.parameters_by_name, inner)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Free the gathered blocks before and after, when other weights may be in the model."""
        fsdp = self._fsdp
        if fsdp is not None:
            fsdp.free_gathered_blocks()
        try:
            with super().evaluation_context():
                yield
        finally:
            if fsdp is not None:
                fsdp.free_gathered_blocks()

    def replicas(self) -> dict[str, Tensor]:
        """Refuse parameters that were replaced, and return those that ranks compare."""
        fsdp = self._fsdp
        if fsdp is not None:
            fsdp.free_gathered_blocks()
            shards.check_held(self.unwrap(), fsdp.parameters_by_name)
        return super().replicas()

    def normalize(self, num_targets: list[Any]) -> None:
        """Refuse gradients of other parameters on one rank than on another."""
        fsdp = self._fsdp
        if fsdp is not None:
            shards.check_used(fsdp.parameters_by_name, self.progress_checker.step, partial(gather_dp, fsdp))
        super().normalize(num_targets)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Refuse losses for some parameters each: the backward reaches gathered blocks, not the shards."""
        if self._is_parallel and (isinstance(loss, Mapping) or "inputs" in kwargs):
            raise ConfigError(
                "FSDPAddon differentiates one loss by all parameters, and train_step returned one for each optimizer "
                "(or backward was given inputs). Return one loss, or train with MultiGPUAddon"
            )
        super().backward(loss, **kwargs)

    def on_exception(self, error: BaseException) -> None:
        """Explain what torch cannot do with parameters that lie in parts."""
        if self._is_parallel:
            shards.explain_parts(error)
        super().on_exception(error)

    def unscale(self) -> None:
        """Let all ranks skip a step in which the float16 gradients of one have overflowed."""
        super().unscale()
        if self._is_parallel:
            self.precision_part.combine_found_inf(self.optimizers.values(), self.reduce)

    def _take_back(self, state: dict[str, Any], rest: Mapping[str, Any], loader: Any) -> None:
        if is_meta(self.unwrap()):
            self._meta.fill(self.unwrap(), self.seed)
        super()._take_back(state, rest, loader)


def _compile(block: nn.Module, how: bool | str) -> None:
    """Compile a block in place, with inductor or the backend of this name."""
    block.compile(backend="inductor" if how is True else how)
