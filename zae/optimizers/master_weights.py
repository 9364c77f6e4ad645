"""Float32 weights for the optimizer of a model whose own weights are in bfloat16."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.errors import ConfigError

__all__ = ["MasterWeights", "float32_weights"]

_LOW = (torch.bfloat16, torch.float16)
_MASTER = "master"


class MasterWeights(Optimizer):
    """Keep float32 weights for an optimizer whose parameters are in bfloat16 or float16.

    A step of a small rate is lost in bfloat16: a weight has 8 bits, and what is less than 1/256 of it is rounded away.
    Here the optimizer steps float32 weights, with its states in float32, and each weight of the model is the float32
    one rounded to the nearest. This is bitwise the loop that keeps a float32 copy of each parameter, gives it the
    gradient in float32, steps an optimizer of the copies, and copies them back.

    Gradients are in the type of the model: they are accumulated, averaged over ranks and clipped in it. Parameters in
    float32 are stepped as they are. The float32 weights are in the state of the optimizer, as ``"master"``, and so in
    checkpoints: a resume is bitwise. A weight that something else has changed, such as ``apply_weights``, is taken from
    the model in the next step, and the others keep their float32 values.

    Parameters
    ----------
    optimizer : Optimizer
        Of the parameters in bfloat16; any one that steps each parameter by its gradient.

    Raises
    ------
    ConfigError
        No parameter is in bfloat16 or float16; the optimizer needs a closure, or evaluates with other weights.

    Examples
    --------
    >>> import torch
    >>> from zae.optimizers import MasterWeights
    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3))
    >>> for _ in range(4):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight.item(), round(optimizer.state[weight]["master"].item(), 6)  # Without: 1.0.
    (0.99609375, 0.996)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self.inner = optimizer
        self._versions: dict[Tensor, int] = {}  # Of the weights, when they were last rounded.
        super().__setstate__({})  # Makes the hooks; the groups and the state are those of the other optimizer.
        for parameter, state in optimizer.state.items():  # Some make it with the parameters.
            if isinstance(parameter, Tensor) and parameter.dtype in _LOW:
                state.update({k: v.float() for k, v in state.items() if _is_low(v)})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer, by parameter, with the float32 weights."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the optimizer."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer.

        Parameters
        ----------
        param_group : dict
            As for any optimizer.
        """
        self.inner.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the float32 weights, and round them into those of the model.

        Parameters
        ----------
        closure : None
            Not supported: the loss would be evaluated with float32 weights.
        """
        if closure is not None:
            raise ConfigError("MasterWeights.step takes no closure; call loss.backward(), and then step()")
        stepped = {p: self._master(p) for p in self._low() if p.grad is not None}
        for parameter, master in stepped.items():
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
            state = self.state.pop(parameter, {})
            if rest := {key: value for key, value in state.items() if key != _MASTER}:
                self.state[master] = rest  # Most optimizers make their state where there is none.
        try:
            with self._replaced(stepped):
                self.inner.step()
        finally:  # A step that fails leaves the float32 weights in the state.
            for parameter, master in stepped.items():
                master.grad = None
                self.state[parameter][_MASTER] = master
        for parameter, master in stepped.items():
            parameter.copy_(master)
            self._versions[parameter] = parameter._version

    def _low(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"] if p.dtype in _LOW)

    def _master(self, parameter: Tensor) -> Tensor:
        """Return the float32 weights of a parameter; what was changed since it was rounded is taken from it."""
        present = self.state[parameter].get(_MASTER) if parameter in self.state else None
        if present is None:
            return parameter.detach().float()
        if self._versions.get(parameter) == parameter._version:
            return present
        is_same = present.to(parameter.dtype) == parameter
        # In the order of memory of the present one, which a kernel's result may depend on.
        return torch.where(is_same, present, parameter.detach().float(), out=torch.empty_like(present))

    @contextmanager
    def _replaced(self, instead: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Let the groups have other tensors in the block, and move the state of these to the parameters."""
        # Not their data: a parameter of another type loses the hooks with which ranks average its gradient.
        groups = [(group, group["params"]) for group in self.param_groups]
        for group, parameters in groups:
            group["params"] = [instead.get(each, each) for each in parameters]
        try:
            yield
        finally:
            for (_, parameters), group in zip(groups, self.param_groups, strict=True):  # A load makes new groups.
                group["params"] = parameters
            for parameter, other in instead.items():
                if other in self.state:
                    self.state[parameter] = self.state.pop(other)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in float32, as it was saved.

        Parameters
        ----------
        state_dict : dict
            What ``state_dict`` returned.
        """
        # torch casts the values of a state to the type of the parameter.
        with self._replaced({each: each.new_empty(0, dtype=torch.float32) for each in self._low()}):
            self.inner.load_state_dict(state_dict)
        self._versions = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer alone: a copy compares its weights again."""
        return {"inner": self.inner, "_versions": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Set the optimizer, or, of a state without one, its groups and its state."""
        rest = {key: value for key, value in state.items() if key not in ("inner", "_versions")}
        vars(self).update({key: value for key, value in state.items() if key not in rest})
        super().__setstate__({})
        for name, value in rest.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"MasterWeights({self.inner!r})"


def has_low(optimizer: Optimizer) -> bool:
    """Return whether some parameters of an optimizer are in bfloat16 or float16."""
    return any(p.dtype in _LOW for group in optimizer.param_groups for p in group["params"])


def check_kind(optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not step by the gradients alone."""
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"MasterWeights cannot step {name}, which evaluates the loss itself, through a closure")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"MasterWeights cannot step {name}, which exchanges the weights of the model in train() and eval(); use a "
            "model in float32 with AMPAddon"
        )


def _check(optimizer: Any) -> None:
    """Refuse what cannot step float32 copies of its parameters."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"MasterWeights takes an optimizer, and got {type(optimizer).__name__}; write "
            "MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3))"
        )
    check_kind(optimizer)
    name, parameters = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
    if not has_low(optimizer):
        kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        raise ConfigError(
            f"MasterWeights keeps float32 weights of parameters in bfloat16, and those of {name} are in {kinds}; "
            "convert the model first, model.to(torch.bfloat16), or leave MasterWeights out"
        )
    if parts := [p for p in parameters if type(p.data) is not Tensor]:
        raise ConfigError(
            f"MasterWeights cannot step a {type(parts[0].data).__name__}; FSDPAddon keeps float32 shards itself: "
            "write a model in float32 and mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _LOW


def float32_weights(model: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Return the state dict of a model in float32: the float32 weights of `MasterWeights`, and all else converted.

    Parameters
    ----------
    model : Module
        The model, for instance ``trainer.unwrap()``.
    *optimizers : Optimizer
        Its optimizers, for instance ``*trainer.optimizers.values()``.

    Returns
    -------
    dict of str to Tensor
        Copies; integers keep their type.

    Examples
    --------
    >>> import torch
    >>> from zae.optimizers import MasterWeights, float32_weights
    >>> model = torch.nn.Linear(1, 1).to(torch.bfloat16)
    >>> optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1e-3))
    >>> {name: str(each.dtype) for name, each in float32_weights(model, optimizer).items()}
    {'weight': 'torch.float32', 'bias': 'torch.float32'}
    """
    masters: dict[str, Tensor] = {}
    wrapped = [each for each in optimizers if isinstance(each, MasterWeights)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for optimizer in wrapped:
            if _MASTER in optimizer.state.get(parameter, {}):
                masters[name] = optimizer._master(parameter)
    found: dict[str, Any] = {name: masters.get(name, each) for name, each in model.state_dict().items()}
    return {
        name: each.detach().to(torch.float32 if each.is_floating_point() else each.dtype, copy=True)
        for name, each in found.items()
    }
