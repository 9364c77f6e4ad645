"""Find the stages of a model: which modules each computes, and what it passes on to the next one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from zae.addons.pipeline.tracing import REMEDY, constants_in, defaults_of, trace
from zae.common.walk import tensors_in
from zae.distributed.blocks import class_name, has_forward, repeated_modules
from zae.errors import ConfigError

__all__ = ["Chain", "Program", "check_passed", "fake_loss"]

_SHOWN = 10
_DRAWS = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson")
_KEPT = 8  # Programs for calls with different numbers.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Program(NamedTuple):
    """What one stage computes: called with the arguments of the model it needs, and with what it received."""

    call: Callable[..., Any]
    arguments: tuple[str, ...]

    def __call__(self, arguments: Mapping[str, Any], received: Sequence[Any]) -> Any:
        return self.call(*(arguments[name] for name in self.arguments), *received)


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
        self._modules = dict(model.named_modules())
        self.begins: list[str] = []
        self._opened: set[str] = set()
        self._chosen: list[nn.Module] = []
        self._programs: dict[Any, dict[int, Program]] = {}
        if callable(split):
            self._chosen = _check_modules(split(model, count), count)
            self.names = [self._names_of(each) for each in self._chosen]
        else:
            self.begins = self._choose(split, count)
            self._opened = _above(self.begins)
            graph, stage_of, _ = self._divide(defaults_of(model))
            self.names = self._names_in(graph, stage_of)
        self._check()
        self._computed = [set(each) for each in self.names]
        used = set(map(id, self.tensors(range(count))))
        rest = {name: each for name, each in _tensors_of(model, "").items() if id(each) not in used}
        self.names[0] |= rest  # What no stage computes with.

    # ------------------------------------------------------------------------------------- which stages there are

    def _choose(self, split: Any, count: int) -> list[str]:
        """Return the paths of the modules that begin the second stage and all later ones."""
        if split is None or isinstance(split, int):
            return self._balanced(count)
        for path in split:
            if path not in self._modules or not path:
                raise ConfigError(
                    f"split: {class_name(self._model)} has no module {path!r}; its modules are "
                    f"{', '.join(list(filter(None, self._modules))[:_SHOWN])}; write one of these paths"
                )
        if len(split) != count - 1:
            raise ConfigError(
                f"split={list(split)!r} names {len(split)} modules that begin a stage, and there are {count} stages; "
                f"name {count - 1}, since the first one begins with the model, or change stages_per_rank or the number "
                "of ranks"
            )
        return [*split]

    def _balanced(self, count: int) -> list[str]:
        """Return modules so that each stage has about as many parameters."""
        candidates = self._candidates(count)
        graph, _ = trace(self._model, _above(candidates), defaults_of(self._model))
        places: dict[str, int] = {}  # How many parameters are used before a module, by its path.
        before = 0
        for node in graph.nodes:
            size = _size(self._held(node))
            path = str(node.target)
            if path in candidates and size and before:
                places.setdefault(path, before)
            before += size
        if len(places) < count - 1:
            raise ConfigError(
                f"{class_name(self._model)} has {len(places)} modules with which a stage could begin "
                f"({', '.join(list(places)[:_SHOWN])}), too few for {count} stages; use fewer ranks or "
                "stages_per_rank, or name deeper modules: split=['layers.3.feed_forward']"
            )
        begins: list[str] = []
        left = list(places)
        for stage in range(1, count):
            free = left[: len(left) - (count - 1 - stage)]  # Those after it must do for the later stages.
            wanted = before * stage / count
            begin = min(free, key=lambda path: abs(places[path] - wanted))
            begins.append(begin)
            left = left[left.index(begin) + 1 :]
        return begins

    def _candidates(self, count: int) -> list[str]:
        """Return the repeated modules if they suffice, else the children of the model and of its containers."""
        repeated = list(repeated_modules(self._model))
        return repeated if len(repeated) >= count else list(_children(self._model))

    # -------------------------------------------------------------------------------------------- what they compute

    def programs(self, arguments: Mapping[str, Any], own: Iterable[int]) -> dict[int, Program]:
        """Return what the own stages compute in a call of the model with these arguments, in its present mode."""
        if self._chosen:
            return {stage: self._call_of(stage, arguments) for stage in own}
        constants = constants_in(arguments)
        modes = tuple(self._modules[name].training for name in sorted(self._opened))
        key = tuple((name, type(each), each) for name, each in constants.items()), modes
        if key not in self._programs:
            graph, stage_of, made = self._divide(constants)
            if [set(each) for each in self._names_in(graph, stage_of)] != self._computed:
                raise ConfigError(
                    f"called with {', '.join(f'{name}={each!r:.20}' for name, each in constants.items())}, "
                    f"{class_name(self._model)} computes with other parameters in some stage than with the defaults of "
                    f"its forward. {REMEDY}"
                )
            self._programs[key] = {each: self._program(graph, stage_of, made, each) for each in own}
            if len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
        return self._programs[key]

    def _call_of(self, stage: int, arguments: Mapping[str, Any]) -> Program:
        """Return what a module of the split computes: the first is called as the model is."""
        defaults = {name: each.default for name, each in signature(self._model.forward).parameters.items()}
        given = tuple(name for name, each in arguments.items() if each is not defaults.get(name))
        return Program(self._chosen[stage], () if stage else given)

    def _divide(self, constants: Mapping[str, Any]) -> tuple[fx.Graph, dict[fx.Node, int], dict[str, Any]]:
        """Return the graph of a forward, the stage of each node, and the tensors that the forward makes."""
        graph, made = trace(self._model, self._opened, constants)
        first: dict[str, int] = {}  # The place of the first use of each module that begins a stage.
        for index, node in enumerate(graph.nodes):
            for path in self.begins:
                if node.op in ("call_module", "get_attr") and f"{node.target}.".startswith(f"{path}."):
                    first.setdefault(path, index)
        for path in self.begins:
            if path not in first:
                raise ConfigError(f"split: the forward of {class_name(self._model)} does not call {path!r}")
        cuts = [first[path] for path in self.begins]
        if cuts != sorted(set(cuts)):
            called = sorted(self.begins, key=first.__getitem__)
            raise ConfigError(f"split={self.begins!r} is not in the order of the calls; write split={called!r}")
        stage_of = {}
        for index, node in enumerate(graph.nodes):
            stage_of[node] = sum(cut <= index for cut in cuts)
        return graph, stage_of, made

    def _program(
        self, graph: fx.Graph, stage_of: Mapping[fx.Node, int], made: Mapping[str, Any], stage: int
    ) -> Program:
        """Return what one stage computes, as code that calls the modules of the model."""
        again = _repeatable(graph)
        own = fx.Graph()
        passed = _passed(graph, stage_of, again, stage)
        needed = _needed(graph, stage_of, again, stage, passed)
        arguments = [each for each in graph.nodes if each.op == "placeholder" and each in needed]
        values: dict[fx.Node, Any] = {}
        for node in (*arguments, *_passed(graph, stage_of, again, stage - 1)):
            values[node] = own.placeholder(node.name)
        for node in graph.nodes:
            if node in needed and node not in values:
                values[node] = own.node_copy(node, lambda each: values[each])
        if not any(each.op == "output" for each in own.nodes):
            own.output(tuple(values[each] for each in passed))
        return Program(fx.GraphModule(self._root(own, made), own).forward, tuple(each.target for each in arguments))

    def _root(self, graph: fx.Graph, made: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the nodes of a graph call and read, by their targets."""
        root = {each.target: made.get(each.target) for each in graph.nodes if each.op == "get_attr"}
        root = {name: self._attribute(name) if each is None else each for name, each in root.items()}
        return root | {each.target: self._modules[each.target] for each in graph.nodes if each.op == "call_module"}

    def _attribute(self, path: str) -> Any:
        owner, _, name = path.rpartition(".")
        return getattr(self._modules[owner], name)

    # --------------------------------------------------------------------------------------------- what they hold

    def _held(self, node: fx.Node) -> dict[str, Tensor]:
        """Return the parameters and buffers that a node computes with."""
        path = str(node.target)
        if node.op == "call_module":
            return _tensors_of(self._modules[path], f"{path}.")
        found = self._attribute(path) if node.op == "get_attr" and self._has(path) else None
        return {path: found} if isinstance(found, Tensor) else {}

    def _has(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        return owner in self._modules and hasattr(self._modules[owner], name)

    def _names_in(self, graph: fx.Graph, stage_of: Mapping[fx.Node, int]) -> list[dict[str, Tensor]]:
        """Return what each stage computes with; a parameter belongs where it is used."""
        names: list[dict[str, Tensor]] = [{} for _ in range(len(self.begins) + 1)]
        for node in graph.nodes:
            is_read = node.op == "get_attr"
            where_used = {stage_of[each] for each in node.users} if is_read else {stage_of[node]}
            for stage in where_used:
                names[stage].update(self._held(node))
        return names

    def _names_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module of the split by their names in the model."""
        known = {id(each): name for name, each in _tensors_of(self._model, "").items()}
        found = {}
        for name, each in _tensors_of(module, "").items():
            if id(each) not in known:
                raise ConfigError(
                    f"split returned a module with {name}, which is not a parameter or buffer of "
                    f"{class_name(self._model)}; make the stages of its own modules"
                )
            found[known[id(each)]] = each
        return found

    def _check(self) -> None:
        """Refuse a parameter in two stages, and a stage without any."""
        owner: dict[int, tuple[int, str]] = {}
        for stage, held in enumerate(self.names):
            for name, each in held.items():
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
            if not any(isinstance(each, nn.Parameter) for each in held.values()):
                raise ConfigError(f"stage {stage} of {len(self.names)} has no parameter; split the model elsewhere")

    def keep(self, stages: Collection[int]) -> None:
        """Let go of the tensors of all other stages, which this rank has dropped."""
        for stage, held in enumerate(self.names):
            if stage not in stages:
                self.names[stage] = {name: each.detach().to("meta") for name, each in held.items()}

    def tensors(self, stages: Iterable[int]) -> list[Tensor]:
        """Return the parameters and buffers of some stages, once each."""
        held: dict[int, Tensor] = {}
        for stage in stages:
            held |= {id(each): each for each in self.names[stage].values()}
        return list(held.values())

    def parameters(self, stages: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters of some stages, once each."""
        return [each for each in self.tensors(stages) if isinstance(each, nn.Parameter)]


def _tensors_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {f"{prefix}{name}": each for name, each in itertools.chain(*both)}


def _size(held: Mapping[str, Tensor]) -> int:
    distinct = {id(each): each for each in held.values()}
    return sum(each.numel() for each in distinct.values())


def _above(paths: Iterable[str]) -> set[str]:
    """Return the paths of the modules that contain one of these."""
    found = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def _children(module: nn.Module, prefix: str = "") -> Iterable[str]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS) or not has_forward(child):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_modules(found: Any, count: int) -> list[nn.Module]:
    chosen = list(found) if isinstance(found, (list, tuple)) else []
    if len(chosen) != count or not all(isinstance(each, nn.Module) for each in chosen):
        raise ConfigError(
            f"split returned {found!r:.80}; there are {count} stages: return a list of {count} modules, in their order"
        )
    return chosen


