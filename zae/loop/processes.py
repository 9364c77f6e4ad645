"""The seams of a trainer that depend on the number of processes, with their defaults for one; engines override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zae.common import optim
from zae.common.model_weights import load_fitted, plain_state
from zae.common.optimizer_state import load_optimizer_state
from zae.composition.introspect import seam

if TYPE_CHECKING:
    import torch

__all__ = ["Processes"]


class Processes:
    """What a trainer knows of the other processes, and how they hold its model: here it is alone.

    `zae.addons.distributed.DistributedAddon` has the contract for add-ons that fill a slot ``parallel``.

    Attributes
    ----------
    pads : bool
        Whether a rank without a batch takes part in the forward of the others, with a batch of weight 0.
    can_save_alone : bool
        Whether a rank can save the state without the others, after an error.
    """

    pads = False
    can_save_alone = True

    if TYPE_CHECKING:
        device: torch.device
        optimizers: dict[str, Optimizer]

        def unwrap(self) -> nn.Module: ...

    # ------------------------------------------------------------------------------------- the processes

    @seam
    def reduce(self, value: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return value

    @seam
    def gather(self, value: Any) -> list[Any]:
        """List a value of every rank."""
        return [value]

    @seam
    def gather_data(self, value: Any) -> list[Any]:
        """List a value of one rank of each share of the data, on every rank."""
        return self.gather(value)

    @seam
    def gather_beside(self, value: Any) -> list[Any]:
        """List a value of every rank, also from a thread, while the ranks exchange other values."""
        return self.gather(value)

    @seam
    def barrier(self) -> None:
        """Wait for every rank."""

    @property
    @seam
    def rank(self) -> int:
        """The number of this process among those that train."""
        return 0

    @property
    @seam
    def world_size(self) -> int:
        """How many processes train."""
        return 1

    @property
    @seam
    def data_rank(self) -> int:
        """The number of this process among the shares of the data; processes with the same number get equal batches."""
        return self.rank

    @property
    @seam
    def data_size(self) -> int:
        """The number of shares of the data; at most ``world_size``."""
        return self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------- the model in them

    @seam
    def materialize(self, module: nn.Module) -> None:
        """Move the parameters and buffers of the module to the trainer's device, before ``wrap_model``."""
        module.to(self.device)

    @seam
    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Prepare the optimizers for the wrapped model: all of their parameters must be the present ones."""

    @seam
    def layout(self, parameter: Tensor) -> str:
        """Return how the ranks hold a tensor: "replicated", "sharded", "stages" or "foreign"."""
        return "replicated"

    @seam
    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor with all of its shards. All ranks call it, in one order, between steps."""
        return tensor

    @seam
    def like(self, whole: Tensor, reference: Tensor) -> Tensor:
        """Return a whole tensor in the layout of another one. All ranks call it, in one order, between steps."""
        return whole

    @seam
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of these parameters, equal on all ranks; ``clip`` calls it."""
        return optim.gradient_norm(parameters)

    @seam
    def model_state(self) -> dict[str, Tensor]:
        """Return the weights under the keys of the plain module, whole on this rank."""
        return plain_state(self.unwrap())

    @seam
    def held_parts(self) -> dict[str, Tensor]:
        """Return the tensors of which this rank holds a part, by the names that they have in a sharded checkpoint."""
        return {}

    @seam
    def load_model_state(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load weights that fit the module, given under its own keys; every rank calls it in the same order."""
        load_fitted(self.unwrap(), weights, strict)

    @seam
    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Return the state of one optimizer, whole on this rank; every rank calls it in the same order."""
        return self.optimizers[name].state_dict()

    @seam
    def load_optimizer_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Load what ``optimizer_state`` returned for an optimizer of the same parameters; the values are not copied."""
        load_optimizer_state(self.optimizers[name], state)
