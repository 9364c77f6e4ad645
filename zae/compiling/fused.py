"""Put the whole step into one graph, with the update of SGD, Adam and AdamW on torch's own state.

Settings that a scheduler may change are inputs of the graph: a learning rate is never stale, and a change does not
recompile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from zae.common.optim import is_stepped_by_class, parameters_of
from zae.common.torch_private import add_to_all, has_step_hooks
from zae.preview.explain import owners_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Update", "clip", "is_finite", "update", "why_not"]

_OPTIMIZERS = (SGD, Adam, AdamW)
_DTYPES = (torch.float32, torch.float64)
# The seams that cannot read ".grad" in one graph. Overrides of zae do not read it, except in clip().
_SEAMS = (
    "clip", "gradients", "micro_step", "sync_context", "normalize", "unscale", "may_step", "optimizer_step", "step_one",
    "zero_grad",
)  # fmt: skip


class Recipe(NamedTuple):
    """The operations that update a parameter group; their numbers are inputs of each step."""

    state: tuple[str, ...]
    is_sgd: bool
    maximize: bool
    decays: bool
    decoupled: bool
    nesterov: bool


def why_not(trainer: Trainer) -> str | None:
    """Name what one graph of the whole step does not support in a trainer with one optimizer, or return None."""
    name, optimizer = next(iter(trainer.optimizers.items()))
    kind = type(optimizer)
    layers = trainer._module.named_modules()
    moving = [n or "the model itself" for n, m in layers if getattr(m, "track_running_stats", False)]
    dtypes = {str(p.dtype) for p in parameters_of(optimizer) if p.dtype not in _DTYPES}
    seams = [f"{seam}() of {owner.__name__}" for seam, owner in _overrides_with_gradients(type(trainer))]
    reasons: dict[str, Any] = {
        f"the device {trainer.device}: it is tested against the manual loop on a CPU only": trainer.device.type
        != "cpu",
        f"the step of optimizer {name}, a {kind.__name__}, which is not SGD, Adam or AdamW": kind not in _OPTIMIZERS,
        f"optimizer {name}, which is capturable or differentiable": any(
            group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups
        ),
        f"a custom step() of optimizer {name}": not is_stepped_by_class(optimizer),
        f"hooks of the step of optimizer {name}": has_step_hooks(optimizer),
        f"parameters of {', '.join(sorted(dtypes))}": dtypes,
        "windows of several batches": getattr(trainer, "gradient_accumulation_steps", 1) > 1
        or getattr(trainer, "global_batch_size", None) is not None,
        "batches that AutoBatchAddon may compute in parts": "fitting_size" in vars(trainer),
        f"running statistics of BatchNorm or the like ({', '.join(moving)})": moving,
        " and ".join(seams): seams,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _overrides_with_gradients(cls: type) -> list[tuple[str, type]]:
    """List the overrides of seams that need ``.grad``."""
    found = []
    for seam in _SEAMS:
        for owner in owners_of(cls, seam):
            harmless = owner.__module__.startswith("zae.") and (seam != "clip" or owner.__name__ == "CompileAddon")
            harmless = harmless and not (seam == "gradients" and getattr(owner, "reads_gradients", False))
            if not harmless:
                found.append((seam, owner))
    return found


# --------------------------------------------------------------------------------------------- what the host does


class Update:
    """The inputs that a graph needs of SGD, Adam or AdamW in each step, and the bookkeeping after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.layout: tuple[Recipe | None, ...] = ()
        self._groups: dict[int, int] = {}
        self._parameters: list[list[int]] = []
        self._without: set[int] = set()
        self._counters: list[Tensor | None] = []

    def note(self, parameters: Sequence[Tensor]) -> None:
        """Note, after an eager backward, which parameters got no gradient: they get no state."""
        self._without = {id(p) for p in parameters if p.grad is None}

    def arguments(self, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Any]] | None:
        """Return the settings of the next step, a row of float64 per parameter, and the state of each parameter.

        None where some state is missing, which an eager step of the optimizer creates.
        """
        groups = self.optimizer.param_groups
        parameter_ids = [[*map(id, group["params"])] for group in groups]
        if parameter_ids != self._parameters:
            self._parameters = parameter_ids
            self._groups = {each: n for n, ids in enumerate(parameter_ids) for each in ids}
        recipes = [_recipe(self.optimizer, group) for group in groups]
        known: dict[Any, list[float]] = {}
        layout, rows, states, counters = [], [], [], []
        for parameter in parameters:
            at = self._groups.get(id(parameter))
            recipe = None if at is None else recipes[at]
            state = self.optimizer.state.get(parameter, {})
            held = [] if recipe is None else [state.get(name) for name in recipe.state]
            if any(each is None for each in held) and id(parameter) not in self._without:
                return None
            counter = state.get("step")
            key = (at, 1.0 if counter is None else counter.item() + 1)
            if key not in known:
                known[key] = [0.0] if at is None else _settings(self.optimizer, groups[at], key[1])
            layout.append(recipe)
            rows.append(known[key])
            # torch 2.13 treats a float64 scalar as a constant, and would not write to it.
            states.append([each.view(1) if each is not None and not each.ndim else each for each in held])
            counters.append(counter)
        self.layout, self._counters = tuple(layout), counters
        width = max(map(len, rows))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64), states

    def advance(self, stepped: Sequence[bool]) -> None:
        """Count a step of the graph as the optimizer's ``step`` does; ``stepped`` is what `update` returned."""
        counters = [each for each, took_part in zip(self._counters, stepped) if took_part and each is not None]
        if counters:
            add_to_all(counters, 1)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # Schedulers read it.


