"""The base of Trainer: the processes that train together, and how the model and its optimizers lie on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.compose.introspect import hook
from zae.model.weights import plain_state
from zae.torch_private import move_module
from zae.values.walk import is_sharded

if TYPE_CHECKING:
    from zae.parts import Precision, SingleProcess
    from zae.trainer import Trainer

__all__ = ["Processes"]


class Processes:
    """What a trainer says of its engine, and the hooks by which model and optimizers come to lie on the processes.

    Attributes
    ----------
    engine : SingleProcess or Engine
        The processes that train together, and how data and parameters lie on them: here one process.
    """

    engine: SingleProcess

    if TYPE_CHECKING:
        device: torch.device
        precision_part: Precision
        optimizers: dict[str, Optimizer]

        def unwrap(self) -> nn.Module: ...

    # ------------------------------------------------------------------------------------- the processes

    @property
    def rank(self) -> int:
        """The number of this process among those that train."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """How many processes train."""
        return self.engine.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.engine.rank == 0

    def reduce(self, value: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return self.engine.reduce(value)

    def gather(self, value: Any) -> list[Any]:
        """List a value of every rank."""
        return self.engine.gather(value)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.engine.reduce(torch.zeros(1))  # A sum is known when every rank has given its part.

    # ------------------------------------------------------------------------------------- the model in them

    @hook
    def materialize(self, module: nn.Module) -> None:
        """Move the parameters and buffers of the module to the trainer's device, before ``wrap_model``."""
        move_module(module, self.device)

    @hook
    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare the optimizers for the wrapped model: all of their parameters must be the present ones."""

    @hook
    def changed_modules(self, how: str) -> Mapping[str, Any]:
        """Return the modules that add-ons change in one way, by their names in the model; "" is the model itself.

        Parameters
        ----------
        how : {"compiled", "recomputed", "divided"}
            Compiled, so that their operations are hidden; computed again in the backward; or divided among ranks.

        Returns
        -------
        mapping
            What is done to each: the module, or of a divided one its ParallelStyle.
        """
        return {}

    @hook
    def weights_to_save(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the weights that checkpoints and ``save_model`` contain: by default all names.

        An override leaves out weights that the script builds again, those of a frozen model for instance; loading
        leaves them as they are. Where nothing is left out it returns the same object.

        Parameters
        ----------
        names : collection of str
            All keys of the plain module.

        Returns
        -------
        collection of str
            Some of them. The same object where nothing is left out.
        """
        return names

    def model_state(self) -> dict[str, Tensor]:
        """Return the weights that are saved, under the keys of the plain module, whole on this rank.

        Where they lie in parts on several ranks, all of them call it.
        """
        from zae.loop.addon_state import gather_tensors

        state = plain_state(self.unwrap())
        names = self.weights_to_save(state)
        if names is not state:
            state = {name: state[name] for name in state if name in names}
        return cast("dict[str, Tensor]", gather_tensors(cast("Trainer", self), state))

    @hook
    def load_model_state(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load weights that fit the module, given under its own keys; every rank calls it in the same order."""
        self.engine.load_model_state(self.unwrap(), weights, strict)

    @hook
    def local_shards(self) -> dict[str, Tensor]:
        """Return the tensors of which this rank holds a part, by the names that they have in a sharded checkpoint.

        A weight has its own name. A parameter of an optimizer stands for its slots, whose names begin with this one.
        """
        from zae.checkpoint.encoding import name_of_place

        tensors = {f"model/{key}": tensor for key, tensor in self.unwrap().state_dict().items()}
        for name, optimizer in self.optimizers.items():
            slots = f"state/{name_of_place(('optimizer', name, 'state'))}"
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            tensors |= {f"{slots}.{index}.": parameter for index, parameter in enumerate(parameters)}
        return {key: tensor for key, tensor in tensors.items() if is_sharded(tensor)}
