"""Data parallel training with an Accelerator of Hugging Face Accelerate: its launcher, precision and folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from torch.optim import Optimizer

from zae.addons.accelerate import folder as folders
from zae.addons.accelerate.accelerator import (
    Prepared,
    check_arguments,
    check_given,
    check_loader,
    check_made,
    check_plain,
    make,
)
from zae.addons.ddp import ReplicatedAddon
from zae.addons.distributed import DistributedAddon
from zae.checkpoint.group import Group
from zae.compose.introspect import slots_of
from zae.distributed.launcher import launched_world
from zae.errors import ConfigError, did_you_mean
from zae.optim.factories import as_dict
from zae.parts import Precision

__all__ = ["AccelerateAddon"]


class AccelerateAddon(ReplicatedAddon, DistributedAddon):
    """Train with an ``Accelerator`` of Hugging Face Accelerate, which the steps have as ``self.accelerator``.

    Its ``print``, ``is_main_process``, ``gather_for_metrics``, ``log`` and trackers, ``sync_gradients`` and
    ``unwrap_model(self.model)`` work as in a loop of your own. One process works too.

    Parameters
    ----------
    accelerator : accelerate.Accelerator, optional
        The one to use, which your script has made under ``accelerate launch``, torchrun, or in one process.
    accelerator_args : dict, optional
        The arguments of one that each rank makes: ``{"mixed_precision": "bf16", "log_with": "tensorboard"}``. By
        default, what ``accelerate launch`` was given. On a CPU, ``cpu=True`` is added.
    lockstep : bool, optional
        As for `MultiGPUAddon`: for steps that gather.

    Raises
    ------
    ConfigError
        An option is invalid; the Accelerator has other processes than the trainer; or it has what zae does itself
        (accumulation, batches, compilation) or another engine has (DeepSpeed, FSDP, float16). The text says what to
        write instead.
    DistributedError
        As for `MultiGPUAddon`.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import AccelerateAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         self.accelerator.print(self.accelerator.num_processes, "process")
    ...         return {"loss": self.model(batch).square().mean()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(AccelerateAddon)(model, "cpu", optimizer=optimizer, accelerator_args={"cpu": True})
    >>> _ = trainer.run(1, [torch.ones(4, 2)])
    1 process
    """

    slot = "parallel"
    traits = ("takes_launch_precision",)
    process_attributes = {"accelerator": None, "_prepared_parts": None}
    _accelerator_args: dict[str, Any]

    replicated_options = {
        "accelerator_args": "wrap_model",
    }

    def __init__(
        self,
        *args: Any,
        accelerator: Any = None,
        accelerator_args: Annotated[Mapping[str, Any], "a dict of arguments of Accelerator by name"] | None = None,
        **kwargs: Any,
    ) -> None:
        slots = slots_of(type(self))
        if accelerator is not None and accelerator_args is not None:
            raise ConfigError("accelerator and accelerator_args are both given; give the Accelerator, or its arguments")
        self._accelerator_args = check_arguments(accelerator_args, slots)
        if accelerator is not None and len(args) < 2 and "device" not in kwargs:
            kwargs["device"] = getattr(accelerator, "device", "auto")
        super().__init__(*args, **kwargs)
        check_plain(as_dict(self.optimizer).values(), as_dict(self.scheduler).values())
        self.accelerator = accelerator
        self._prepared_parts: Prepared | None = None
        if accelerator is not None:
            check_given(accelerator, slots, len(self.devices), launched_world() is not None)
            self._take_handlers([accelerator.ddp_handler])
        else:
            self._take_handlers(self._accelerator_args.get("kwargs_handlers") or ())

    def _take_handlers(self, handlers: Sequence[Any]) -> None:
        """Use the options of DistributedDataParallel that the Accelerator has; refuse the rest."""
        for handler in handlers:
            if type(handler).__name__ == "InitProcessGroupKwargs":
                raise ConfigError(
                    "accelerator_args has InitProcessGroupKwargs, and zae makes the process group; write "
                    "timeout=... and backend=... as options of the trainer"
                )
            if type(handler).__name__ != "DistributedDataParallelKwargs":
                continue
            defaults = vars(type(handler)())
            changed = {name: value for name, value in vars(handler).items() if value != defaults[name]}
            self.find_unused_parameters = self.find_unused_parameters or changed.pop("find_unused_parameters", False)
            if changed:
                name, value = next(iter(changed.items()))
                raise ConfigError(
                    f"DistributedDataParallelKwargs has {name}={value!r}, which AccelerateAddon does not "
                    "use; leave it out"
                )

    # ----------------------------------------------------------------------------------------- model and optimizers

    def wrap_model(self, model: nn.Module) -> Any:
        """Let the Accelerator prepare the model, and wrap it for the ranks."""
        if self.accelerator is None:
            self.accelerator = make(self._accelerator_args, self.device, self.world_size)
        slots = slots_of(type(self))
        check_given(self.accelerator, slots, 1, True)
        check_made(self.accelerator, self.device, self.rank, self.world_size)
        if self.accelerator.mixed_precision == "bf16":
            self.precision_part = Precision("bf16")
        if self._prepared_parts is not None:
            self._prepared_parts.release()
        self._prepared_parts = Prepared(self.accelerator, self.unwrap())
        return super().wrap_model(model)

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Let the Accelerator prepare the optimizers."""
        super().wrap_optimizers(optimizers)
        if self._prepared_parts is not None:
            self._prepared_parts.add_optimizers(optimizers.values())

    def setup(self) -> None:
        """Let the Accelerator prepare the schedulers."""
        super().setup()
        if self._prepared_parts is not None:
            self._prepared_parts.add_schedulers(self.schedulers.values())

    def teardown(self) -> None:
        """Take the objects from the Accelerator, which stays."""
        prepared = self._prepared_parts
        self._prepared_parts = None
        if prepared is not None:
            prepared.release()
        super().teardown()

    def wrap_loader(self, loader: Any, training: bool) -> Any:
        """Refuse a loader that the Accelerator has prepared."""
        check_loader(loader)
        return super().wrap_loader(loader, training)

    def sync_context(self, last: bool) -> AbstractContextManager[None]:
        """Show in ``accelerator.sync_gradients`` whether a micro-batch is the last one of a step."""
        self.accelerator.sync_gradients = last
        return super().sync_context(last)

    # ----------------------------------------------------------------------------------------- Accelerate's folders

    def save_accelerate_state(self, folder: str | Path) -> Path:
        """Write the folder that ``accelerator.save_state(folder)`` writes, whole or not at all; all ranks call it.

        It holds weights, optimizers, schedulers and random streams, for a loop with Accelerate. What the epochs and
        batches need to continue is only in the checkpoints of `StateManagerAddon`.

        Parameters
        ----------
        folder : str or Path
            A new folder, or one that Accelerate has written, which is replaced.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        CheckpointError
            The folder contains other files, or the disk refuses.
        """
        self.engine.rendezvous("save_accelerate_state")
        with self.ready():
            return folders.save(self.accelerator, folder, Group(self.rank, self.gather))

    def load_accelerate_state(self, folder: str | Path, parts: Sequence[str] = folders.PARTS) -> None:
        """Load a folder that ``Accelerator.save_state`` has written: all of it, or on an error nothing.

        Nothing is read by pickle: a file with more than tensors, numbers, text and arrays is refused. Counters and the
        position in the data stay as they are. All ranks call it.

        Parameters
        ----------
        folder : str or Path
            The folder.
        parts : sequence of {"model", "optimizer", "scheduler", "random"}
            What is loaded; random streams only into as many processes as have saved them. Objects that were registered
            with ``accelerator.register_for_checkpointing`` are loaded with the optimizer.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            The folder, or a file of it, is missing, is damaged or contains other objects, or does not fit the trainer.
        """
        if unknown := [name for name in parts if name not in folders.PARTS]:
            raise ConfigError(
                f"parts has {unknown[0]!r}{did_you_mean(unknown[0], folders.PARTS)}; available: "
                f"{', '.join(folders.PARTS)}"
            )
        self.engine.rendezvous("load_accelerate_state")
        with self.ready():
            assert self._prepared_parts is not None
            self._load_folder(folders.Folder(folder, self._prepared_parts), parts)

    def _load_folder(self, folder: folders.Folder, parts: Sequence[str]) -> None:
        state = dict(self.state_dict())
        if "model" in parts:
            state["model"] = folder.weights(self.unwrap())
            state.pop("training_weights", None)
        for kind, present in (("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            if kind in parts:
                state[kind] = folder.states(kind, list(present))
        if "scheduler" in parts and "optimizer" in parts:
            folder.check_counts(state["optimizer"], state["scheduler"])
        custom = folder.custom_states() if "optimizer" in parts else []
        several: list[Any] = self.gather(folder.streams(self.rank)) if "random" in parts else [None]
        progress = self.progress_checker
        position = dict(vars(self.loader_position))
        self.load_state_dict(state)
        self.progress_checker = progress
        vars(self.loader_position).update(position)
        for owner, saved in custom:
            owner.load_state_dict(saved)
        if all(streams is not None for streams in several):  # Else another number of processes has saved them.
            folders.restore_streams(several[self.rank])
