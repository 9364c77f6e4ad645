"""Tensor parallel training: each rank computes with a part of the layers that a plan names, on the same batches."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zae.addon import Description
from zae.addons.distributed import DistributedAddon
from zae.distributed import shards
from zae.distributed.blocks import check_divisible, check_even, check_shapes, class_name
from zae.distributed.collectives import broadcast, gather_objects
from zae.distributed.ranks import RanksEngine
from zae.errors import ConfigError, DistributedError
from zae.null_context import NULL_CONTEXT, both
from zae.parts import Engine, SingleProcess
from zae.torch_private import is_compiled
from zae.values.hashes import fingerprint, fingerprints
from zae.values.walk import is_sharded, tensors_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TensorParallelAddon", "TensorParallelEngine"]

_SHOWN = 10


class TensorParallelEngine(Engine):
    """The engine of ranks that each hold a part of the divided layers.

    Parameters
    ----------
    inner : Engine
        The engine of the ranks.
    mesh : callable
        Returns the DeviceMesh of the ranks that divide layers among them; all ranks call it.
    styles : mapping of str to ParallelStyle
        How each module of the plan is divided, by its path.
    compiled : collection of str
        The paths of the modules that are compiled.

    Attributes
    ----------
    is_checked : bool
        Whether a first step has shown that the plan names all that it has to, and that nothing is drawn for a part.
    """

    can_save_alone = False  # The state lies in parts on the ranks.

    def __init__(
        self,
        inner: SingleProcess,
        mesh: Callable[[], DeviceMesh],
        styles: Mapping[str, ParallelStyle],
        compiled: Collection[str] = (),
    ) -> None:
        super().__init__(inner)
        self._mesh = mesh
        self._styles = styles
        self._compiled = compiled
        self._modules: dict[str, nn.Module] = {}
        self._of_inputs: dict[str, Tensor] = {}  # Gradients of what column-parallel layers take, in a first step.
        self._hooks: list[Any] = []  # Those that note them.
        self.is_checked = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has divided no model."""
        return {**vars(self), "_modules": {}, "_of_inputs": {}, "_hooks": [], "is_checked": False}

    def wrap(self, module: nn.Module, trains: bool) -> Any:
        """Divide the layers of the plan in place, with the weights of rank 0."""
        from torch.distributed.tensor.parallel import parallelize_module

        model = self.inner.wrap(module, trains)
        modules = self._modules = dict(model.named_modules())
        if any(map(is_sharded, model.parameters())):  # In an earlier run.
            return model
        check_shapes(model)
        mesh = self._mesh()
        check_layers(modules, self._styles, mesh.size())
        # Rank 0 sends its weights and buffers, of which each rank keeps its part. Those of a model on the meta device
        # come when it is sharded.
        broadcast(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel() and not tensor.is_meta)
        before = dict(model.named_parameters(remove_duplicate=False))
        for name, style in self._styles.items():
            try:
                parallelize_module(modules[name], mesh, style, src_data_rank=None)
            except (NotImplementedError, RuntimeError) as error:
                raise ConfigError(f"tensor_plan: {name} ({type(modules[name]).__name__}): {error}") from error
        self._finish_outside_of_compiled(modules)
        if not any(map(is_sharded, model.parameters())):
            raise ConfigError(
                "tensor_plan divides no parameter; give some layer ColwiseParallel() or RowwiseParallel()"
            )
        _check_ties(before, dict(model.named_parameters(remove_duplicate=False)))
        return model

    def is_same_on_ranks(self, values: Any) -> bool:
        """Return whether the ranks that divide layers have the same tensors: each sends a hash of its own."""
        digest = fingerprint(tensors_in(values))
        return len(set(gather_objects(digest, self._mesh().get_group()))) == 1

    def _finish_outside_of_compiled(self, modules: Mapping[str, nn.Module]) -> None:
        """Let compiled code, where there is any, take no tensor that is still under way between the ranks."""
        compiled = [*self._compiled, *(name for name, module in modules.items() if is_compiled(module))]
        if compiled:
            for name in self._styles:
                if not any(f"{name}.".startswith(f"{block}.") for block in compiled):
                    modules[name].register_forward_hook(_finish)

    def divided_loss(self) -> AbstractContextManager[None]:
        """Return a context in which losses of logits that the plan leaves in parts are computed in parts."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel() if self._leaves_logits else NULL_CONTEXT

    @cached_property
    def _leaves_logits(self) -> bool:
        """Whether the plan leaves outputs in parts, along their last dimension."""
        from torch.distributed.tensor import Shard

        left_in_parts = [style for style in self._styles.values() if not getattr(style, "use_local_output", True)]
        layouts = [getattr(style, "output_layouts", ()) for style in left_in_parts]  # SequenceParallel has none.
        return any(Shard(-1) in places for places in layouts)

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Send what is whole on each rank; in the first step, watch what layers take."""
        self.inner.begin(module, parameters)
        self._end_watch()
        self.is_checked = False
        columns = [name for name, style in self._styles.items() if _takes_whole_inputs(style)]
        self._hooks = [
            self._modules[name].register_forward_pre_hook(partial(self._note_input, name), prepend=True)
            for name in columns
        ]

    def _note_input(self, name: str, module: nn.Module, inputs: Sequence[Any]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and not is_sharded(inputs[0]) and inputs[0].requires_grad:
            inputs[0].register_hook(partial(self._of_inputs.__setitem__, name))

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add up the gradients that a sequence parallel layer has left in parts: its ranks exchange them."""
        for parameter in parameters:
            gradient: Any = parameter.grad
            if is_sharded(gradient) and any(place.is_partial() for place in gradient.placements):
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        self.inner.average_gradients(parameters)
        if not self.is_checked:
            self._check_plan()
            self._end_watch()
            self.is_checked = True

    def _end_watch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._of_inputs.clear()

    def _check_plan(self) -> None:
        """Refuse gradients of what each rank has whole that are not the same on all ranks: each has a part of them."""
        gradients = {
            (path, name): parameter.grad
            for path, module in self._modules.items()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.grad is not None and "tensor" not in shards.part_of(parameter)
        }
        gradients |= {(path, ""): gradient for path, gradient in self._of_inputs.items()}
        hashes = dict(zip(gradients, fingerprints(gradients.values())))
        # The ranks that compute the same layers send the hashes of theirs.
        ranks = gather_objects(hashes, self._mesh().get_group())
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        differing = [key for key in keys if len({rank.get(key) for rank in ranks}) > 1]
        if paths := list(dict.fromkeys(path for path, name in differing if name)):
            raise _plan_error(paths[-1], self._modules[paths[-1]], len(paths), [".".join(key) for key in differing])
        if differing:
            path = differing[-1][0]
            raise ConfigError(
                f"the ranks have other gradients of what {path} ({class_name(self._modules[path])}) takes: the step "
                "also computes with it outside of the layers of tensor_plan, and with a part that one of them leaves "
                "each rank. Compute that behind the layer that ends the division (RowwiseParallel), or let the layer "
                "before it return the whole: ColwiseParallel(output_layouts=Replicate())"
            )


class TensorParallelAddon(DistributedAddon):
    """Divide layers among several devices, which compute them together on the same batches.

    The ranks exchange activations: put them on devices with a fast connection. Parameters that the plan leaves out are
    the same on each rank. The batch size of the loader is that of the step.

    In the first step of each run, random numbers that are drawn for a divided activation are refused: a dropout there
    would not be that of one process. Put it behind the layer that ends the division. At the first batch of each epoch
    the ranks compare their batches.

    Where the last layer leaves its output in parts, ``ColwiseParallel(output_layouts=Shard(-1),
    use_local_output=False)``, the cross entropy is computed in parts (``loss_parallel`` of torch).

    Parameters
    ----------
    tensor_plan : dict of str to ParallelStyle
        A style for each module path or pattern: ``{"layers.*.up": ColwiseParallel(), "layers.*.down":
        RowwiseParallel()}``. Each pattern must match a module.

    Raises
    ------
    ConfigError
        A pattern matches no module, a module has two styles or cannot have its style, tied parameters are divided, or
        an activation that is divided has a dropout.
    DistributedError
        As for `MultiGPUAddon`; and where the ranks of a share get different batches.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> from zae import Trainer
    >>> from zae.addons import TensorParallelAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cls = Task.add_on(TensorParallelAddon)
    >>> trainer = cls(model, ["cpu", "cpu"], optimizer=optimizer, tensor_plan=plan)
    >>> len(trainer.devices)
    2
    """

    slot = "parallel.tensor"
    mesh_dimensions = ("tensor",)
    traits = ("divides_weights",)
    inside = ("parallel.data",)
    excludes = {
        "replicates_weights": "whole gradients are averaged there, and here they are parts; use FSDPAddon with "
        "TensorParallelAddon and mesh={'shard': 2, 'tensor': 2}",
        "compiles_model": "compiled code trains divided layers to other weights; leave CompileAddon out",
    }

    replicated_options = {
        "tensor_plan": "wrap_model",
    }

    def __init__(self, *args: Any, tensor_plan: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensor_plan = {} if tensor_plan is None else tensor_plan
        if not isinstance(self.tensor_plan, Mapping) or not all(isinstance(name, str) for name in self.tensor_plan):
            raise ConfigError(
                f"tensor_plan={tensor_plan!r}; give a dict of styles by the path of a module, as in "
                "{'layers.*.up': ColwiseParallel()}"
            )
        self.tensor_plan = dict(self.tensor_plan)
        self.styles()

    # ------------------------------------------------------------------------------------------------ the model

    def build_engine(self) -> SingleProcess:
        """Return the engine that divides the layers, and knows how they are divided."""
        self._tensor_ranks()
        engine = super().build_engine()
        ranks = engine.find(RanksEngine)
        assert ranks is not None
        compiled = tuple(self.changed_modules("compiled"))
        return TensorParallelEngine(
            engine, partial(ranks.device_mesh, self.device, ["tensor"]), self.styles(), compiled
        )

    @property
    def _tensor_engine(self) -> TensorParallelEngine | None:
        """The engine that has divided the layers, once the ranks have joined."""
        return self.engine.find(TensorParallelEngine)

    def styles(self) -> dict[str, Any]:
        """Return the style of each module that ``tensor_plan`` names, by the path of the module.

        Returns
        -------
        dict of str to ParallelStyle
            In the order of the plan.
        """
        names = [name for name, _ in self.unwrap().named_modules()]
        styles: dict[str, tuple[str, Any]] = {}
        for pattern, style in self.tensor_plan.items():
            if not hasattr(style, "_apply"):
                raise ConfigError(f"tensor_plan[{pattern!r}] is {style!r}; give a style: ColwiseParallel()")
            chosen = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not chosen:
                raise ConfigError(
                    f"tensor_plan: no module of {type(self.unwrap()).__name__} is {pattern!r}; its modules are "
                    f"{', '.join(filter(None, names))}"
                )
            for name in chosen:
                if name in styles:
                    raise ConfigError(f"tensor_plan: {pattern!r} and {styles[name][0]!r} both match {name}; keep one")
                styles[name] = (pattern, style)
        return {name: style for name, (_, style) in styles.items()}

    def changed_modules(self, how: str) -> Mapping[str, Any]:
        """Add the styles of the modules that are divided."""
        changed = super().changed_modules(how)
        return {**changed, **self.styles()} if how == "divided" else changed

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model and a mesh that cannot be divided."""
        super()._check_model(model)
        check_layers(dict(model.named_modules()), self.styles(), self._tensor_ranks())

    def _tensor_ranks(self) -> int:
        """Return how many ranks divide a layer among them."""
        size = self._mesh().sizes.get("tensor", 1)
        if size == 1:
            raise ConfigError(
                f"mesh={self.mesh!r} leaves {size} rank for each layer; write mesh={{'tensor': 2}}, or leave "
                "TensorParallelAddon out"
            )
        return size

    def describe(self) -> list[Description]:
        """Name the layers that are divided."""
        return [
            *super().describe(),
            Description("divided layers", self._describe_layers, where="wrap_model"),
        ]

    def _describe_layers(self, plan: Any) -> str:
        """Name the layers that the options divide, by the way in which they are."""
        kinds: dict[str, list[str]] = {}
        for name, style in self.styles().items():
            kinds.setdefault(type(style).__name__, []).append(name)
        return "; ".join(f"{kind} of {', '.join(names)}" for kind, names in kinds.items()) or "none"

    # ------------------------------------------------------------------------------------------------ a step

    def on_run_begin(self) -> None:
        """Refuse a loss scale."""
        super().on_run_begin()
        if self._is_parallel and self.precision_part.is_scaled:
            raise ConfigError(
                "precision='fp16' needs a loss scale, which torch does not have for layers in parts; write "
                "precision='bf16'"
            )

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Compute losses of logits that the plan leaves in parts without gathering them."""
        engine = self._tensor_engine
        with NULL_CONTEXT if engine is None else engine.divided_loss(), super().evaluation_context():
            yield

    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """Compare the first batches of an evaluation."""
        for index, batch in enumerate(super().evaluation_batches(loader)):
            if not index:
                self._compare_batches(batch)
            yield batch

    def _compare_batches(self, batch: Any) -> None:
        engine = self._tensor_engine
        if engine is not None and not engine.is_same_on_ranks(batch):
            raise DistributedError(
                f"rank {self.rank} of {self.world_size} has another batch than the ranks that compute the same layers "
                "with it. Let the loader depend on engine.dp_rank and engine.dp_world_size, not on the rank, and draw "
                "from torch, numpy.random or random, whose streams these ranks share"
            )

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compare the first batch of an epoch, and its loss: each rank may have taken its part for the whole."""
        engine = self._tensor_engine
        is_first = not self.progress_checker.epoch_batch and not self.current_run.activity.micro_index
        if is_first:
            self._compare_batches(batch)
        values, weight = super().micro_step(batch, count)
        if engine is not None and is_first and not engine.is_same_on_ranks(values["loss"]):
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} has another loss than the ranks that compute the same layers "
                "with it: a layer of tensor_plan leaves each rank its part, as ColwiseParallel without a "
                "RowwiseParallel behind it, and the step takes the part for the whole. Write "
                "output_layouts=Replicate(), or use_local_output=False, for that layer"
            )
        return values, weight

    def batch_context(self) -> AbstractContextManager[None]:
        """Compute losses of logits that the plan leaves in parts without gathering them."""
        engine = self._tensor_engine
        inner = super().batch_context()
        return inner if engine is None else both(inner, engine.divided_loss())

    def forward_context(self) -> AbstractContextManager[None]:
        """In the first step of a run, look for random numbers that are drawn for a part of an activation."""
        inner = super().forward_context()
        engine = self._tensor_engine
        if engine is None or engine.is_checked or not torch.is_grad_enabled():
            return inner
        # Compiled code would not be watched.
        watch = both(
            torch.compiler.set_stance("force_eager"),
            shards.DrawsWatch(self.device, engine.is_same_on_ranks),
        )
        return both(inner, watch)


