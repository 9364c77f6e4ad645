"""A LightningModule as the model of a trainer: its constructor, calls of its hooks, its stages and loaders."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zae.addon import AddOnBase
from zae.addons.lightning import module as lit
from zae.addons.lightning import view as views
from zae.common import random_state
from zae.errors import ConfigError, LoaderError, kind_of

__all__ = ["AttachedModule"]

_OURS = ("log", "optimizers", "clip_gradients", "all_gather")  # Methods of the module that a run replaces.
_STAGES = {"evaluate": "validate", "inference": "predict", "predict": "predict"}  # What ``setup`` of the module gets.


class AttachedModule(AddOnBase):
    """What `LightningAddon` is built on: the module is attached, prepared for a stage, called, and detached.

    Attributes
    ----------
    datamodule : LightningDataModule or None
        The option of this name.
    callback_metrics : dict of str to Tensor
        The last values of what the module logged, by Lightning's names.
    """

    layer = "model"

    def __init__(self, *args: Any, datamodule: Any = None, **kwargs: Any) -> None:
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "train")
        given = [name for index, name in ((3, "optimizer"), (4, "scheduler")) if name in kwargs or len(args) > index]
        if given:
            raise ConfigError(f"{given[0]}= and configure_optimizers of the module would both make one; leave it out")
        placeholder = None if mode == "test" else lit.Configured(None, None)
        kwargs["optimizer"] = placeholder
        super().__init__(*args, **kwargs)
        lit.check_module(self.unwrap())
        if datamodule is not None and lit.base_of(type(datamodule), "LightningDataModule") is None:
            raise ConfigError(f"datamodule is {kind_of(datamodule)}; give a LightningDataModule")
        self.datamodule = datamodule
        self._view = views.TrainerView(self)
        self._module_log = lit.Records(self)
        if placeholder is not None:
            placeholder.module = self.unwrap()
            placeholder.trainer = self
        self.evaluation_stage = ""
        self._stage = ""
        self._prepared: list[str] = []
        self._schedules: list[Any] | None = None
        self._index = 0
        self._closing = False
        self._has_ended = False
        self._outputs: list[Any] = []
        self._last_batch: Any = None

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The last value of each metric, by Lightning's names."""
        return self._module_log.callback_metrics

    @property
    def module_epoch(self) -> int:
        """The epoch as the module counts it: its validation belongs to it."""
        progress = self.progress_checker
        return progress.epoch - (self._closing or progress.pending_validation == "epoch")

    # ----------------------------------------------------------------------------------------------- calls of hooks

    def _hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the module where it has its own."""
        module: Any = self.unwrap()
        return self._call(name, *args) if lit.is_overridden(module, name) else None

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of the module, of which `Records.log` knows the name."""
        module: Any = self.unwrap()
        before = self._module_log.hook
        if getattr(vars(module).get("log"), "__self__", None) is not self._module_log:
            self._module_log = lit.Records(self)  # In a copy of the trainer, which shares the other one.
            self._attach(module)
        self._module_log.hook = name
        try:
            return lit.call(getattr(module, name), *args)
        finally:
            self._module_log.hook = before

    def _forward(self, name: str, *args: Any) -> Any:
        """Call a step of the module, through what an engine has put around the module."""
        module: Any = self.unwrap()
        if self.model is module and self.world_size == 1:
            return self._call(name, *args)

        def step(*given: Any) -> Any:
            vars(module).pop("forward", None)
            return self._call(name, *given)

        vars(module)["forward"] = step
        try:
            return self.model(*args)
        finally:
            vars(module).pop("forward", None)

    def _of_data(self, name: str) -> Any:
        """Return the owner of a hook of the data: the data module where it has its own, else the module."""
        owners = [each for each in (self.datamodule, self.unwrap()) if each is not None]
        return next((each for each in owners if lit.is_overridden(each, name)), owners[-1])

    # ------------------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Attach the module, and call its ``prepare_data``, ``setup`` and ``configure_model``."""
        if self.current_run.is_call:
            self._stage = "test" if self.mode == "test" else "fit"
        elif self._stage != "test":
            self._stage = _STAGES.get(self.current_run.user_call, "fit")
        module: Any = self.unwrap()
        self._attach(module)
        self._prepare(self._stage)
        self.current_run.valid_loader = lit.usable_loader(module, self.current_run.valid_loader)
        super().setup()
        if self._stage == "fit" and self.precision_part.is_scaled and lit.is_overridden(module, "optimizer_step"):
            raise ConfigError(
                f"{type(module).__name__}.optimizer_step is not called with a loss scale; write precision='bf16'"
            )

    def _attach(self, module: Any) -> None:
        """Give the module its ``trainer``, and the methods that a run replaces."""
        self._view = views.TrainerView(self)
        placeholder = inspect.unwrap(self.optimizer)  # Without what AMPAddon puts around it.
        if isinstance(placeholder, lit.Configured):
            placeholder.module = module
            placeholder.trainer = self
        module.trainer = self._view
        if self.datamodule is not None:
            self.datamodule.trainer = self._view
        own = (self._module_log.log, self._view.get_optimizers, self._view.clip_gradients, self._view.all_gather)
        for each in module.modules():
            if lit.base_of(type(each)):
                vars(each).update(zip(_OURS, own, strict=True))

    def _prepare(self, stage: str) -> None:
        """Call the hooks before a stage, each once."""
        module: Any = self.unwrap()
        with random_state.seeded(self.seed):
            for each in (self.datamodule, module):
                if each is not None and stage not in self._prepared:
                    if not self._prepared and self.is_main:
                        each.prepare_data()
                    each.setup(stage)
            if not self._prepared:
                module.configure_model()
        self._prepared = [*dict.fromkeys([*self._prepared, stage])]

    def teardown(self) -> None:
        """Detach the module."""
        module: Any = self.unwrap()
        try:
            for each in (module, self.datamodule):
                if each is not None and self._stage:
                    each.teardown(self._stage)
        finally:
            self._stage = ""
            self._prepared = []
            super().teardown()
            ours = [each for each in module.modules() if lit.base_of(type(each))]
            for each in ours:
                for name in _OURS:
                    vars(each).pop(name, None)
            module.trainer = None

    def loaders(self, stage: str = "fit") -> Any:
        """Return the loaders of the data module, or of the module: for ``run`` a pair, else one or a dict of them.

        Parameters
        ----------
        stage : {"fit", "validate", "test", "predict"}
            Whose loaders. Several loaders are named ``dataloader_idx_0`` and so on.

        Returns
        -------
        tuple or object
            Of "fit" the loader and the validation's, which may be None: ``trainer.run(3, *trainer.loaders())``.
        """
        if stage not in ("fit", "validate", "test", "predict"):
            raise ConfigError(f"stage={stage!r}; it must be 'fit', 'validate', 'test' or 'predict'")
        self._attach(self.unwrap())
        self._prepare(stage)
        if stage != "fit":
            return self._loader_of("val" if stage == "validate" else stage)
        if isinstance(train := self._loader_of("train"), Mapping):
            raise LoaderError("train_dataloader returned several loaders; return one that yields what a step needs")
        return train, self._loader_of("val")

    def _loader_of(self, kind: str) -> Any:
        """Return the loader of the owner of this hook."""
        return lit.loader_of(self._of_data(f"{kind}_dataloader"), f"{kind}_dataloader")
