"""Divide a model into stages: modules that a function gives, or parts of a forward that calls one after another."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zae.addons.pipeline.forward_calls import (
    REMEDY,
    Call,
    Value,
    calls_in_forward,
    constants_in,
    leaves_in,
    map_leaves,
    tensors_of,
)
from zae.distributed.blocks import class_name, has_forward, repeated_modules
from zae.errors import ConfigError
from zae.values.walk import tensors_in

__all__ = ["Chain", "ForwardChain", "ModuleChain", "Program", "chain_of", "check_passed", "fake_loss"]

_SHOWN = 10
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

Program = Callable[[Mapping[str, Any], Sequence[Any]], Any]
"""What one stage computes: called with the arguments of the model, and with what it received."""


def chain_of(model: nn.Module, split: Any, count: int) -> Chain:
    """Return the stages of a model.

    Parameters
    ----------
    model : Module
        Its parameters may be on the meta device.
    split : list of str, int, callable or None
        The paths of the modules that begin a stage; a number of stages; or a function of model and number.
    count : int
        How many stages there must be.

    Raises
    ------
    ConfigError
        The stages are not a chain, or one has no parameter.
    """
    if callable(split):
        return ModuleChain(model, _check_modules(split(model, count), count))
    begins = _check_paths(model, split) if isinstance(split, (list, tuple)) else []
    return ForwardChain(model, begins, count)


class Chain(ABC):
    """The stages of a model: what each computes, and the tensors that it computes with.

    Attributes
    ----------
    model : Module
        The model.
    names : list of dict of str to Tensor
        For each stage its parameters and buffers, by their names in the model.
    """

    def __init__(self, model: nn.Module, names: list[dict[str, Tensor]]) -> None:
        _check(names)
        self.model = model
        self.names = names
        # What no stage uses is of the first one.
        used = set(map(id, self.tensors(range(len(names)))))
        self.names[0] |= {name: tensor for name, tensor in tensors_of(model).items() if id(tensor) not in used}

    @abstractmethod
    def programs(self, arguments: Mapping[str, Any], own_stages: Iterable[int]) -> dict[int, Program]:
        """Return what the own stages compute in a call of the model with these arguments, in its present mode."""

    def keep(self, stages: Collection[int]) -> None:
        """Let go of the tensors of all other stages, which this rank has dropped."""
        self.names = [names if stage in stages else {} for stage, names in enumerate(self.names)]

    def tensors(self, stages: Iterable[int]) -> list[Tensor]:
        """Return the parameters and buffers of some stages, once each."""
        tensors = {id(tensor): tensor for stage in stages for tensor in self.names[stage].values()}
        return list(tensors.values())

    def parameters(self, stages: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters of some stages, once each."""
        return [tensor for tensor in self.tensors(stages) if isinstance(tensor, nn.Parameter)]