def _recipe(optimizer: Optimizer, group: Mapping[str, Any]) -> Recipe:
    """Return the operations that a group needs."""
    is_sgd = isinstance(optimizer, SGD)
    if is_sgd:
        state: tuple[str, ...] = ("momentum_buffer",) if group["momentum"] else ()
    else:
        state = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    decoupled = bool(group.get("decoupled_weight_decay"))
    return Recipe(state, is_sgd, group["maximize"], bool(group["weight_decay"]), decoupled, bool(group.get("nesterov")))


def _settings(optimizer: Optimizer, group: Mapping[str, Any], step: float) -> list[float]:
    """Compute the numbers of a step in double precision, as torch's own step does."""
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    if isinstance(optimizer, SGD):
        return [rate, decay, float(group["momentum"]), 1 - float(group["dampening"])]
    beta1, beta2 = map(float, group["betas"])
    decay = 1 - rate * decay if group.get("decoupled_weight_decay") else decay
    size, root = rate / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return [size, decay, 1 - beta1, beta2, 1 - beta2, root, float(group["eps"])]


# -------------------------------------------------------------------------------------- what the graph is made of


def clip(gradients: Sequence[Tensor | None], limit: float) -> tuple[Tensor | None, list[Tensor | None]]:
    """Clip gradients to a norm as ``torch.nn.utils.clip_grad_norm_`` does, and return the norm that they had."""
    if not limit:
        return None, list(gradients)
    norm = nn.utils.get_total_norm([each for each in gradients if each is not None])
    if limit == math.inf:
        return norm, list(gradients)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return norm, [None if each is None else each * factor for each in gradients]


def is_finite(*values: Any) -> Tensor:
    """Return whether all values are finite, as a tensor, without a device synchronization."""
    return torch.stack([each.detach().isfinite().all() for each in values if each is not None]).all()


def update(
    layout: Sequence[Recipe | None],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    settings: Tensor,
    states: Sequence[Any],
    allowed: Tensor | None,
) -> list[bool]:
    """Update parameters and their state from `Update.arguments`, unless ``allowed`` is false.

    Return for each parameter whether it was updated: it needs a gradient, and a recipe in ``layout``.
    """
    stepped = []
    for recipe, parameter, gradient, row, state in zip(layout, parameters, gradients, settings.unbind(0), states):
        stepped.append(recipe is not None and gradient is not None)
        if recipe is None or gradient is None:
            continue
        if any(each is None for each in state):
            raise RuntimeError  # It had no gradient in the eager step. The compiler refuses to trace this.
        numbers = row.to(parameter.dtype).unbind(0)
        after = (_by_sgd if recipe.is_sgd else _by_adam)(recipe, parameter, gradient, numbers, state)
        for old, new in zip((parameter, *state), after):
            new = new.view_as(old)
            old.copy_(new if allowed is None else torch.where(allowed, new, old))
    return stepped


def _by_sgd(recipe: Recipe, parameter: Tensor, gradient: Tensor, row: Sequence[Tensor], state: Any) -> list[Tensor]:
    """Stochastic gradient descent, with momentum."""
    rate, decay, momentum, fresh = row[:4]
    gradient = -gradient if recipe.maximize else gradient
    gradient = gradient + decay * parameter if recipe.decays else gradient
    if not state:
        return [parameter - rate * gradient]
    buffer = momentum * state[0] + fresh * gradient
    return [parameter - rate * (gradient + momentum * buffer if recipe.nesterov else buffer), buffer]


def _by_adam(recipe: Recipe, parameter: Tensor, gradient: Tensor, row: Sequence[Tensor], state: Any) -> list[Tensor]:
    """Adam, and AdamW, which decays the weights by themselves (Loshchilov and Hutter 2019)."""
    size, decay, fresh, keep, fresh_square, root, epsilon = row
    gradient = -gradient if recipe.maximize else gradient
    if recipe.decoupled:
        parameter = parameter * decay
    elif recipe.decays:
        gradient = gradient + decay * parameter
    mean = state[0] + fresh * (gradient - state[0])
    square = keep * state[1] + fresh_square * gradient * gradient
    largest = [torch.maximum(state[2], square)] if len(state) > 2 else []
    spread = (largest[0] if largest else square).sqrt() / root + epsilon
    return [parameter - size * mean / spread, mean, square, *largest]
