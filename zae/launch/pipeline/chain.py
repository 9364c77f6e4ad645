"""Find the stages of a model: which modules each computes, and what it passes on to the next one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from zae.common.walk import tensors_in
from zae.errors import ConfigError
from zae.launch.blocks import class_name, has_forward, repeated_modules
from zae.launch.pipeline.hints import UNKNOWN, Hints
from zae.launch.pipeline.timing import as_arguments, measure
from zae.launch.pipeline.tracing import REMEDY, constants_in, defaults_of, trace

__all__ = ["Chain", "Program", "check_passed", "fake_loss"]

_SHOWN = 10
_DRAWS = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "_assert")  # Or are checks.
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
    example : object, optional
        What the model is called with: a number of stages is then balanced by the time that they take with it.

    Attributes
    ----------
    names : list of dict of str to Tensor
        For each stage the parameters and buffers that it computes with, by their names in the model.

    Raises
    ------
    ConfigError
        The stages are not a chain, or one has no parameter.
    """

    def __init__(self, model: nn.Module, split: Any, count: int, example: Any = None) -> None:
        self._example = {} if example is None else as_arguments(model, example)
        self._is_shaped = False  # Whether the forward decides by shapes.
        self._model, self._modules = model, dict(model.named_modules())
        self.begins: list[str] = []
        self._chosen: list[nn.Module] = []
        self._programs: dict[Any, dict[int, Program]] = {}
        if callable(split):
            self._chosen = _check_modules(split(model, count), count)
            self.names = [self._names_of(each) for each in self._chosen]
        else:
            self._opened: set[str] = set()
            self.begins = self._choose(split, count)
            self._opened = _above(self.begins)
            self.names = self._names_in(*self._divide(self._constants(), self._example)[:2])
        self._check()
        self._computed = [set(each) for each in self.names]
        used = {id(each) for held in self.names for each in held.values()}
        rest = {name: each for name, each in _tensors_of(model, "").items() if id(each) not in used}
        self.names[0] |= rest  # What no stage computes with.

    # ------------------------------------------------------------------------------------- which stages there are

    def _choose(self, split: Any, count: int) -> list[str]:
        """Return the paths of the modules that begin the second stage and all later ones."""
        if split is not None and not isinstance(split, int):
            for path in split:
                if path not in self._modules or not path:
                    raise ConfigError(
                        f"split: {class_name(self._model)} has no module {path!r}; its modules are "
                        f"{', '.join(list(filter(None, self._modules))[:_SHOWN])}; write one of these paths"
                    )
            if len(split) == count - 1:
                return [*split]
            if len(split) == count and not self._before(split[0]):
                return [*split[1:]]
            raise ConfigError(
                f"split={list(split)!r} names {len(split)} modules that begin a stage, and there are {count} stages; "
                f"name {count - 1}, since the first one begins with the model, or change stages_per_rank or the number "
                "of ranks"
            )
        candidates = self._candidates(count)
        self._opened = _above(candidates)
        graph, first, made, _ = self._trace(self._opened, self._constants(), self._example)
        nodes = [each for each in graph.nodes if each.op not in ("placeholder", "output")]
        sizes: list[float] = [_size(self._held(each)) for each in nodes]
        places = {nodes.index(first[path]): path for path in candidates if first.get(path) in nodes}
        weights = self._times(graph, made, nodes) if self._example else sizes
        cuts = _balance(weights, sorted(each for each in places if any(sizes[:each])), count, sizes)
        if cuts is None:
            raise ConfigError(
                f"{class_name(self._model)} has {len(places)} modules with which a stage could begin "
                f"({', '.join(list(places.values())[:_SHOWN])}), too few for {count} stages; use fewer ranks or "
                "stages_per_rank, or name deeper modules: split=['layers.3.feed_forward']"
            )
        return [places[each] for each in cuts]

    def _constants(self) -> dict[str, Any]:
        """Return the arguments by which the forward decides, in the example or by default."""
        return constants_in(self._example) if self._example else defaults_of(self._model)

    def _trace(self, opened: set[str], constants: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
        hints = Hints(arguments)
        found = trace(self._model, opened, constants, hints)
        self._is_shaped |= hints.are_used
        return *found, hints

    def _times(self, graph: fx.Graph, made: dict[str, Any], nodes: list[fx.Node]) -> list[float]:
        """Measure the seconds of each node; calls that the stages repeat count where they are first made."""
        module = fx.GraphModule(self._root(graph, made), graph)
        seconds = dict(zip(graph.nodes, module.graph.nodes))
        found = measure(module, self._example)
        return [found.get(seconds[node], 0.0) for node in nodes]

    def _before(self, path: str) -> bool:
        """Return whether a parameter is used before this module is called."""
        graph, first, *_ = self._trace(_above([path]), self._constants(), self._example)
        for node in graph.nodes:
            if node is first.get(path):
                return False
            if node.op in ("call_module", "get_attr") and self._held(node):
                return True
        return True

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
        key = self._key(constants, arguments)
        if key not in self._programs:
            graph, stage_of, made, hints = self._divide(constants, arguments)
            if [set(each) for each in self._names_in(graph, stage_of)] != self._computed:
                raise ConfigError(
                    f"called with {', '.join(f'{name}={each!r:.20}' for name, each in constants.items())}, "
                    f"{class_name(self._model)} computes with other parameters in some stage than with the defaults of "
                    f"its forward. {REMEDY}"
                )
            found = {each: self._program(graph, stage_of, made, hints, each) for each in own}
            self._is_shaped |= hints.are_used
            key = self._key(constants, arguments)  # Its shapes may have been asked for just now.
            self._programs[key] = found
            if len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
        return self._programs[key]

    def _key(self, constants: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return by what the programs differ: numbers, the mode, and shapes where the forward has asked for one."""
        modes = tuple(self._modules[name].training for name in sorted(self._opened))
        shapes = ((tuple(each.shape), each.dtype) for each in tensors_in(arguments) if self._is_shaped)
        return tuple((name, type(each), each) for name, each in constants.items()), modes, tuple(shapes)

    def _call_of(self, stage: int, arguments: Mapping[str, Any]) -> Program:
        """Return what a module of the split computes: the first is called as the model is."""
        defaults = {name: each.default for name, each in signature(self._model.forward).parameters.items()}
        given = tuple(name for name, each in arguments.items() if each is not defaults.get(name))
        return Program(self._chosen[stage], () if stage else given)

    def _divide(
        self, constants: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[fx.Graph, dict[fx.Node, int], dict[str, Any], Hints]:
        """Return the graph of a forward, the stage of each node, the tensors that it makes, and what is known."""
        graph, first, made, hints = self._trace(self._opened, constants, arguments)
        for path in self.begins:
            if path not in first:
                raise ConfigError(f"split: the forward of {class_name(self._model)} does not call {path!r}")
        order = {node: index for index, node in enumerate(graph.nodes)}
        cuts = [order[first[path]] for path in self.begins]
        if cuts != sorted(set(cuts)):
            called = sorted(self.begins, key=lambda path: order[first[path]])
            raise ConfigError(f"split={self.begins!r} is not in the order of the calls; write split={called!r}")
        return graph, {node: sum(cut <= index for cut in cuts) for node, index in order.items()}, made, hints

    def _program(
        self, graph: fx.Graph, stage_of: Mapping[fx.Node, int], made: dict[str, Any], hints: Hints, stage: int
    ) -> Program:
        """Return what one stage computes, as code that calls the modules of the model."""
        again, own = _repeatable(graph), fx.Graph()
        received = _passed(graph, stage_of, again, stage - 1)
        passed = [each for each in _passed(graph, stage_of, again, stage) if hints.constant(each) is UNKNOWN]
        needed = _needed(graph, stage_of, again, stage, passed)
        values: dict[fx.Node, Any] = {}
        arguments = [each for each in graph.nodes if each.op == "placeholder" and each in needed]
        for node in arguments:
            values[node] = own.placeholder(node.name)
        for node in received:
            values[node], count = hints.constant(node), hints.length(node)
            if values[node] is UNKNOWN and count is not None:
                values[node] = tuple(own.placeholder(f"{node.name}_{index}") for index in range(count))
            elif values[node] is UNKNOWN:
                values[node] = own.placeholder(node.name)
        for node in graph.nodes:
            if node in needed and node not in values:
                values[node] = own.node_copy(node, lambda each: values[each])
        if not any(each.op == "output" for each in own.nodes):
            own.output(tuple(one for each in passed for one in _tensors_of_node(own, values[each], hints.length(each))))
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
            for stage in {stage_of[each] for each in node.users} if is_read else (stage_of[node],):
                names[stage].update(self._held(node))
        return names

    def _names_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module of the split by their names in the model."""
        known = {id(each): name for name, each in _tensors_of(self._model, "").items()}
        found = {}
        for name, each in _tensors_of(module, "").items():
            if id(each) not in known:
                raise ConfigError(f"split returned a module with {name}, which is not a parameter or buffer of "
                                  f"{class_name(self._model)}; make the stages of its own modules")  # fmt: skip
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

    def parameters(self, stages: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters of some stages, once each."""
        held = {id(each): each for stage in stages for each in self.names[stage].values()}
        return [each for each in held.values() if isinstance(each, nn.Parameter)]


def _tensors_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {f"{prefix}{name}": each for name, each in itertools.chain(*both)}


def _size(held: Mapping[str, Tensor]) -> int:
    return sum(each.numel() for each in {id(each): each for each in held.values()}.values())


def _above(paths: Iterable[str]) -> set[str]:
    """Return the paths of the modules that contain one of these."""
    parts = [path.split(".") for path in paths]
    return {"", *(".".join(each[:length]) for each in parts for length in range(1, len(each)))}


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


def _balance(weights: Sequence[float], places: Sequence[int], count: int, sizes: Sequence[float]) -> list[int] | None:
    """Return where to cut a sequence so that the largest part is smallest, and each has a size; None if impossible."""
    sums, held = [0.0, *itertools.accumulate(weights)], [0.0, *itertools.accumulate(sizes)]
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # By the end of what is cut: the largest part, the cuts.
    for _ in range(count - 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for at, (largest, cuts) in best.items():
            for place in places:
                part = sums[place] - sums[at]
                if (
                    place > at
                    and held[place] > held[at]
                    and (found := (max(largest, part), [*cuts, place])) < longer.get(place, (sums[-1] + 1, []))
                ):
                    longer[place] = found
        best = longer
    ends = [(max(largest, sums[-1] - sums[at]), cuts) for at, (largest, cuts) in best.items() if held[-1] > held[at]]
    return min(ends)[1] if ends else None


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
    return [
        node
        for node in graph.nodes
        if node not in again
        and node.op != "get_attr"
        and stage_of[node] <= stage
        and any(stage_of[user] > stage for user in node.users)
    ]


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


def _tensors_of_node(graph: fx.Graph, value: Any, count: int | None) -> tuple[Any, ...]:
    """Return the tensors of a value that is passed on."""
    if count is None:
        return (value,)
    if isinstance(value, tuple):  # It was received.
        return value
    return tuple(graph.call_function(operator.getitem, (value, index)) for index in range(count))


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
