"""The optimizers and schedulers of a trainer. Here: what their groups hold, parameters and learning rates.

`factories` makes them, and `checks` and `schedule_checks` refuse those that do not fit; `optimization` steps them, with
`gradients`; `modes` exchanges the weights of those that evaluate with other ones. `optimizer_state` loads a state that
`saved_state` has fitted to the present optimizer, and `copies` are copies of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["learning_rates", "parameters_of", "parameters_outside", "parameters_to_clip"]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters that an optimizer holds."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def parameters_outside(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    """List the parameters of an optimizer that the model, and its ``state_dict``, do not have."""
    inside = {id(p) for p in model.parameters()}
    return [p for p in parameters_of(optimizer) if id(p) not in inside]


def parameters_to_clip(optimizers: Mapping[str, Optimizer], model: nn.Module) -> list[list[Tensor]]:
    """List the parameters that are clipped together: all for one optimizer, those of each for several.

    They have the model's order, as in ``clip_grad_norm_(model.parameters(), ...)``: the order of a sum of squares
    decides its last bit. Frozen parameters are included, as they may be unfrozen later.
    """
    ordered = list(model.parameters())
    model_ids = {id(p) for p in ordered}
    lists = []
    for optimizer in optimizers.values():
        parameters = parameters_of(optimizer)
        trained_ids = {id(p) for p in parameters}
        # One optimizer clips all of the model, also what it does not hold.
        of_model = ordered if len(optimizers) == 1 else [p for p in ordered if id(p) in trained_ids]
        outside = [p for p in parameters if id(p) not in model_ids]
        lists.append(of_model + outside)
    return lists


def learning_rates(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """Return the learning rates: ``lr``, or ``lr/<optimizer>`` and ``lr/<group>`` where there are several.

    Groups without a rate, or with None, are left out: some optimizers adapt it themselves.
    """
    rates: dict[str, float] = {}
    for name, optimizer in optimizers.items():
        prefix = f"lr/{name}" if len(optimizers) > 1 else "lr"
        for index, group in enumerate(optimizer.param_groups):
            if group.get("lr") is not None:
                rates[f"{prefix}/{index}" if index else prefix] = float(group["lr"])
    return rates