def check_layers(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], ranks: int) -> None:
    """Refuse layers, by name, that so many ranks cannot divide."""
    check_divisible({name: modules[name] for name in styles})
    for name, style in styles.items():
        check_even(name, modules[name], style, ranks)


def _takes_whole_inputs(style: ParallelStyle) -> bool:
    """Return whether a column-parallel layer takes an input that each rank has whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    return isinstance(style, ColwiseParallel) and all(layout.is_replicate() for layout in style.input_layouts)


def _plan_error(path: str, module: nn.Module, count: int, names: Sequence[str]) -> ConfigError:
    """Return the error of a layer without an entry in the plan, which computes with a part of an activation."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        entry = f"{path!r}: ColwiseParallel() or RowwiseParallel(), as the layers beside it"
    else:
        entry = (
            f"{path!r}: SequenceParallel(sequence_dim=1, use_local_output=True), where sequence_dim is the dimension "
            "of its input that the ranks divide, as that of the heads in (batch, head, position, feature)"
        )
    last = f", the last of {count} layers with such gradients" if count > 1 else ""
    return ConfigError(
        f"the ranks have other gradients of {', '.join(names[:_SHOWN])}: {path} ({class_name(module)}){last}, has no "
        "entry in tensor_plan, and computes with what other layers leave each rank a part of, so that its gradient is "
        f"that of this part. Add to tensor_plan {entry}; or compute behind the layer that ends the division "
        "(RowwiseParallel)"
    )


def _check_ties(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse to divide one of several names of a parameter, which would become two."""
    first: dict[int, str] = {}
    for name, tensor in before.items():
        other = first.setdefault(id(tensor), name)
        if after[name] is not after[other]:
            raise ConfigError(
                f"tensor_plan: {other} and {name} are one parameter, and would become two; leave both modules out "
                "of the plan, or give each its own parameter"
            )


def _finish(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a tensor that is no longer under way between the ranks.

    Compiled code that is called with one returns a wrong gradient of it, or none (torch 2.13).
    """
    return output.clone() if isinstance(output, Tensor) and type(output) is not Tensor else None