class ModuleChain(Chain):
    """Stages that are modules: the first is called as the model is, the others with what the one before returned."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        super().__init__(model, [_names_within(module, model) for module in modules])
        self._modules = modules

    def programs(self, arguments: Mapping[str, Any], own_stages: Iterable[int]) -> dict[int, Program]:
        """Return the calls of the modules."""
        return {stage: functools.partial(self._call, stage) for stage in own_stages}

    def _call(self, stage: int, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        if not stage:
            parameters = inspect.signature(self.model.forward).parameters
            defaults = {name: parameter.default for name, parameter in parameters.items()}
            received = [argument for name, argument in arguments.items() if argument is not defaults.get(name)]
        return self._modules[stage](*received)


class ForwardChain(Chain):
    """Stages that are parts of a forward, from the call of one module on up to that of another.

    Attributes
    ----------
    begins : list of str
        The paths of the modules that begin the later stages.
    """

    def __init__(self, model: nn.Module, begins: list[str], count: int) -> None:
        self._opened = _opened(model, begins or repeated_modules(model))
        calls, _ = calls_in_forward(model, self._opened, {})
        self._paths = [call.path for call in calls]
        self.begins = begins or _balanced(model, self._paths, count)
        self._stages = _slices(model, self._paths, self.begins)
        super().__init__(model, [_names_used(model, calls[part]) for part in self._stages])

    def programs(self, arguments: Mapping[str, Any], own_stages: Iterable[int]) -> dict[int, Program]:
        """Return the calls of the forward; it is read anew, since it may decide by what has changed since."""
        constants = constants_in(arguments)
        inputs = {name: Value(name) for name in arguments if name not in constants}
        calls, returned = calls_in_forward(self.model, self._opened, inputs | constants)
        if [call.path for call in calls] != self._paths:
            raise ConfigError(
                f"called with {', '.join(f'{name}={constant!r:.20}' for name, constant in constants.items())}, "
                f"{class_name(self.model)} calls other modules than with the defaults of its forward. {REMEDY}"
            )
        ends = [None] * (len(self._stages) - 1) + [returned]
        return {stage: functools.partial(self._run, calls[self._stages[stage]], ends[stage]) for stage in own_stages}

    def _run(self, calls: Sequence[Call], end: Any, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        """Call the modules of one stage one after another; ``end`` is what the forward returns after the last one."""
        value = received[0] if received else None

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return arguments[leaf.argument] if leaf.argument else value

        for call in calls:
            args, kwargs = map_leaves(fill, (call.args, call.kwargs))
            value = self.model.get_submodule(call.path)(*args, **kwargs)
        if end is not None:
            return map_leaves(fill, end)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{calls[-1].path} returns {type(value).__name__} at the end of a stage, and a list of paths as split "
                f"passes on one tensor. {REMEDY}"
            )
        return value


# ------------------------------------------------------------------------------------------- which stages there are


def _check_paths(model: nn.Module, split: Sequence[str]) -> list[str]:
    """Return the paths of a split; refuse one that is no module."""
    modules = dict(model.named_modules())
    for path in split:
        if path not in modules or not path:
            raise ConfigError(
                f"split: {class_name(model)} has no module {path!r}; its modules are "
                f"{', '.join(list(filter(None, modules))[:_SHOWN])}; write one of these paths"
            )
    return [*split]


def _check_modules(returned: Any, count: int) -> list[nn.Module]:
    modules = list(returned) if isinstance(returned, (list, tuple)) else []
    if len(modules) != count or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(
            f"split returned {returned!r:.80}; there are {count} stages: return a list of {count} modules, in their "
            "order"
        )
    return modules


def _is_container(module: nn.Module) -> bool:
    """Return whether a module only lists others: a plain Sequential, a ModuleList, a ModuleDict."""
    return type(module) is nn.Sequential or isinstance(module, _CONTAINERS) or not has_forward(module)


def _opened(model: nn.Module, paths: Iterable[str]) -> set[str]:
    """Return the paths of the modules whose forward is divided: those above these paths, and containers in them."""
    opened = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            opened.add(path)
    for path, module in model.named_modules(remove_duplicate=False):
        if path.rpartition(".")[0] in opened and _is_container(module):
            opened.add(path)
    return opened


def _balanced(model: nn.Module, called_paths: Sequence[str], count: int) -> list[str]:
    """Return the paths that begin the later stages so that each stage has about as many parameters."""
    blocks = repeated_modules(model)
    if type(model) is not nn.Sequential and len(blocks) < count:
        raise ConfigError(
            f"{class_name(model)} is no nn.Sequential, and has no list of {count} or more equal blocks, to be "
            f"divided into {count} stages by their parameters; name the modules that begin the later stages: "
            f"split=[{', '.join(map(repr, called_paths[1:count]))}]"
        )
    places: dict[str, int] = {}  # How many parameters are used before a module, by its path.
    total = 0
    for path in called_paths:
        size = sum(parameter.numel() for parameter in model.get_submodule(path).parameters())
        if size and total and (path in blocks or len(blocks) < count):
            places.setdefault(path, total)
        total += size
    if len(places) < count - 1:
        raise ConfigError(
            f"{class_name(model)} has {len(places)} modules with which a stage could begin "
            f"({', '.join(list(places)[:_SHOWN])}), too few for {count} stages; use fewer ranks or "
            "stages_per_rank, or name deeper modules: split=['layers.3.feed_forward']"
        )
    paths = list(places)
    chosen = [-1]
    for stage in range(1, count):
        later_stages = count - 1 - stage  # The modules after it must do for them.
        free = range(chosen[-1] + 1, len(paths) - later_stages)
        chosen.append(min(free, key=lambda index: abs(places[paths[index]] - total * stage / count)))
    return [paths[index] for index in chosen[1:]]


def _slices(model: nn.Module, called_paths: Sequence[str], begins: Sequence[str]) -> list[slice]:
    """Return which of the calls each stage has."""
    cuts = []
    for path in begins:
        first = next((at for at, called in enumerate(called_paths) if f"{called}.".startswith(f"{path}.")), None)
        if first is None:
            raise ConfigError(f"split: the forward of {class_name(model)} does not call {path!r}")
        cuts.append(first)
    if cuts != sorted(set(cuts)):
        called = [path for _, path in sorted(zip(cuts, begins))]
        raise ConfigError(f"split={begins!r} is not in the order of the calls; write split={called!r}")
    return list(map(slice, [0, *cuts], [*cuts, len(called_paths)]))


# --------------------------------------------------------------------------------------------- what they hold


def _names_used(model: nn.Module, calls: Sequence[Call]) -> dict[str, Tensor]:
    """Return the tensors of the modules that are called, and those that they are given, by their names in the model."""
    prefixes = tuple(f"{call.path}." for call in calls)
    ids = {id(leaf) for call in calls for leaf in leaves_in((call.args, call.kwargs))}
    tensors = tensors_of(model)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes) or id(tensor) in ids}


def _names_within(module: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that a function gave by their names in the model."""
    tensors = {id(tensor): name for name, tensor in tensors_of(model).items()}
    names = {}
    for name, tensor in tensors_of(module).items():
        if id(tensor) not in tensors:
            raise ConfigError(
                f"split returned a module with {name}, which is not a parameter or buffer of {class_name(model)}; make "
                "the stages of its own modules"
            )
        names[tensors[id(tensor)]] = tensor
    return names


