"""Find the blocks of a model, which are sharded and gathered one at a time, and the parameters that a style divides."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from zae.errors import ConfigError
from zae.model.weights import has_lazy
from zae.torch_private import has_gradient_hooks

__all__ = [
    "check_divisible",
    "check_even",
    "check_shapes",
    "check_tables",
    "choose_blocks",
    "choose_outermost",
    "class_name",
    "describe_blocks",
    "has_forward",
    "parse_blocks",
]

_SHOWN = 10
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, before sharding gave it another one."""
    return type(module).__name__.removeprefix("FSDP")


def _is_wanted(pattern: Any, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    parts = name.split(".")
    patterns = pattern.split(".")
    fits = len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return fits or class_name(module) == pattern


def _check_blocks(blocks: dict[str, nn.Module], option: str) -> dict[str, nn.Module]:
    """Refuse a list of modules, which is never called, as a block."""
    for name, block in blocks.items():
        if not has_forward(block):
            raise ConfigError(
                f"{option}: {name} is a {type(block).__name__}, which has no forward; write "
                f"{option}=['{name}.*'] for the modules in it"
            )
    return blocks


def check_shapes(model: nn.Module) -> None:
    """Refuse a lazy model."""
    if has_lazy([*model.parameters(), *model.buffers()]):
        raise ConfigError(
            "the model is lazy, and ranks cannot begin with parameters that have no shape; call it once with a batch "
            "before run(): model(inputs)"
        )


def check_tables(model: nn.Module) -> None:
    """Refuse tables whose forward changes weights."""
    tables = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    if names := [name or type(table).__name__ for name, table in tables.items() if table.max_norm is not None]:
        raise ConfigError(
            f"{', '.join(names)} has max_norm: each forward would change the weights that the batch of its rank looks "
            "up, and the ranks would come apart. Write max_norm=None, and limit the norms of what it returns"
        )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; a list of modules cannot."""
    return type(module).forward is not nn.Module.forward


def check_divisible(modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules, by name, whose parameters cannot be replaced by their parts."""
    hooked = []
    sparse = []
    for path, module in modules.items():
        check_tables(module)
        for name, parameter in module.named_parameters(path):
            if has_gradient_hooks(parameter):
                hooked.append(name)
        for name, child in module.named_modules(prefix=path):
            if getattr(child, "sparse", False) is True:
                sparse.append(f"{name} ({type(child).__name__})")
    if hooked:
        raise ConfigError(
            f"{', '.join(hooked)} has a hook of its gradient, which would not be called: the parameter is replaced by "
            "its parts. Remove the hook, and override clip() to change the gradients before super().clip()"
        )
    if sparse:
        raise ConfigError(f"{', '.join(sparse)} has sparse gradients, which cannot be divided; write sparse=False")


def parse_blocks(value: Any, option: str = "fsdp_blocks") -> Any:
    """Return the option that names blocks as a list of names and classes, or as a function."""
    if isinstance(value, nn.Module):
        raise ConfigError(f"{option} is a {type(value).__name__} itself; give its class, or its name in the model")
    if callable(value) and not isinstance(value, type):
        return value
    blocks = list(value) if isinstance(value, (list, tuple, set)) else [] if value is None else [value]
    if not all(isinstance(block, (str, type)) for block in blocks):
        raise ConfigError(f"{option}={value!r}; give classes, names, or a function of both")
    return blocks


def choose_blocks(model: nn.Module, selection: Any, option: str = "fsdp_blocks") -> dict[str, nn.Module]:
    """Return the modules that are blocks by name: those of the option, else the repeated ones."""
    named = {name: module for name, module in model.named_modules() if name}
    if callable(selection):
        return _check_blocks({name: module for name, module in named.items() if selection(name, module)}, option)
    if not selection:
        return repeated_modules(model)
    blocks: dict[str, nn.Module] = {}
    for pattern in selection:
        chosen = {name: module for name, module in named.items() if _is_wanted(pattern, name, module)}
        if not chosen:
            known_classes = sorted({type(module).__name__ for module in named.values()})
            raise ConfigError(
                f"{option}: no module of {class_name(model)} is {pattern!r}; its classes are "
                f"{', '.join(known_classes[:_SHOWN])}, its modules {', '.join(list(named)[:_SHOWN])}"
            )
        blocks.update(chosen)
    return _check_blocks(blocks, option)


def choose_outermost(model: nn.Module, selection: Any, option: str, purpose: str) -> dict[str, nn.Module]:
    """Return the modules that an option names, without those in others; refuse where there are none to choose."""
    blocks = choose_blocks(model, selection, option)
    if not blocks and callable(selection):
        raise ConfigError(f"{option}: the function chooses no module of {class_name(model)}, so none is {purpose}")
    if not blocks:
        raise ConfigError(
            f"no module of {class_name(model)} is repeated, so none is {purpose}; name them, for instance "
            f"{option}=['encoder', 'decoder']"
        )
    parents = tuple(f"{name}." for name in blocks)
    return {name: block for name, block in blocks.items() if not name.startswith(parents)}


def describe_blocks(blocks: Mapping[str, nn.Module]) -> str:
    """Count blocks by class, with their first and last name."""
    kinds: dict[str, list[str]] = {}
    for name, block in blocks.items():
        kinds.setdefault(class_name(block), []).append(name)
    ranges = {kind: " to ".join(dict.fromkeys((names[0], names[-1]))) for kind, names in kinds.items()}
    return ", ".join(f"{len(names)} of {kind} ({ranges[kind]})" for kind, names in kinds.items())


def repeated_modules(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the outermost modules that a container repeats, by name; single layers do not count."""
    repeated: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        alike_children = [sibling for sibling in module.children() if type(sibling) is type(child)]
        is_repeated = isinstance(module, _CONTAINERS) and len(alike_children) > 1 and has_forward(child)
        if is_repeated and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            repeated[path] = child
        else:
            repeated.update(repeated_modules(child, f"{path}."))
    return repeated


def check_even(name: str, module: nn.Module, style: Any, ranks: int) -> None:
    """Refuse a layer that passes on parts of different sizes: torch takes each for a part like the own one."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    is_left_in_parts = isinstance(style, ColwiseParallel) and style.use_local_output
    weight: Any = getattr(module, "weight", None)
    if weight is None or not is_left_in_parts or not any(isinstance(layout, Shard) for layout in style.output_layouts):
        return
    count = weight.shape[1 if isinstance(module, nn.Embedding) else 0]
    if count % ranks:
        raise ConfigError(
            f"tensor_plan: {name} ({class_name(module)}) computes {count} features, which {ranks} ranks cannot "
            "divide evenly, and the next layer would take the part of each rank for one of the same size. Make it "
            f"{-(-count // ranks) * ranks} wide, write ColwiseParallel(use_local_output=False), which keeps track "
            "of the sizes, or leave it out of the plan"
        )
