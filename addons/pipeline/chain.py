"""Divide a model that calls its modules one after another into stages.

The forward is called once with placeholders, and with placeholders for its modules: what it does beside calling one
module after another with what the one before returned is an error, and is answered with what to write.
"""

from __future__ import annotations

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
    """Stands for a tensor in the forward that is recorded; nothing can be computed with it, or read of it."""

    @staticmethod
    def __new__(cls, *args: Any) -> _Value:
        return torch.empty(0).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)} of what passes from one module to the next")


class _Input(_Value):
    """Stands for an input of the model."""

    def __init__(self, argument: str) -> None:
        self.argument = argument


class _Output(_Value):
    """Stands for what a module has returned."""


class _Held:
    """Stands for a parameter or buffer of the model that is given to a module."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Call(NamedTuple):
    """A call of a module; its arguments have placeholders."""

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Recorded(NamedTuple):
    """The calls of a forward, in their order, and what it returns."""

    calls: list[_Call]
    returned: Any


class _Placeholder(nn.Module):
    """Stands for a module: a call of it is recorded."""

    def __init__(self, path: str, record: Callable[[_Call], _Output]) -> None:
        super().__init__()
        self.path = path
        vars(self)["record"] = record

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["record"](_Call(self.path, args, kwargs))


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _record(model: nn.Module, opened: Collection[str], constants: Mapping[str, Any]) -> _Recorded:
    """Call the forward of the opened modules, and return which other modules it calls."""
    _check_forward(model, opened)
    names = {id(each): name for name, each in _tensors_of(model, "").items()}
    calls: list[_Call] = []
    outputs: list[_Output] = []
    modes = _modes()

    def replace(value: Any, where: str) -> Any:
        """Return an argument with the names of tensors in place of them; refuse what stages would not have."""
        if isinstance(value, Tensor) and id(value) in names:
            return _Held(names[id(value)])
        if isinstance(value, _Output) and value is not outputs[-1]:
            source = next(call.path for call, output in zip(calls, outputs) if output is value)
            raise ConfigError(
                f"the forward of {class_name(model)} gives {where} what {source} returned, past the modules between "
                f"them. {_REMEDY}"
            )
        if not isinstance(value, (*_DECIDING, _Input, _Output)):
            raise ConfigError(
                f"the forward of {class_name(model)} gives {where} a {type(value).__name__} that it has made. {_REMEDY}"
            )
        return value

    def record(call: _Call) -> _Output:
        if _modes() != modes:
            raise ConfigError(
                f"the forward of {class_name(model)} calls {call.path} under no_grad or autocast, which a stage would "
                f"leave out. {_REMEDY}"
            )
        args, kwargs = _map(lambda each: replace(each, call.path), (call.args, dict(call.kwargs)))
        if outputs and not any(leaf is outputs[-1] for leaf in _leaves((args, kwargs))):
            raise ConfigError(
                f"the forward of {class_name(model)} calls {call.path} without what {calls[-1].path} has returned. "
                f"{_REMEDY}"
            )
        calls.append(_Call(call.path, args, kwargs))
        outputs.append(_Output())
        return outputs[-1]

    arguments = {**_inputs_of(model), **constants}
    try:
        with random_state.isolated(), _with_placeholders(model, opened, record), _unchanged(model, opened):
            streams = random_state.comparable()
            returned = model.forward(**arguments)
            if random_state.comparable() != streams:
                raise ConfigError(
                    f"the forward of {class_name(model)} draws random numbers, which each rank would do for itself. "
                    f"{_REMEDY}"
                )
    except ConfigError:
        raise
    except Exception as error:
        text = f"{_line_of(error)}{type(error).__name__}: {error}"
        raise ConfigError(
            f"split: the forward of {class_name(model)} cannot be divided ({text:.300}). {_REMEDY}"
        ) from error
    return _Recorded(calls, _map(lambda each: replace(each, "its caller"), returned))


def _inputs_of(model: nn.Module) -> dict[str, _Input]:
    """Return a placeholder for each argument of the forward that has no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return {name: _Input(name) for name in named}


