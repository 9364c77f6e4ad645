"""Pipeline parallel training: each rank computes some stages of the model, on parts of each batch in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.addon import Description
from zae.addons.distributed import DistributedAddon
from zae.addons.pipeline import parts
from zae.addons.pipeline.chain import Chain
from zae.addons.pipeline.micro_batches import JoinedOutput
from zae.addons.pipeline.runner import Place, Runner, StagedModel
from zae.addons.pipeline.schedules import Arrangement, Schedule, check_split
from zae.arguments import Count
from zae.distributed.collectives import all_reduce, average, broadcast
from zae.distributed.ranks import RanksEngine
from zae.errors import ConfigError
from zae.loop.step_output import explain_failure, read_output
from zae.optim.factories import as_dict
from zae.parts import Engine, SingleProcess
from zae.values.walk import owners_of_user

__all__ = ["PipelineAddon", "PipelineEngine"]


class PipelineEngine(Engine):
    """The engine of ranks that each hold some stages of the model: the tensors of the others are on the meta device.

    Parameters
    ----------
    inner : Engine
        The engine of the ranks.
    device : torch.device
        That of this rank, from which tensors are sent.
    arrangement : Arrangement
        How many stages there are, and on which ranks.

    Attributes
    ----------
    chain : Chain or None
        The stages of the model, once this rank has dropped those of others.
    place : Place or None
        Where this rank stands in its pipeline, in this process.
    """

    can_save_alone = False  # The state lies in parts on the ranks.

    def __init__(self, inner: SingleProcess, device: torch.device, arrangement: Arrangement) -> None:
        super().__init__(inner)
        self.needs_lockstep_forward = self.dp_world_size > 1  # Pipelines average their gradients in each step.
        self._device = device
        self._arrangement = arrangement
        self.chain: Chain | None = None
        self.place: Place | None = None
        self._replicate_group: dist.ProcessGroup | None = None  # Of the ranks with the same stages.

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has divided no model."""
        return {**vars(self), "chain": None, "place": None, "_replicate_group": None}

    def wrap(self, module: nn.Module, trains: bool) -> Any:
        """Keep the stages of this rank, once, with the weights of rank 0; steps call what stands for all of them."""
        model = self.inner.wrap(module, trains)
        if self.place is None:
            self.place = self._find_place()
        if self.chain is None:
            chain = self._arrangement.chain(model, trains, self.dp_world_size)
            # Rank 0 sends all that it has, and each rank keeps what its stages need.
            broadcast(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
            parts.keep_own(model, set(map(id, chain.tensors(self.place.stages))))
            chain.keep(self.place.stages)
            self.chain = chain
        return StagedModel(model)

    def _find_place(self) -> Place:
        """Return where this rank stands; all ranks call it, since it makes the groups that exchange tensors."""
        ranks = self.find(RanksEngine)
        assert ranks is not None
        mesh = ranks.device_mesh(self._device)
        if self.dp_world_size > 1:
            self._replicate_group = mesh.get_group("replicate")
        group = mesh.get_group("pipeline") if len(ranks.mesh.sizes) > 1 else mesh.get_group()
        owners = tuple(dist.get_global_rank(group, rank) for rank in self._arrangement.owners)
        return Place(self._arrangement.stages_of(ranks.mesh.place(self.rank)["pipeline"]), owners, group)

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Send nothing: the weights were sent before each rank has kept its stages."""

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average over several pipelines: the ranks with the same stages add up their gradients."""
        if self.dp_world_size > 1:
            trained = [parameter for parameter in parameters if parameter.requires_grad and not parameter.is_meta]
            average(trained, self.dp_world_size, self._sum_over_pipelines)

    def _sum_over_pipelines(self, tensor: Tensor) -> Tensor:
        # The ranks with the same stages, one of each pipeline, add up theirs.
        all_reduce(tensor, self._replicate_group)
        return tensor

    def sync_buffers(self, module: nn.Module) -> None:
        """Send nothing: the ranks have other buffers."""

    def full_tensors(self, value: Any, keeps: bool = True) -> Any:
        """Take from each rank what it has of its stages: the ranks compare what they lack, and one sends it."""
        return parts.make_whole(self.inner.full_tensors(value, keeps), keeps, self.gather, self._device)

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm over the gradients of all stages: the ranks of a pipeline add up their squares."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        group = None if self.place is None else self.place.group
        return parts.gradient_norm(gradients, parameters, group, self._device)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, with the slots of other stages on the meta device: the ranks list what they have."""
        state = self.inner.optimizer_state(optimizer)
        return {**state, "state": parts.fill_states(state["state"], self.gather)}


class PipelineAddon(DistributedAddon):
    """Divide the model into stages, which several devices compute in turn on parts of each batch.

    The batch size of the loader is that of the step. Losses and metrics of the micro-batches are averaged by samples,
    or by ``num_targets``; other values that ``train_step`` returns are kept with ``keep_train_outputs=True`` alone.

    Parameters
    ----------
    split : list of str, int or callable, optional
        The modules that begin the second stage and later ones, by path: ``["layers.4"]``, of a model that calls its
        modules one after another. Or the number of stages, which are then balanced by parameters, as without it, of a
        plain ``nn.Sequential`` or a model with a list of equal blocks. Or a function of the model and the number of
        stages, which returns their modules in order; each is called with what the one before returns.
    pipeline_schedule : str, type or callable
        "GPipe" or "1F1B", with one stage on each rank; "Interleaved1F1B", "LoopedBFS" or "InterleavedZeroBubble", with
        several; "ZBVZeroBubble" or "DualPipeV", with two. Or a schedule class of torch, or a function of the stages of
        a rank, the number of micro-batches and the loss function.
    pipeline_microbatches : int, optional
        How many parts a batch is divided into; by default as many as there are stages. The batch size must be a
        multiple of it; a shorter last batch is filled up with rows that weigh nothing.
    stages_per_rank : int, optional
        How many stages a rank has; by default what the schedule needs, or follows from ``split``.

    Raises
    ------
    ConfigError
        An option is invalid, or the model or the composition cannot be divided into stages.
    StepError
        A step does not call the model once, or returns what cannot be put together.
    DistributedError
        As for `MultiGPUAddon`.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import PipelineAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cls = Task.add_on(PipelineAddon)
    >>> trainer = cls(model, ["cpu", "cpu"], optimizer=optimizer, split=["2"], pipeline_microbatches=4)
    >>> len(trainer.devices)
    2
    """

    slot = "parallel.pipeline"
    traits = ("divides_weights", "divides_batches", "divides_forward")
    mesh_dimensions = ("replicate", "pipeline")
    lockstep_forward = True
    process_attributes = {"_runner": None}
    excludes = {
        "parallel.data": "the stages of a pipeline are not sharded, and several pipelines average their gradients "
        "themselves; take one of the two add-ons, or write mesh={'replicate': 2, 'pipeline': 2} for several pipelines",
        "parallel.tensor": "the layers of a stage are not divided; take one of the two add-ons",
        "compiles_model": "a schedule computes forwards and backwards in its own order; leave CompileAddon out, and "
        "call compile() of the modules within the stages",
        "needs_all_gradients": "a rank has the gradients of its stages alone, which the ledger cannot compare; leave "
        "LedgerAddon out, or train with MultiGPUAddon or FSDPAddon",
        "needs_all_weights": "it compares frozen weights, of which a rank has those of its stages alone; leave "
        "PipelineAddon out, and train adapters with FSDPAddon",
    }
    _schedule: Schedule

    replicated_options = {
        "split": "wrap_model",
        "pipeline_schedule": "wrap_model",
        "pipeline_microbatches": "gradients",
        "stages_per_rank": "wrap_model",
    }

    def __init__(
        self,
        *args: Any,
        split: Any = None,
        pipeline_schedule: Any = "1F1B",
        pipeline_microbatches: Count | None = None,
        stages_per_rank: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.mesh = self.mesh or {"replicate": 1}  # Without sizes, all ranks are one pipeline.
        self.split = check_split(split)
        self.pipeline_schedule = pipeline_schedule
        self.pipeline_microbatches = pipeline_microbatches
        self.stages_per_rank = stages_per_rank
        self._schedule = Schedule(pipeline_schedule)
        self._runner: Runner | None = None
        self._check_options()

    def _check_options(self) -> None:
        """Refuse what a pipeline cannot train."""
        if len(as_dict(self.optimization.optimizer)) > 1:
            raise ConfigError(
                "a pipeline differentiates one loss by all parameters, and the trainer has several "
                "optimizers; give one with several groups, or train with MultiGPUAddon"
            )
        if owners := owners_of_user(type(self), "backward"):
            raise ConfigError(
                f"{owners[0].__name__} overrides backward, which a schedule does not call; change gradients in clip(), "
                "before super().clip(), or train with MultiGPUAddon"
            )

    # -------------------------------------------------------------------------------------------------- the stages

    def _arrangement(self) -> Arrangement:
        """Return how many stages there are, and on which ranks."""
        ranks = self._mesh().sizes.get("pipeline", 1)
        if ranks == 1:
            raise ConfigError(
                f"mesh={self.mesh!r} leaves 1 rank for the stages; write mesh={{'pipeline': 2}}, or leave "
                "PipelineAddon out"
            )
        return Arrangement(self.split, self._schedule, self.stages_per_rank, self.pipeline_microbatches, ranks)

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that has no such stages."""
        super()._check_model(model)
        if self._chain is None:
            self._divide(model)

    def _divide(self, model: nn.Module) -> Chain:
        return self._arrangement().chain(model, self.mode == "train", self.engine.dp_world_size)

    def materialize(self, module: nn.Module) -> None:
        """Move the model to the device once: later, a rank has its stages alone."""
        if self._chain is None:
            super().materialize(module)

    def wrap_model(self, model: nn.Module) -> Any:
        """Keep the stages of this rank, and prepare what computes them."""
        wrapped = super().wrap_model(model)
        engine = self.engine.find(PipelineEngine)
        if engine is not None:
            assert engine.chain is not None
            assert engine.place is not None
            arrangement = self._arrangement()
            context = lambda: self.forward_context()  # noqa: E731
            self._runner = Runner(engine.chain, wrapped, engine.place, arrangement, self.device, context)
        return wrapped

    @property
    def _chain(self) -> Chain | None:
        """The stages, once this rank has dropped those of others."""
        engine = self.engine.find(PipelineEngine)
        return None if engine is None else engine.chain

    def build_engine(self) -> SingleProcess:
        """Return the engine that divides the model, and knows how it is divided."""
        return PipelineEngine(super().build_engine(), self.device, self._arrangement())

    def setup(self) -> None:
        """Refuse parameters that no stage computes with."""
        super().setup()
        known_ids = {id(parameter) for parameter in self.unwrap().parameters()}
        if self._is_parallel and any(id(parameter) not in known_ids for parameter in self.parameters):
            raise ConfigError(
                "the optimizer trains a parameter that is not of the model, and belongs to no stage; make it one of "
                "the model, which its forward uses, or train with MultiGPUAddon"
            )

    def teardown(self) -> None:
        """Drop the schedules."""
        super().teardown()
        self._runner = None

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Drop the states of parameters that other ranks have."""
        super().wrap_optimizers(optimizers)
        if self._is_parallel:
            for optimizer in optimizers.values():
                for parameter in [key for key in optimizer.state if key.is_meta]:
                    del optimizer.state[parameter]

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Refuse batches that the micro-batches do not divide."""
        size = getattr(loader, "batch_size", None)
        if training and self._planned_world() > 1 and isinstance(size, int):
            self._arrangement().check_size(size)
        return super().wrap_loader(loader, training)

    def replicas(self) -> dict[str, Tensor]:
        """Return the parameters of the stages of this rank."""
        return {name: tensor for name, tensor in super().replicas().items() if not tensor.is_meta}

    # ------------------------------------------------------------------------------------------------------ a step

    def on_run_begin(self) -> None:
        """Refuse a loss scale."""
        super().on_run_begin()
        if self._is_parallel and self.precision_part.is_scaled:
            raise ConfigError(
                "precision='fp16' needs a loss scale, which a schedule does not apply; write precision='bf16'"
            )

    def micro_step(self, batch: Any, count: int) -> tuple[Mapping[str, Any], float]:
        """Compute the gradient of one batch with the schedule."""
        if self._runner is None:
            return super().micro_step(batch, count)
        weighs = count > 1 or self.engine.dp_world_size > 1
        output = JoinedOutput(f"what {type(self).__name__}.train_step returned")

        def finish(out: Any, part: Any, rows: int, total: int) -> Tensor:
            values, weight = read_output(out, part, self.sample_weight, type(self), self.mode, self.count_targets)
            try:
                loss = values["loss"]
                targets = values.get("num_targets")
                parts.check_loss(loss)
                output.add(values, rows, float(weight))
                if targets is None:
                    return cast(Tensor, self.scale_loss(loss * (rows / total), None, count))
                return cast(Tensor, self.scale_loss(loss, targets, count) if weighs else loss * targets)
            except Exception as error:
                explain_failure(error, out, part, type(self), self.optimizers)
                raise

        at = self.progress_checker.batch + self.current_run.activity.micro_index
        self._runner.run(self.train_step, batch, finish, True, at)
        values, weight = self._runner.share(output.joined(self.log_train.keeps))
        if not weighs and values.get("num_targets") is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(values["num_targets"])
        return values, weight

    # -------------------------------------------------------------------------------------------------- evaluation

    def test_step(self, batch: Any) -> Any:
        """Compute the step of the task with the schedule."""
        return self._evaluated(super().test_step, batch)

    def predict_step(self, batch: Any) -> Any:
        """Compute the step of the task with the schedule."""
        return self._evaluated(super().predict_step, batch)

    def _evaluated(self, step: Callable[[Any], Any], batch: Any) -> Any:
        if self._runner is None or self._runner.is_running:
            return step(batch)
        output = JoinedOutput(f"what {type(self).__name__}.{self.current_run.activity.evaluation.step} returned")

        def finish(out: Any, part: Any, rows: int, total: int) -> None:
            targets = out.get("num_targets") if isinstance(out, Mapping) else None
            output.add(out, rows, float(self.sample_weight(part, targets)))

        self._runner.run(step, batch, finish, False, 0)
        return self._runner.share(output.joined(True))[0]

    # --------------------------------------------------------------------------------------------------- the state

    def _divided_model(self) -> str:
        """Return what of the model lies in parts, in words."""
        return super()._divided_model() if self._chain is None else f"the stages of {type(self.unwrap()).__name__} are"

    # ---------------------------------------------------------------------------------------------------- the plan

    def describe(self) -> list[Description]:
        """Name the stages, and how long the ranks wait for each other."""
        return [
            *super().describe(),
            Description("stages", self._describe_stages, where="gradients"),
        ]

    def _describe_stages(self, plan: Any) -> list[str] | None:
        """Return a line for the schedule, and one for each stage."""
        if plan.world_size == 1 or self._chain is not None:
            return None
        return self._arrangement().describe(self._divide(self.unwrap()))
