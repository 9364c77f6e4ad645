"""Divide a model that calls its modules one after another into stages.

The forward is called once with placeholders, and with placeholders for its modules: what it does beside calling one
module after another with what the one before returned is an error, and is answered with what to write.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zae import random_state
from zae.distributed.blocks import class_name, has_forward, repeated_modules
from zae.errors import ConfigError
from zae.torch_private import call_hooks
from zae.values.walk import tensors_in

__all__ = ["Chain", "Program", "bind", "check_passed", "constants_in", "fake_loss"]

_SHOWN = 10
_DECIDING = (bool, int, float, str, type(None))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_REMEDY = (
    "A divided forward calls modules one after another, each with what the one before returned, inputs of the model "
    "and numbers. Put other computation into a module, or give split=a function of the model and of the number of "
    "stages that returns the modules of the stages in their order; each is called with what the one before returns"
)


# ------------------------------------------------------------------------------------------- what a forward calls


class _Value(Tensor):
    """Stands for an input of the model, or for what a module returned; nothing can be computed with it, or read of it.

    Attributes
    ----------
    argument : str
        The name of the input; empty for what a module returned.
    """

    argument: str

    @staticmethod
    def __new__(cls, argument: str = "") -> _Value:
        value = torch.empty(0).as_subclass(cls)
        value.argument = argument
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)} of what passes from one module to the next")


class _Call(NamedTuple):
    """A call of a module; its arguments have placeholders."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Placeholder(nn.Module):
    """Stands for a module: a call of it is recorded."""

    def __init__(self, path: str, record: Callable[[_Call], _Value]) -> None:
        super().__init__()
        vars(self).update(path=path, record=record)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["record"](_Call(vars(self)["path"], args, kwargs))


def _record(model: nn.Module, opened: Collection[str], constants: Mapping[str, Any]) -> tuple[list[_Call], Any]:
    """Call the forward of the opened modules; return in order which others it calls, and what it returns."""
    ids_of_model = set(map(id, _tensors_of(model).values()))
    calls: list[_Call] = []
    outputs: list[_Value] = []
    modes = _modes()
    refuse = functools.partial(_refusal, model)

    def check(values: Any, receiver: str) -> None:
        """Refuse what a stage would not have, and all but the last output."""
        leaves = _leaves(values)
        for leaf in leaves:
            if not isinstance(leaf, (*_DECIDING, _Value)) and id(leaf) not in ids_of_model:
                raise refuse(f"gives {receiver} a {type(leaf).__name__} that it has made")
        received = {id(leaf) for leaf in leaves if isinstance(leaf, _Value) and not leaf.argument}
        if received != set(map(id, outputs[-1:])):
            raise refuse(f"gives {receiver} something else than what {calls[-1].path}, before it, has returned")

    def record(call: _Call) -> _Value:
        if _modes() != modes:
            raise refuse(f"calls {call.path} under no_grad or autocast, which a stage would leave out")
        check((call.args, call.kwargs), call.path)
        calls.append(call)
        outputs.append(_Value())
        return outputs[-1]

    arguments = {**{name: _Value(name) for name in _inputs_of(model)}, **constants}
    try:
        with random_state.isolated(), _with_placeholders(model, opened, record):
            streams = random_state.comparable()
            returned = model.forward(**arguments)
            if random_state.comparable() != streams:
                raise refuse("draws random numbers, which each rank would do for itself")
    except ConfigError:
        raise
    except Exception as error:
        text = f"{_line_of(error)}{type(error).__name__}: {error}"
        raise ConfigError(
            f"split: the forward of {class_name(model)} cannot be divided ({text:.300}). {_REMEDY}"
        ) from error
    check(returned, "its caller")
    return calls, returned