@contextmanager
def _with_placeholders(model: nn.Module, opened: Collection[str], record: Callable[[_Call], _Output]) -> Iterator[None]:
    """Put placeholders in the place of the modules that a stage calls."""
    owners = {path: model.get_submodule(path) for path in opened}
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


def _children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in a module itself by name, one that has two names twice."""
    inner = module.named_modules(remove_duplicate=False)
    return {name: each for name, each in inner if name and "." not in name}


@contextmanager
def _unchanged(model: nn.Module, opened: Collection[str]) -> Iterator[None]:
    """Refuse a forward that sets attributes of the model: it is called here once, and by no stage."""
    before = {name: dict(vars(model.get_submodule(name))) for name in opened}
    yield
    for name, attributes in before.items():
        module = model.get_submodule(name)
        for key, value in list(vars(module).items()):
            was = attributes.get(key)
            if value is not was and not (isinstance(value, _DECIDING) and value == was):
                vars(module)[key] = was
                raise ConfigError(
                    f"the forward of {class_name(model)} sets {f'{name}.' * bool(name)}{key}, which no stage would do, "
                    "because this forward is divided: return it, or let a module of its own, within a stage, set it"
                )


def _check_forward(model: nn.Module, opened: Collection[str]) -> None:
    """Refuse inputs without a name, and hooks of modules whose forward is divided: no stage would call them."""
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the forward of {class_name(model)} takes *{parameter.name}: name each input of the model there"
            )
    for name in opened:
        module = model.get_submodule(name)
        if kind := call_hooks(module):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has a {kind}, which no stage would call, because its "
                "forward is divided; remove it, or register it on a module within a stage"
            )


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
    for name, each in bound.signature.parameters.items():
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            arguments[name] = bound.arguments[name]
        elif bound.arguments[name]:
            raise ConfigError(
                f"self.model was called with {bound.arguments[name]!r:.80} for {name}, where the forward of "
                f"{type(model).__name__} names no parameter; name each input of the model there"
            )
    return arguments


def constants_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a forward may decide: numbers, text and None."""
    return {name: each for name, each in values.items() if isinstance(each, _DECIDING)}


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
        self._chosen: list[nn.Module] = []
        if callable(split):
            self._chosen = _check_modules(split(model, count), count)
            self.names = [self._names_of(each) for each in self._chosen]
        else:
            paths = _check_paths(model, split, count) if isinstance(split, (list, tuple)) else []
            self._opened = _opened(model, paths or repeated_modules(model))
            recorded = _record(model, self._opened, {})
            self.begins = paths or self._balanced(recorded.calls, count)
            self._paths = [[call.path for call in calls] for calls in self._divide(recorded.calls)]
            self.names = [self._names_in(calls) for calls in self._divide(recorded.calls)]
        self._check()
        used = set(map(id, self.tensors(range(count))))
        rest = {name: each for name, each in _tensors_of(model, "").items() if id(each) not in used}
        self.names[0] |= rest  # What no stage computes with.

    # ------------------------------------------------------------------------------------- which stages there are

    def _balanced(self, calls: Sequence[_Call], count: int) -> list[str]:
        """Return modules so that each stage has about as many parameters."""
        model = self._model
        blocks = repeated_modules(model)
        if type(model) is not nn.Sequential and len(blocks) < count:
            raise ConfigError(
                f"{class_name(model)} is no nn.Sequential, and has no list of {count} or more equal blocks, to be "
                f"divided into {count} stages by their parameters; name the modules that begin the later stages: "
                f"split=[{', '.join(repr(call.path) for call in calls[1:count])}]"
            )
        places: dict[str, int] = {}  # How many parameters are used before a module, by its path.
        before = 0
        for call in calls:
            size = sum(parameter.numel() for parameter in model.get_submodule(call.path).parameters())
            if size and before and (call.path in blocks or len(blocks) < count):
                places.setdefault(call.path, before)
            before += size
        if len(places) < count - 1:
            raise ConfigError(
                f"{class_name(model)} has {len(places)} modules with which a stage could begin "
                f"({', '.join(list(places)[:_SHOWN])}), too few for {count} stages; use fewer ranks or "
                "stages_per_rank, or name deeper modules: split=['layers.3.feed_forward']"
            )
        begins: list[str] = []
        left = list(places)
        for stage in range(1, count):
            free = left[: len(left) - (count - 1 - stage)]  # Those after it must do for the later stages.
            target = before * stage / count
            begin = min(free, key=lambda path: abs(places[path] - target))
            begins.append(begin)
            left = left[left.index(begin) + 1 :]
        return begins

    def _divide(self, calls: Sequence[_Call]) -> list[list[_Call]]:
        """Return the calls of each stage."""
        cuts = []
        for path in self.begins:
            first = next((at for at, call in enumerate(calls) if f"{call.path}.".startswith(f"{path}.")), None)
            if first is None:
                raise ConfigError(f"split: the forward of {class_name(self._model)} does not call {path!r}")
            cuts.append(first)
        if cuts != sorted(set(cuts)):
            called = [path for _, path in sorted(zip(cuts, self.begins))]
            raise ConfigError(f"split={self.begins!r} is not in the order of the calls; write split={called!r}")
        return [[*calls[begin:end]] for begin, end in zip([0, *cuts], [*cuts, len(calls)])]

    # -------------------------------------------------------------------------------------------- what they compute

    def programs(self, arguments: Mapping[str, Any], own_stages: Iterable[int]) -> dict[int, Program]:
        """Return what the own stages compute in a call of the model with these arguments, in its present mode."""
        if self._chosen:
            return {stage: self._call_of(stage, arguments) for stage in own_stages}
        constants = constants_in(arguments)
        inputs = {name: _Input(name) for name in arguments if name not in constants}
        # Anew for each batch: a forward may decide by what has changed since.
        recorded = _record(self._model, self._opened, {**inputs, **constants})
        stages = self._divide(recorded.calls)
        if [[call.path for call in calls] for calls in stages] != self._paths:
            raise ConfigError(
                f"called with {', '.join(f'{name}={each!r:.20}' for name, each in constants.items())}, "
                f"{class_name(self._model)} calls other modules than with the defaults of its forward. {_REMEDY}"
            )
        return {stage: self._program(stages, stage, recorded.returned) for stage in own_stages}

    def _call_of(self, stage: int, arguments: Mapping[str, Any]) -> Program:
        """Return what a module of the split computes: the first is called as the model is."""
        module = self._chosen[stage]
        if stage:
            return lambda arguments, received: module(*received)
        defaults = {name: each.default for name, each in inspect.signature(self._model.forward).parameters.items()}
        names = [name for name, each in arguments.items() if each is not defaults.get(name)]
        return lambda arguments, received: module(*(arguments[name] for name in names))

    def _program(self, stages: Sequence[Sequence[_Call]], stage: int, returned: Any) -> Program:
        """Return what one stage computes: it calls its modules one after another."""
        model = self._model
        is_last = stage == len(stages) - 1

        def run(arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
            value = received[0] if received else None

            def fill(each: Any) -> Any:
                if isinstance(each, _Output):
                    return value
                if isinstance(each, _Input):
                    return arguments[each.argument]
                return _attribute(model, each.name) if isinstance(each, _Held) else each

            for call in stages[stage]:
                args, kwargs = _map(fill, (call.args, call.kwargs))
                value = model.get_submodule(call.path)(*args, **kwargs)
            if is_last:
                return _map(fill, returned)
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{stages[stage][-1].path} returns {type(value).__name__} at the end of stage {stage}, and a list "
                    f"of paths as split passes on one tensor. {_REMEDY}"
                )
            return value

        return run

    # --------------------------------------------------------------------------------------------- what they hold

    def _names_in(self, calls: Iterable[_Call]) -> dict[str, Tensor]:
        """Return the tensors that calls compute with, by their names in the model."""
        names: dict[str, Tensor] = {}
        for call in calls:
            names |= _tensors_of(self._model.get_submodule(call.path), f"{call.path}.")
            leaves = [leaf for leaf in _leaves((call.args, call.kwargs)) if isinstance(leaf, _Held)]
            names |= {each.name: _attribute(self._model, each.name) for each in leaves}
        return names

    def _names_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module of the split by their names in the model."""
        name_by_id = {id(each): name for name, each in _tensors_of(self._model, "").items()}
        names = {}
        for name, each in _tensors_of(module, "").items():
            if id(each) not in name_by_id:
                raise ConfigError(
                    f"split returned a module with {name}, which is not a parameter or buffer of "
                    f"{class_name(self._model)}; make the stages of its own modules"
                )
            names[name_by_id[id(each)]] = each
        return names

    def _check(self) -> None:
        """Refuse a parameter in two stages, and a stage without any."""
        owner: dict[int, tuple[int, str]] = {}
        for stage, names in enumerate(self.names):
            for name, each in names.items():
                first, other = owner.setdefault(id(each), (stage, name))
                if first == stage or not isinstance(each, nn.Parameter):
                    continue
                if other == name:
                    raise ConfigError(
                        f"{name} is used in stage {first} and in stage {stage}, so that the stages are not a chain; "
                        "let one stage use it, or train with FSDPAddon"
                    )
                raise ConfigError(
                    f"{other} (stage {first}) and {name} (stage {stage}) are one parameter, and a pipeline holds a "
                    "parameter in one stage; give each its own, or train with FSDPAddon"
                )
            if not any(isinstance(value, nn.Parameter) for value in names.values()):
                raise ConfigError(f"stage {stage} of {len(self.names)} has no parameter; split the model elsewhere")

    def keep(self, stages: Collection[int]) -> None:
        """Let go of the tensors of all other stages, which this rank has dropped."""
        for stage, names in enumerate(self.names):
            if stage not in stages:
                self.names[stage] = {name: each.detach().to("meta") for name, each in names.items()}

    def tensors(self, stages: Iterable[int]) -> list[Tensor]:
        """Return the parameters and buffers of some stages, once each."""
        tensors: dict[int, Tensor] = {}
        for stage in stages:
            tensors |= {id(name): name for name in self.names[stage].values()}
        return list(tensors.values())

    def parameters(self, stages: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters of some stages, once each."""
        return [tensor for tensor in self.tensors(stages) if isinstance(tensor, nn.Parameter)]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with the results of a function in the place of what its tuples, lists and dicts contain."""
    if type(value) in (tuple, list):
        return type(value)(_map(function, item) for item in value)
    if type(value) is dict:
        return {key: _map(function, each) for key, each in value.items()}
    return function(value)


def _leaves(value: Any) -> list[Any]:
    """Return what tuples, lists and dicts contain."""
    leaves: list[Any] = []
    _map(leaves.append, value)
    return leaves


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _tensors_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {f"{prefix}{name}": each for name, each in itertools.chain(*both)}


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


def _check_paths(model: nn.Module, split: Sequence[str], count: int) -> list[str]:
    """Return the paths of a split; refuse one that is no module, and another number than there are stages."""
    modules = dict(model.named_modules())
    for path in split:
        if path not in modules or not path:
            raise ConfigError(
                f"split: {class_name(model)} has no module {path!r}; its modules are "
                f"{', '.join(list(filter(None, modules))[:_SHOWN])}; write one of these paths"
            )
    if len(split) != count - 1:
        raise ConfigError(
            f"split={list(split)!r} names {len(split)} modules that begin a stage, and there are {count} stages; "
            f"name {count - 1}, since the first one begins with the model, or change stages_per_rank or the number "
            "of ranks"
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