# ------------------------------------------------------------------------------------------------------ the graph


def _repeatable(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the arguments of the model alone: each stage has these, and computes them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_method" and node.target.endswith("_") and node.args[0] in found:
            raise ConfigError(
                f"the forward changes its inputs in place ({node.args[0]}.{node.target}), of which each stage has a "
                f"copy; write {node.target.rstrip('_')} instead"
            )
        is_pure = node.op in ("call_function", "call_method") and not any(
            word in str(getattr(node.target, "__name__", node.target)) for word in _DRAWS
        )
        if node.op == "placeholder" or (is_pure and all(each in found for each in node.all_input_nodes)):
            found.add(node)
    return found


def _passed(graph: fx.Graph, stage_of: Mapping[fx.Node, int], again: set[fx.Node], stage: int) -> list[fx.Node]:
    """Return what a stage passes on: what it or one before has made, and a later one uses."""
    found = []
    for node in graph.nodes:
        is_made = node not in again and node.op != "get_attr" and stage_of[node] <= stage
        if is_made and any(stage_of[user] > stage for user in node.users):
            found.append(node)
    return found


def _needed(
    graph: fx.Graph, stage_of: Mapping[fx.Node, int], again: set[fx.Node], stage: int, passed: Iterable[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that a stage computes, with those that it repeats."""
    found = {node for node in graph.nodes if stage_of[node] == stage and node not in again and node.op != "get_attr"}
    left = [*found, *passed]
    while left:
        for each in left.pop().all_input_nodes:
            if each not in found and (each in again or each.op == "get_attr"):
                found.add(each)
                left.append(each)
    return found


def check_passed(values: Any, stage: int) -> tuple[Tensor, ...]:
    """Return what a stage passes on, which must be tensors."""
    found = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if not found or not all(isinstance(each, Tensor) for each in found):
        kinds = ", ".join(type(each).__name__ for each in found) or "nothing"
        raise ConfigError(
            f"stage {stage} would pass on {kinds}, and only tensors are sent to the next one. Compute what is not a "
            "tensor from the inputs of the model, or within one stage, or split elsewhere"
        )
    return tuple(each.contiguous() for each in found)  # Gloo sends no others.


def fake_loss(values: Any) -> Tensor:
    """Return a scalar that depends on every tensor in what a model returned."""
    found = [each.sum() for each in tensors_in(values) if each.requires_grad]
    return torch.stack([each.real.double() for each in found]).sum() if found else torch.zeros(())
