"""The base of Trainer: its hooks that depend on the number of processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim
from zae.common.model_weights import load_fitted, plain_state
from zae.common.torch_private import move_module
from zae.common.walk import map_tensors
from zae.compose.introspect import hook
from zae.errors import ConfigError
from zae.optim.state import load_optimizer_state

if TYPE_CHECKING:
    import torch

    from zae.loop.run import Run
    from zae.parts import Engine, Precision

__all__ = ["Processes"]


class Processes:
    """Short forms of what a trainer's engine answers, and the hooks that depend on the number of processes.

    Attributes
    ----------
    engine : Engine
        The processes that train together, and how data and parameters lie on them: here one process.
    has_own_precision : bool
        Whether an engine decides about the precision, that of `accelerate launch` included.
    """

    engine: Engine
    has_own_precision = False

    if TYPE_CHECKING:
        device: torch.device
        current_run: Run
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
        self.engine.barrier()

    @hook
    def request(self, action: str) -> None:
        """Ask for something that is done after this step, before the next one; of several ranks, any may ask.

        Several ranks agree on it as on `stop`: it is done after the next step, except after a validation, an epoch and
        the last step of the run, where it is done at once. What was done at that step already is not done twice.

        Parameters
        ----------
        action : {"log", "validate", "save", "end_epoch"}
            Log the training metrics, evaluate the ``valid_loader``, save the state (with StateManagerAddon), or end
            the epoch, whose other batches are left out.
        """
        self.current_run.request(action)

    # ------------------------------------------------------------------------------------- the model in them

    @hook
    def materialize(self, module: nn.Module) -> None:
        """Move the parameters and buffers of the module to the trainer's device, before ``wrap_model``."""
        empty = next((name for name, weight in module.named_parameters() if weight.is_meta), None)
        if empty is not None and self.device.type != "meta":
            raise ConfigError(
                f"model has parameters on the meta device, which have no values ({empty}, for instance); make it "
                "outside of torch.device('meta'), or call model.to_empty(device='cpu') and load weights first"
            )
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
    def layout(self, parameter: Tensor) -> str:
        """Return how the ranks hold a tensor: "replicated", "sharded", "stages" or "foreign"."""
        return "replicated"

    @hook
    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor with all of its shards. All ranks call it, in one order, between steps."""
        return tensor

    @hook
    def redistribute_like(self, whole: Tensor, reference: Tensor) -> Tensor:
        """Return a whole tensor in the layout of another one. All ranks call it, in one order, between steps."""
        return whole

    @hook
    def whole_values(self, value: Any, keeps: bool = True) -> Any:
        """Return a value of dicts, lists and tuples in which every tensor is whole. All ranks call it, in one order.

        What was gathered is in the memory of the host: a device needs room for one whole tensor at a time, not for all.

        Parameters
        ----------
        value : object
            Contains tensors of which this rank may have a part.
        keeps : bool
            Whether this rank needs them: otherwise what was gathered is on the meta device.
        """

        def gathered(tensor: Tensor) -> Tensor:
            found = self.full_tensor(tensor)
            return found if found is tensor else found.to("cpu" if keeps else "meta")

        return map_tensors(gathered, value)

    @hook
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of these parameters, equal on all ranks; ``clip`` calls it."""
        return optim.gradient_norm(parameters)

    @hook
    def weights_to_save(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the weights that checkpoints and ``save_model`` contain: by default all names.

        An override leaves out weights that the script builds as they were, of a frozen model for instance. Loading
        then leaves these as they are.

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

    @hook
    def model_state(self) -> dict[str, Tensor]:
        """Return the weights that are saved, under the keys of the plain module, whole on this rank."""
        state = plain_state(self.unwrap())
        kept = self.weights_to_save(state)
        return state if kept is state else {name: state[name] for name in state if name in kept}

    @hook
    def local_shards(self) -> dict[str, Tensor]:
        """Return the tensors of which this rank holds a part, by the names that they have in a sharded checkpoint."""
        return {}

    @hook
    def load_model_state(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Load weights that fit the module, given under its own keys; every rank calls it in the same order."""
        load_fitted(self.unwrap(), weights, strict)

    @hook
    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Return the state of one optimizer, whole on this rank; every rank calls it in the same order."""
        from zae.optimizers.quantized import flatten_states

        return flatten_states(self.optimizers[name].state_dict())

    @hook
    def load_optimizer_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Load what ``optimizer_state`` returned for an optimizer of the same parameters; the values are not copied."""
        from zae.optimizers.quantized import quantize_states

        load_optimizer_state(self.optimizers[name], quantize_states(state))
