"""Data parallel training: one process for each device, with averaged gradients."""

from __future__ import annotations

import os
from typing import Any

from zae.addons.ddp import ReplicatedAddon
from zae.addons.distributed import DistributedAddon
from zae.errors import ConfigError

__all__ = ["MultiGPUAddon"]

_DIVIDED = {
    "ACCELERATE_USE_FSDP": "FSDP: train with FSDPAddon",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed: train with DeepSpeedAddon",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM: train with FSDPAddon, TensorParallelAddon or both",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config: train with FSDPAddon, TensorParallelAddon or both",
}
"""What `accelerate launch` sets in the environment for a model in parts, with what was asked for, and the remedy."""


class MultiGPUAddon(ReplicatedAddon, DistributedAddon):
    """Train one copy of the model on each of several devices, with averaged gradients (DistributedDataParallel).

    With ``device=["cuda:0", "cuda:1"]``, or ``["cpu", "cpu"]``, ``run`` starts a process for each device; under
    torchrun it joins the ranks of the launcher. When ``run`` returns, the caller's objects have the state of rank 0:
    weights, optimizer, scheduler, counters, history and the state of every add-on; other attributes that a step sets
    are lost with the ranks.

    With a stream, or a DataLoader with ``batch_size=None``, ranks do not know the batch sizes of the others: each batch
    of a step then weighs the same, unless steps return ``num_targets``. ``evaluate`` and ``inference`` outside of
    ``run`` use the first device, or, under torchrun, all.

    Parameters
    ----------
    find_unused_parameters : bool
        Whether steps may leave parameters without gradients; searching for them takes time in every step.
    lockstep : bool, optional
        Whether each rank calls ``train_step`` and ``test_step`` as often as the others, so that a step may exchange
        tensors with them. A rank without samples then gets a batch of another rank, which weighs nothing. By default it
        is so where the model has a ``torch.nn.SyncBatchNorm``.

    Raises
    ------
    ConfigError
        An option is invalid, something cannot be sent to another process, or a port is in use.
    LoaderError
        Every rank would read the same samples of a stream.
    DistributedError
        A rank was killed, ended early, did not answer, or had parameters without gradients. An exception of a rank is
        raised again here, with the same type, the rank and its traceback.

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

    slot = "parallel.data"
    traits = ("replicates_weights",)

    replicated_options = {
        "find_unused_parameters": "wrap_model",
    }

    def __init__(
        self,
        *args: Any,
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_launched()
        super().__init__(*args, **kwargs)
        self.find_unused_parameters = find_unused_parameters


def _check_launched() -> None:
    """Refuse what `accelerate launch` was asked for and would not be done: the ranks hold whole models."""
    for name, plugin in _DIVIDED.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise ConfigError(
                f"accelerate launch was asked for {plugin}. For whole copies of the model on each rank, which is what "
                f"MultiGPUAddon trains, leave it out of the launch and its configuration ({name} is set)"
            )