def _refusal(model: nn.Module, text: str) -> ConfigError:
    return ConfigError(f"the forward of {class_name(model)} {text}. {_REMEDY}")


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _inputs_of(model: nn.Module) -> list[str]:
    """Return the arguments of the forward that have no default."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {class_name(model)} takes *{parameter.name}: name each input of the model there"
            )
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names


@contextmanager
def _with_placeholders(model: nn.Module, opened: Collection[str], record: Callable[[_Call], _Value]) -> Iterator[None]:
    """Put placeholders in the place of the modules that a stage calls; refuse what no stage would do beside it."""
    owners = {path: model.get_submodule(path) for path in opened}
    for path, owner in owners.items():
        if kind := call_hooks(owner):
            raise ConfigError(
                f"{path or 'the model'} ({type(owner).__name__}) has a {kind}, which no stage would call, because its "
                "forward is divided; remove it, or register it on a module within a stage"
            )
    attributes = {path: dict(vars(owner)) for path, owner in owners.items()}
    modules = {path: _children_of(owner) for path, owner in owners.items()}
    try:
        for path, owner in owners.items():
            for name in modules[path]:
                child = f"{path}.{name}" if path else name
                if child not in opened:
                    setattr(owner, name, _Placeholder(child, record))
        yield
    finally:
        for path, owner in owners.items():
            for name, module in modules[path].items():
                setattr(owner, name, module)
    for path, owner in owners.items():
        for key, value in list(vars(owner).items()):
            before = attributes[path].get(key)
            if value is not before and not (isinstance(value, _DECIDING) and value == before):
                vars(owner)[key] = before
                raise ConfigError(
                    f"the forward of {class_name(model)} sets {f'{path}.' * bool(path)}{key}, which no stage would do, "
                    "because this forward is divided: return it, or let a module of its own, within a stage, set it"
                )


def _children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in a module itself by name, one that has two names twice."""
    inner = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in inner if name and "." not in name}


def _line_of(error: Exception) -> str:
    """Return the line of the model that failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    last = frames[-1] if frames else None
    return f"{Path(last.filename).name}, line {last.lineno}, `{last.line}`: " if last and last.line else ""


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            arguments[name] = bound.arguments[name]
        elif bound.arguments[name]:
            raise ConfigError(
                f"self.model was called with {bound.arguments[name]!r:.80} for {name}, where the forward of "
                f"{type(model).__name__} names no parameter; name each input of the model there"
            )
    return arguments


def constants_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a forward may decide: numbers, text and None."""
    return {name: entry for name, entry in values.items() if isinstance(entry, _DECIDING)}


# --------------------------------------------------------------------------------------------------- the stages


Program = Callable[[Mapping[str, Any], Sequence[Any]], Any]
"""What one stage computes: called with the arguments of the model, and with what it received."""