def _check(names_of_stages: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse a parameter in two stages, and a stage without any."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, names in enumerate(names_of_stages):
        parameters = {name: tensor for name, tensor in names.items() if isinstance(tensor, nn.Parameter)}
        if not parameters:
            raise ConfigError(f"stage {stage} of {len(names_of_stages)} has no parameter; split the model elsewhere")
        for name, parameter in parameters.items():
            first, other = owner.setdefault(id(parameter), (stage, name))
            if first != stage:
                use = f"{name} is used in stage {first} and in stage {stage}"
                tie = f"{other} (stage {first}) and {name} (stage {stage}) are one parameter"
                raise ConfigError(
                    f"{use if other == name else tie}, and a pipeline holds a parameter in one stage; give each "
                    "its own, or train with FSDPAddon"
                )


# ------------------------------------------------------------------------------------------ what passes between them


def check_passed(values: Any, stage: int) -> tuple[Tensor, ...]:
    """Return what a stage passes on, which must be tensors."""
    passed = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if not passed or not all(isinstance(tensor, Tensor) for tensor in passed):
        kinds = ", ".join(type(tensor).__name__ for tensor in passed) or "nothing"
        raise ConfigError(
            f"stage {stage} would pass on {kinds}, and only tensors are sent to the next one. Compute what is not a "
            "tensor from the inputs of the model, or within one stage, or split elsewhere"
        )
    return tuple(tensor.contiguous() for tensor in passed)  # Gloo sends no others.


def fake_loss(values: Any) -> Tensor:
    """Return a scalar that depends on every tensor in what a model returned."""
    tensors = [tensor.sum() for tensor in tensors_in(values) if tensor.requires_grad]
    return torch.stack([tensor.real.double() for tensor in tensors]).sum() if tensors else torch.zeros(())
