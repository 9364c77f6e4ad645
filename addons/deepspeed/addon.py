"""ZeRO: optimizer states, gradients and parameters in parts on several devices, with the engine of DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.addon import Description
from zae.addons.deepspeed import config as settings
from zae.addons.deepspeed.zero import Zero, load_library
from zae.addons.distributed import DistributedAddon
from zae.arguments import Interval, check_argument
from zae.compose.introspect import with_trait
from zae.distributed.blocks import check_divisible
from zae.distributed.collectives import broadcast
from zae.errors import ConfigError
from zae.optim.factories import as_dict
from zae.parts import Engine, Precision, SingleProcess

__all__ = ["DeepSpeedAddon"]

Stage: TypeAlias = Annotated[int, Interval("[0, 3]"), "0, 1, 2 or 3"]
_DEFAULT_STAGE = 2
_SHOWN = 5


class DeepSpeedEngine(Engine):
    """The engine of ranks among which DeepSpeed divides the state.

    Attributes
    ----------
    zero : Zero or None
        What DeepSpeed has made of the model and its optimizer, once it has; None in mode "test".
    """

    can_save_alone = False  # Each rank has a part of the optimizer's state.
    needs_lockstep_forward = True  # The backward, and the forward of stage 3, are collectives.

    def __init__(self, inner: SingleProcess) -> None:
        super().__init__(inner)
        self.zero: Zero | None = None

    def begin(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Send nothing: DeepSpeed has sent the weights of rank 0."""
        if self.zero is None:
            self.inner.begin(module, parameters)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Refuse gradients that are missing; the backward of DeepSpeed has averaged the others."""
        assert self.zero is not None
        self.zero.check_used()

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm over the parts of all ranks, which DeepSpeed adds up."""
        return self.inner.gradient_norm(parameters) if self.zero is None else self.zero.gradient_norm()

    def load_model_state(self, module: nn.Module, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load whole weights, of which each rank keeps its part."""
        if self.zero is None:
            self.inner.load_model_state(module, weights, strict)
            return
        named = dict(module.named_parameters(remove_duplicate=False))
        self.zero.set_weights({id(named[key]): value for key, value in weights.items() if key in named})
        rest = {key: value for key, value in weights.items() if key not in named}
        module.load_state_dict(rest, strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer, whole on this rank: it gets the parts of the others."""
        if self.zero is None:
            return self.inner.optimizer_state(optimizer)
        with self.zero.whole_slots():
            return self.inner.optimizer_state(optimizer)


class DeepSpeedAddon(DistributedAddon):
    """Train with DeepSpeed: ZeRO divides optimizer states (1), gradients too (2), and parameters too (3).

    Batches, steps and records are those of `MultiGPUAddon`. DeepSpeed steps a copy of the optimizer in float32, clips
    to ``gradient_clip``, and is given the learning rates of ``scheduler``. One process trains without DeepSpeed.

    Parameters
    ----------
    zero_stage : {0, 1, 2, 3}, optional
        What is divided; by default that of ``deepspeed_config``, else 2.
    deepspeed_bf16 : bool, optional
        Compute in bfloat16, with weights of the optimizer in float32 (stages 1 to 3): parameters are cast, and the
        floating tensors that the model is called with. By default that of ``deepspeed_config``, else False.
    deepspeed_config : dict, str or Path, optional
        A configuration of DeepSpeed, or its JSON file. "auto" is filled in from the trainer; where an entry differs
        from the trainer's option, it is refused, as are the sections of an optimizer and a scheduler.

    Raises
    ------
    ConfigError
        An option is invalid, an entry of the configuration is not used here, or the composition cannot be divided.
    DistributedError
        As for `MultiGPUAddon`; and where a step left parameters without gradients.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import DeepSpeedAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> config = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
    >>> trainer = Task.add_on(DeepSpeedAddon)(model, ["cpu", "cpu"], optimizer=optimizer, deepspeed_config=config)
    >>> trainer.zero_stage
    3
    """

    lockstep_forward = True
    traits = ("keeps_gradients", "hooks_forwards", "takes_launch_precision")
    excludes = {
        "precision": "DeepSpeed computes in the types of its configuration; leave AMPAddon out, and write "
        "deepspeed_bf16=True",
        "compiles_model": "DeepSpeed has hooks in the model, and compiles it in another way; leave CompileAddon out",
        "needs_all_gradients": "gradients and states lie in flat parts, of which the ledger knows nothing; leave "
        "LedgerAddon out, or train with MultiGPUAddon or FSDPAddon",
    }
    _config: dict[str, Any]

    replicated_options = {
        "zero_stage": "wrap_optimizers",
        "deepspeed_bf16": "wrap_optimizers",
        "deepspeed_config": "wrap_optimizers",
    }

    def __init__(
        self,
        *args: Any,
        zero_stage: Stage | None = None,
        deepspeed_bf16: bool | None = None,
        deepspeed_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self._config = settings.read(deepspeed_config)
        super().__init__(*args, **kwargs)
        stage = self._option("zero_stage", zero_stage, "zero_optimization", "stage", _DEFAULT_STAGE)
        self.zero_stage = check_argument("zero_stage", stage, Stage)
        bf16 = self._option("deepspeed_bf16", deepspeed_bf16, "bf16", "enabled", False)
        self.deepspeed_bf16 = check_argument("deepspeed_bf16", bf16, bool)
        if self.deepspeed_bf16:
            self.precision_part = Precision("bf16")
        self._check_options()

    def _option(self, name: str, argument: Any, section: str, key: str, default: Any) -> Any:
        """Return an option, by default that of the configuration."""
        value = self._config.get(section, {}).get(key, settings.AUTO)
        if argument is None:
            return default if value == settings.AUTO else value
        if value not in (settings.AUTO, argument):
            raise ConfigError(
                f"deepspeed_config has {section}.{key}={value!r}, and the trainer {name}={argument!r}; write 'auto' "
                "there, or leave the option out"
            )
        return argument

    def _check_options(self) -> None:
        """Refuse what DeepSpeed cannot train."""
        if len(as_dict(self.optimization.optimizer)) > 1:
            raise ConfigError(
                "DeepSpeed steps one optimizer, and the trainer has several; give one with several "
                "groups, or train with MultiGPUAddon"
            )
        if self.deepspeed_bf16 and not self.zero_stage:
            raise ConfigError("zero_stage=0 has no float32 weights beside those in bfloat16; write zero_stage=1")
        requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if requested != "no" and not (requested == "bf16" and self.deepspeed_bf16):
            raise ConfigError(
                f"accelerate launch was asked for mixed_precision={requested} (ACCELERATE_MIXED_PRECISION is set), and "
                f"DeepSpeedAddon was given deepspeed_bf16={self.deepspeed_bf16}; write deepspeed_bf16=True and "
                "--mixed_precision bf16, or --mixed_precision no"
            )
        copying = with_trait(type(self), "copies_weights")
        if copying is not None and (self.zero_stage == 3 or self.deepspeed_bf16):
            raise ConfigError(
                f"{copying.__name__} averages the weights that the model has, which are parts in stage 3 and rounded "
                "in bfloat16; write zero_stage=2 without deepspeed_bf16, or train with FSDPAddon"
            )
        reading = with_trait(type(self), "needs_all_weights")
        if reading is not None and self.zero_stage == 3:
            raise ConfigError(
                f"{reading.__name__} reads the frozen weights, which are parts in stage 3; write zero_stage=2, or "
                "train with FSDPAddon"
            )
        if self.deepspeed_bf16 and self._planned_world() == 1 and self.mode == "train":
            raise ConfigError(
                "deepspeed_bf16=True is the precision of several ranks, and one process trains without DeepSpeed; give "
                "a list of devices, or train it with AMPAddon, precision='bf16'"
            )

    # --------------------------------------------------------------------------------------- model and optimizer

    def build_engine(self) -> SingleProcess:
        """Return the engine that knows how the model is divided."""
        zero = self._zero  # Of an earlier run: the model is divided once.
        engine = DeepSpeedEngine(super().build_engine())
        engine.zero = zero
        return engine

    @property
    def _zero(self) -> Zero | None:
        """What DeepSpeed has made of the model and its optimizer, once it has."""
        engine = self.engine.find(DeepSpeedEngine)
        return None if engine is None else engine.zero

    def setup(self) -> None:
        """Show the engine as the model."""
        super().setup()
        if self._zero is not None:
            self.model = self._zero.engine
            self.current_run.setup.wrapped_model = self.model

    def describe(self) -> list[Description]:
        """Tell the stage."""
        return [
            *super().describe(),
            Description("DeepSpeed, ZeRO stage", self._planned_stage, where="optimizer_step"),
        ]

    def _planned_size(self, plan: Any) -> int:
        """Check the configuration before the ranks begin; a model in parts has no sizes to plan with."""
        if self._zero is not None:
            raise ConfigError("plan() looks at the plain model, which DeepSpeed has divided; call it before run()")
        size = super()._planned_size(plan)
        if size > 1:
            self._fill(size)
        return size

    def _planned_stage(self, plan: Any) -> int | None:
        """Return the stage in a plan with several ranks, for which the configuration is checked."""
        if plan.world_size == 1:
            return None
        self._fill(plan.world_size, plan.batch_size)
        return self.zero_stage

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model whose weights DeepSpeed would keep in another precision, or not divide rightly."""
        super()._check_model(model)
        named = dict(model.named_parameters())
        if any(hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping") for parameter in named.values()):
            raise ConfigError(
                "DeepSpeed has divided this model for another trainer; make a new model, and load the "
                "weights of the other one: trainer.save_model(path), apply_weights(path)"
            )
        check_divisible({"": model})
        if names := [name for name, parameter in named.items() if parameter.dtype != torch.float32]:
            kind = str(named[names[0]].dtype).removeprefix("torch.")
            raise ConfigError(
                f"{', '.join(names[:_SHOWN])} is {kind}, and DeepSpeed steps weights in float32; write model.float(), "
                "with deepspeed_bf16=True to compute in bfloat16, or train with MultiGPUAddon"
            )
        frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
        if frozen and self.deepspeed_bf16:
            raise ConfigError(
                f"{', '.join(frozen[:_SHOWN])} is frozen, and deepspeed_bf16=True would round it for "
                "good; leave deepspeed_bf16 out"
            )

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Start the engine once, with the model and its optimizer."""
        super().wrap_optimizers(optimizers)
        if not self._is_parallel or self.mode == "test":
            return
        (optimizer,) = optimizers.values()
        if self._zero is None:
            self._start(optimizer)
        elif self._zero.optimizer is not optimizer:
            raise ConfigError(
                "the optimizer was replaced after DeepSpeed has divided it; change its param_groups, or "
                "make a new trainer with a new model"
            )

    def _start(self, optimizer: Optimizer) -> None:
        model = self.unwrap()
        self._check_model(model)
        settings.check_parameters(optimizer, model)
        if self.zero_stage:
            allowed = self._config.get("zero_allow_untested_optimizer", False) is True
            settings.check_kind(optimizer, allowed)
        # Rank 0 sends its buffers; DeepSpeed sends the weights.
        broadcast(buffer for buffer in model.buffers() if buffer.numel())
        filled = self._fill(self.world_size)
        engine = self.engine.find(DeepSpeedEngine)
        assert engine is not None
        engine.zero = Zero(load_library(self.device), model, optimizer, filled)

    def _fill(self, world: int, batch: int | None = None) -> Any:
        windows = self.step_window.batches_of(batch, world)
        clip = self.optimization.gradient_clip
        option = f"gradient_accumulation_steps={windows}"
        if self.step_window.samples is not None:
            option = f"global_batch_size={self.step_window.samples}"
        truths = {
            "zero_optimization.stage": (self.zero_stage, f"zero_stage={self.zero_stage}"),
            "bf16.enabled": (self.deepspeed_bf16, f"deepspeed_bf16={self.deepspeed_bf16}"),
            "gradient_clipping": (clip, f"gradient_clip={clip}"),
            **({} if windows is None else {"gradient_accumulation_steps": (windows, option)}),
        }
        return settings.fill(self._config, truths, batch, world)

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Refuse a configuration with another batch size than that of the loader."""
        batch = getattr(loader, "batch_size", None)
        if training and self._planned_world() > 1 and isinstance(batch, int):
            self._fill(self._planned_world(), batch)
        return super().wrap_loader(loader, training)

    # ------------------------------------------------------------------------------------------------ a step

    def gradients(self, batch: Any) -> list[tuple[Mapping[str, Any], float]]:
        """Begin a window of the engine."""
        if self._zero is not None:
            self._zero.begin_window([*self.unwrap().parameters()])
        return super().gradients(batch)

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Tell the engine which micro-batch is the last one of a step."""
        if self._zero is not None:
            self._zero.begin_batch(last)
        return super().sync_context(last)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Let the engine differentiate, which brings the gradients of the ranks together."""
        if self._zero is None:
            super().backward(loss, **kwargs)
        else:
            self._zero.backward(loss, **kwargs)

    def normalize(self, num_targets: list[Any]) -> None:
        """Divide the parts of the gradients."""
        if self._zero is None:
            super().normalize(num_targets)
            return
        optimization = self.optimization
        before = self.optimization.parameters
        optimization.parameters = self._zero.gradients()
        try:
            super().normalize(num_targets)
        finally:
            optimization.parameters = before

    def clip(self) -> None:
        """Compute ``grad_norm``; the engine clips in its step."""
        if self._zero is None:
            super().clip()
        elif self.optimization.gradient_clip:
            self.optimization.grad_norm = self.engine.gradient_norm(self.parameters)

    def optimizer_step(self) -> bool:
        """Let the engine step; it leaves a step out whose gradients are not finite."""
        return super().optimizer_step() if self._zero is None else self._zero.step()

    def zero_grad(self) -> None:
        """Drop the gradients of a step that was left out."""
        if self._zero is not None:
            self._zero.drop_window()
        super().zero_grad()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Evaluate with the module in the engine."""
        before = self.model
        if self._zero is not None:
            self.model = self.unwrap()
        try:
            with super().evaluation_context():
                yield
        finally:
            self.model = before

    # ------------------------------------------------------------------------------------------------- the state

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights in float32, whole on this rank: it gets the parts of the others."""
        state = super().model_state()
        zero = self._zero
        if zero is None or (zero.stage < 3 and not zero.is_bf16):
            return state
        named = dict(self.unwrap().named_parameters(remove_duplicate=False))
        # To the host, one after another: a device has no room for the whole model.
        return {key: zero.whole(named[key]).cpu() if key in named else value for key, value in state.items()}

    def _divided_model(self) -> str:
        """Return what of the model lies in parts, in words."""
        return super()._divided_model() if self._zero is None else "DeepSpeed has divided the model"
