"""Trace the forward of a model as a graph of calls, in which the modules of a stage are single calls."""

from __future__ import annotations

import dis
import inspect
import numbers
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn

from zae.common.torch_private import call_hooks, traced_assert, version_of
from zae.errors import ConfigError
from zae.launch.pipeline.hints import UNKNOWN, HintedProxy, Hints

__all__ = ["REMEDY", "bind", "constants_in", "defaults_of", "trace"]

REMEDY = (
    "Where it asks for shapes or types, give pipeline_example= what the model is called with. Else put the computation "
    "into a separate module, which is not traced, or give split=a function of the model and of the number of stages "
    "that returns the modules of the stages in their order; each is called with what the one before returns"
)
_DECIDING = (bool, int, float, str, type(None))
_CALLS = ("call_function", "call_method", "call_module", "get_attr")
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def _encode(module: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    """Call the layers of a TransformerEncoder."""
    for layer in module.layers:
        src = layer(src, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
    return src if module.norm is None else module.norm(src)


def _decode(module: Any, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, **options: Any) -> Any:
    """Call the layers of a TransformerDecoder."""
    options["tgt_is_causal"] = bool(options.get("tgt_is_causal"))
    for layer in module.layers:
        tgt = layer(tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, **options)
    return tgt if module.norm is None else module.norm(tgt)


# Modules of torch whose forward looks at values of their inputs, only to choose among ways to compute the same.
_LOOPS: dict[type, Callable[..., Any]] = {nn.TransformerEncoder: _encode, nn.TransformerDecoder: _decode}


class _Tracer(fx.Tracer):
    """Records calls; the forward of the opened modules is traced, and all others are single calls."""

    def __init__(self, opened: Collection[str], constants: Mapping[str, Any], hints: Hints) -> None:
        super().__init__()
        self.hints = hints
        self._opened, self._constants, self._within, self._modes = opened, constants, [""], _modes()
        self._called: dict[str, nn.Module] = {}
        self.begins: dict[str, fx.Node] = {}  # The first call within each module.

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        root, positional, named = self.root, list[Any](), dict[str, Any]()
        for name, each in inspect.signature(root.forward).parameters.items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                continue
            held = name in self._constants
            value = self._constants[name] if held else self.create_proxy("placeholder", name, (), {})
            if each.kind is each.KEYWORD_ONLY:
                named[name] = value
            else:
                positional.append(value)

        def call() -> Any:
            return root.forward(*positional, **named)

        return call, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.hints.is_computing:
            return m.forward(*args, **kwargs)  # Without hooks.
        try:
            name = self.path_of_module(m)
        except NameError:  # It was made in the forward, as a loss function often is.
            if any(True for _ in m.parameters()):
                raise
            return forward(*args, **kwargs)
        self._called[name] = m
        if name in self._opened:
            check_hooks(m, name)
            if type(m) in _LOOPS:
                forward = partial(_LOOPS[type(m)], m)
        self._within.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._within.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.hints.is_computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Record an assert, which the stage then checks; refuse other decisions."""
        frame = inspect.currentframe()
        caller = frame and frame.f_back and frame.f_back.f_back  # Of Proxy.__bool__.
        if caller and _is_assert(caller):
            self.create_proxy("call_function", traced_assert(), (obj, f"assert in {caller.f_code.co_name}"), {})
            return True
        value = self.hints.of(obj.node)
        return super().to_bool(obj) if value is UNKNOWN else bool(value)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return HintedProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.hints.of(obj.node)
        return super().iter(obj) if value is UNKNOWN else iter([cast(Any, obj)[index] for index in range(len(value))])

    def create_arg(self, a: Any) -> Any:
        """Let an output of Transformers, a dict and a dataclass, be made in the stage."""
        if isinstance(a, dict) and is_dataclass(type(a)):
            kwargs = {key: self.create_arg(each) for key, each in a.items()}
            return self.create_node("call_function", type(a), (), kwargs)
        return super().create_arg(a)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        self.hints.note(node, self._called.get(str(node.target)) if kind == "call_module" else None)
        if kind in _CALLS:
            for name in self._within:
                self.begins.setdefault(name, node)
            if _modes() != self._modes:
                raise ConfigError(
                    f"the forward of {type(self.root).__name__} computes {node.name} under no_grad or autocast, which "
                    f"a stage would leave out. {REMEDY}"
                )
        return node


def _is_assert(frame: FrameType) -> bool:
    """Return whether the value that is tested in a frame is that of an assert."""
    rest = (each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti)
    for each in rest:
        if "JUMP" in each.opname:
            after = next(rest, None)
            raises = after is not None and "AssertionError" in (after.argval, getattr(after.argval, "__name__", ""))
            return "IF_TRUE" in each.opname and (raises or (after is not None and "ASSERTION" in after.opname))
    return False


@contextmanager
def _unchanged(model: nn.Module, opened: Collection[str]) -> Iterator[None]:
    """Refuse a forward that changes buffers or attributes of the model: it is called here once, and by no stage."""
    buffers = {name: (each, version_of(each), each.detach().clone()) for name, each in model.named_buffers()}
    modules = {name: each for name, each in model.named_modules() if name in opened}
    before = {name: dict(vars(each)) for name, each in modules.items()}
    yield
    changed = []
    for name, (each, version, value) in buffers.items():
        if version_of(each) != version:
            each.detach().copy_(value)
            changed.append(name)
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            held = before[name].get(key)
            is_counted = isinstance(held, numbers.Number) and value != held
            if isinstance(value, fx.Proxy) or is_counted:
                vars(module)[key] = held
                changed.append(f"{name}.{key}" if name else key)
    if changed:
        raise ConfigError(
            f"the forward of {type(model).__name__} sets {changed[0]}, which no stage would do, because this forward "
            "is divided: return it, or let a module of its own, within a stage, set it"
        )


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def check_hooks(module: nn.Module, name: str) -> None:
    """Refuse hooks of a module whose forward is divided: no stage would call them."""
    if kind := call_hooks(module):
        raise ConfigError(
            f"{name or 'the model'} ({type(module).__name__}) has a {kind}, which no stage would call, because its "
            "forward is divided; remove it, or register it on a module within a stage"
        )


def trace(
    model: nn.Module, opened: Collection[str], constants: Mapping[str, Any], hints: Hints
) -> tuple[fx.Graph, dict[str, fx.Node], dict[str, Any]]:
    """Return the graph of a forward, the first node within each module, and tensors that the forward makes itself.

    Parameters
    ----------
    model : Module
        Its parameters may be on the meta device: nothing is computed.
    opened : collection of str
        The paths of the modules whose forward is traced.
    constants : mapping
        Arguments that are no placeholders.
    hints : Hints
        What is known of the others.

    Raises
    ------
    ConfigError
        The forward decides by values of tensors, or draws random numbers.
    """
    check_hooks(model, "")
    tracer, before, streams = _Tracer(opened, constants, hints), set(vars(model)), torch.get_rng_state()
    made: dict[str, Any] = {}
    try:
        with _unchanged(model, opened):
            graph = tracer.trace(model)
    except ConfigError:
        raise
    except Exception as error:
        text = f"{_line_of(error)}{type(error).__name__}: {error}"
        raise ConfigError(
            f"split: the forward of {type(model).__name__} cannot be traced ({text:.300}). {_advice(model, error)}"
        ) from error
    finally:
        for name in set(vars(model)) - before:
            made[name] = vars(model).pop(name)
    if not torch.equal(streams, torch.get_rng_state()):
        torch.set_rng_state(streams)
        raise ConfigError(
            f"the forward of {type(model).__name__} draws random numbers that do not depend on its inputs, and would "
            f"be the same in each step. {REMEDY}"
        )
    return graph, tracer.begins, made


def _advice(model: nn.Module, error: Exception) -> str:
    """Return what to write instead, for a model whose forward cannot be traced."""
    if "cache_utils" in str(error):
        return "It keeps a cache of keys and values, which training does not need: write model.config.use_cache = False"
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in stars]
    if found and isinstance(error, LookupError):
        unnamed = " and ".join(f"{stars[each.kind]}{each.name}" for each in found)
        return f"Its forward takes {unnamed}: name each input of the model there"
    return REMEDY


def _line_of(error: Exception) -> str:
    """Return the line of the model that failed."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OWN)]
    last = frames[-1] if frames else None
    return f"{Path(last.filename).name}, line {last.lineno}, `{last.line}`: " if last and last.line else ""


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, each in bound.signature.parameters.items():
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            found[name] = bound.arguments[name]
        elif bound.arguments[name]:
            raise ConfigError(
                f"self.model was called with {bound.arguments[name]!r:.80} for {name}, where the forward of "
                f"{type(model).__name__} names no parameter. {REMEDY}"
            )
    return found


def constants_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a forward may decide: numbers, text and None."""
    return {name: each for name, each in values.items() if isinstance(each, _DECIDING)}


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that a call may leave out, by which the forward may decide; it is called with the first."""
    _, *others = inspect.signature(model.forward).parameters.items()
    return constants_in({name: each.default for name, each in others})