class Chain:
    """The stages of a model.

    Parameters
    ----------
    model : Module
        Its parameters may be on the meta device.
    split : list of str, int, callable or None
        The paths of the modules that begin a stage; a number of stages; or a function of model and number.
    count : int
        How many stages there must be.

    Attributes
    ----------
    names : list of dict of str to Tensor
        For each stage the parameters and buffers that it computes with, by their names in the model.

    Raises
    ------
    ConfigError
        The stages are not a chain, or one has no parameter.
    """

    def __init__(self, model: nn.Module, split: Any, count: int) -> None:
        self._model = model
        self._modules: list[nn.Module] = []  # The stages, where a function gives them.
        self.names: list[dict[str, Tensor]] = []
        tensors = _tensors_of(model)
        if callable(split):
            self._modules = _check_modules(split(model, count), count)
            for module in self._modules:
                self.names.append(_names_within(module, model))
        else:
            self.begins = _check_paths(model, split) if isinstance(split, (list, tuple)) else []
            self._opened = _opened(model, self.begins or repeated_modules(model))
            calls, _ = _record(model, self._opened, {})
            self._paths = [call.path for call in calls]
            self.begins = self.begins or self._balanced(count)
            self._stages = self._slices()
            for part in self._stages:
                prefixes = tuple(f"{path}." for path in self._paths[part])
                ids = {id(leaf) for call in calls[part] for leaf in _leaves((call.args, call.kwargs))}
                names = [name for name, tensor in tensors.items() if name.startswith(prefixes) or id(tensor) in ids]
                self.names.append({name: tensors[name] for name in names})
        self._check()
        used = set(map(id, self.tensors(range(count))))
        self.names[0] |= {name: tensor for name, tensor in tensors.items() if id(tensor) not in used}  # Of no stage.

    # ------------------------------------------------------------------------------------- which stages there are

    def _balanced(self, count: int) -> list[str]:
        """Return modules so that each stage has about as many parameters."""
        model = self._model
        blocks = repeated_modules(model)
        if type(model) is not nn.Sequential and len(blocks) < count:
            raise ConfigError(
                f"{class_name(model)} is no nn.Sequential, and has no list of {count} or more equal blocks, to be "
                f"divided into {count} stages by their parameters; name the modules that begin the later stages: "
                f"split=[{', '.join(map(repr, self._paths[1:count]))}]"
            )
        places: dict[str, int] = {}  # How many parameters are used before a module, by its path.
        total = 0
        for path in self._paths:
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

    def _slices(self) -> list[slice]:
        """Return which of the calls each stage has."""
        cuts = []
        for path in self.begins:
            first = next((at for at, called in enumerate(self._paths) if f"{called}.".startswith(f"{path}.")), None)
            if first is None:
                raise ConfigError(f"split: the forward of {class_name(self._model)} does not call {path!r}")
            cuts.append(first)
        if cuts != sorted(set(cuts)):
            called = [path for _, path in sorted(zip(cuts, self.begins))]
            raise ConfigError(f"split={self.begins!r} is not in the order of the calls; write split={called!r}")
        return list(map(slice, [0, *cuts], [*cuts, len(self._paths)]))

    # -------------------------------------------------------------------------------------------- what they compute

    def programs(self, arguments: Mapping[str, Any], own_stages: Iterable[int]) -> dict[int, Program]:
        """Return what the own stages compute in a call of the model with these arguments, in its present mode."""
        if self._modules:
            return {stage: functools.partial(self._call, stage) for stage in own_stages}
        constants = constants_in(arguments)
        inputs = {name: _Value(name) for name in arguments if name not in constants}
        # Anew for each batch: a forward may decide by what has changed since.
        calls, returned = _record(self._model, self._opened, inputs | constants)
        if [call.path for call in calls] != self._paths:
            raise ConfigError(
                f"called with {', '.join(f'{name}={constant!r:.20}' for name, constant in constants.items())}, "
                f"{class_name(self._model)} calls other modules than with the defaults of its forward. {_REMEDY}"
            )
        ends = [None] * (len(self._stages) - 1) + [returned]
        return {stage: functools.partial(self._run, calls[self._stages[stage]], ends[stage]) for stage in own_stages}

    def _call(self, stage: int, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        """Call a module that the function of the split gave: the first as the model is called."""
        if not stage:
            defaults = {
                name: parameter.default for name, parameter in inspect.signature(self._model.forward).parameters.items()
            }
            received = [argument for name, argument in arguments.items() if argument is not defaults.get(name)]
        return self._modules[stage](*received)

    def _run(self, calls: Sequence[_Call], end: Any, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        """Call the modules of one stage one after another; ``end`` is what the forward returns after the last one."""
        value = received[0] if received else None

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, _Value):
                return leaf
            return arguments[leaf.argument] if leaf.argument else value

        for call in calls:
            args, kwargs = _map(fill, (call.args, call.kwargs))
            value = self._model.get_submodule(call.path)(*args, **kwargs)
        if end is not None:
            return _map(fill, end)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{calls[-1].path} returns {type(value).__name__} at the end of a stage, and a list of paths as split "
                f"passes on one tensor. {_REMEDY}"
            )
        return value

    # --------------------------------------------------------------------------------------------- what they hold

    def _check(self) -> None:
        """Refuse a parameter in two stages, and a stage without any."""
        owner: dict[int, tuple[int, str]] = {}
        for stage, names in enumerate(self.names):
            parameters = {name: tensor for name, tensor in names.items() if isinstance(tensor, nn.Parameter)}
            if not parameters:
                raise ConfigError(f"stage {stage} of {len(self.names)} has no parameter; split the model elsewhere")
            for name, parameter in parameters.items():
                first, other = owner.setdefault(id(parameter), (stage, name))
                if first != stage:
                    use = f"{name} is used in stage {first} and in stage {stage}"
                    tie = f"{other} (stage {first}) and {name} (stage {stage}) are one parameter"
                    raise ConfigError(
                        f"{use if other == name else tie}, and a pipeline holds a parameter in one stage; give each "
                        "its own, or train with FSDPAddon"
                    )

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


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with the results of a function in the place of what its tuples, lists and dicts contain."""
    if type(value) in (tuple, list):
        return type(value)(_map(function, item) for item in value)
    if type(value) is dict:
        return {key: _map(function, entry) for key, entry in value.items()}
    return function(value)


def _leaves(value: Any) -> list[Any]:
    """Return what tuples, lists and dicts contain."""
    leaves: list[Any] = []
    _map(leaves.append, value)
    return leaves


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return dict(itertools.chain(*both))


def _names_within(module: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that a function gave by their names in the model."""
    tensors = {id(tensor): name for name, tensor in _tensors_of(model).items()}
    names = {}
    for name, tensor in _tensors_of(module).items():
        if id(tensor) not in tensors:
            raise ConfigError(
                f"split returned a module with {name}, which is not a parameter or buffer of {class_name(model)}; make "
                "the stages of its own modules"
            )
        names[tensors[id(tensor)]] = tensor
    return names


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
