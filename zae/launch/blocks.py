"""Find the blocks of a model, which are sharded and gathered one at a time, and the parameters that a style divides."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn

from zae.errors import ConfigError

__all__ = ["check_blocks", "class_name", "divided_dimensions", "is_wanted", "repeated_modules", "split_by_block"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, before sharding gave it another one."""
    return type(module).__name__.removeprefix("FSDP")


def is_wanted(wanted: Any, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    parts, patterns = name.split("."), wanted.split(".")
    fits = len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    return fits or class_name(module) == wanted


def check_blocks(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Refuse a list of modules, which is never called, as a block."""
    for name, each in blocks.items():
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ConfigError(
                f"fsdp_blocks: {name} is a {type(each).__name__}, which has no forward to gather it for; write "
                f"fsdp_blocks=['{name}.*'] for the modules in it"
            )
    return blocks


def repeated_modules(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the outermost modules that a container repeats, by name; single layers do not count."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        alike_children = [each for each in module.children() if type(each) is type(child)]
        is_block = isinstance(module, _CONTAINERS) and len(alike_children) > 1 and any(True for _ in child.children())
        if is_block and any(True for _ in child.parameters()):
            found[path] = child
        else:
            found.update(repeated_modules(child, f"{path}."))
    return found


def split_by_block(names: Iterable[str], blocks: Iterable[str]) -> list[list[str]]:
    """Group the names of parameters by the innermost block that they are in; those of no block come first."""
    groups: dict[str, list[str]] = {"": [], **{block: [] for block in blocks}}
    for name in names:
        inside = [block for block in groups if block and name.startswith(f"{block}.")]
        groups[max(inside, key=len, default="")].append(name)
    return [*groups.values()]


def divided_dimensions(style: Any, module: nn.Module) -> dict[str, int]:
    """Return the parameters of a layer that a style of torch divides, each with the dimension."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    is_table = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        found = {"weight": int(is_table), "bias": 0}
    else:
        found = {"weight": int(not is_table)} if isinstance(style, RowwiseParallel) else {}
    return {key: dimension for key, dimension in found.items() if getattr(module, key, None) is not None}
