"""Adapters of the package ``peft``: apply them to a model, find what is frozen and what is trained, and export."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zae.checkpoint.tensor_bytes import byte_view, dense
from zae.errors import AddOnRequirement, CheckpointError, CheckpointMismatch, ConfigError
from zae.model.copying import deep_copy
from zae.model.weights import plain_names, plain_state
from zae.values.walk import is_sharded

__all__ = [
    "base_weights",
    "changed_weights",
    "check_adapter",
    "check_base",
    "check_plan",
    "check_trained",
    "frozen_names",
    "hash_parameters",
    "merged_copy",
    "refuse_merged",
    "refuse_sharded",
    "save_adapter",
    "save_folder",
    "with_adapter",
]

_log = logging.getLogger("zae")
_SHOWN = 8
_SMALL = 1 << 20  # Bytes of a buffer that is always compared; a larger one only if torch has counted a change.
_LETTERS = 16  # Of the SHA-256 of each tensor.


def with_adapter(args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a trainer with a function in place of the model, which applies an adapter to it."""
    model = args[0] if args else kwargs.get("model")
    if not callable(model):  # Refused by the trainer.
        return args, kwargs
    peft = _import_peft()
    if not isinstance(config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(config).__name__}; give a configuration of peft: "
            "peft_config=peft.LoraConfig(r=8, target_modules=['query', 'value'])"
        )
    if config.peft_type == "ADALORA":
        raise ConfigError(
            "peft_config is an AdaLoraConfig, which changes ranks during training by sums that no state contains: a "
            "resumed run would differ; write peft.LoraConfig(r=..., use_dora=True), or rank_pattern={...}"
        )
    make = partial(_make, peft, model, config)
    return ((make, *args[1:]), kwargs) if args else ((), {**kwargs, "model": make})


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise AddOnRequirement(f"PEFTAddon needs the package peft ({error}): pip install peft") from error
    return peft


def _make(peft: Any, model: Any, config: Any) -> Any:
    """Return the PeftModel of a model, or of what a function returns."""
    model = model if isinstance(model, nn.Module) else model()
    if not isinstance(model, nn.Module):
        return model
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"model is a {type(model).__name__}, which has an adapter, and peft_config adds another; leave peft_config "
            "out to train the present one, or give the base model"
        )
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        return peft.get_peft_model(model, config)
    except (ValueError, StopIteration) as error:  # The last one for a model without parameters.
        names_of_layers = ", ".join(linear[:_SHOWN]) + (", ..." if len(linear) > _SHOWN else "") or "none"
        raise ConfigError(
            f"peft_config does not fit {type(model).__name__}: {str(error).rstrip('.') or 'it has no parameters'}. "
            f"Its linear layers: {names_of_layers}; write target_modules=[...] with the ends of such names"
        ) from error


def check_trained(model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Refuse a model of which nothing, or all, is trained, and optimizers that hold only frozen weights."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(
            f"no parameter of {type(model).__name__} requires gradients; give peft_config=..., or load the adapter "
            "with PeftModel.from_pretrained(model, path, is_trainable=True)"
        )
    if not hasattr(model, "peft_config") and len(trained) == sum(1 for _ in model.parameters()):
        _log.warning(
            "%s has no adapter and no frozen parameter: PEFTAddon trains and saves all of it; for an adapter, give "
            "peft_config=peft.LoraConfig(...) or a PeftModel",
            type(model).__name__,
        )
    for optimizer in optimizers:
        parameter_ids = [
            id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]
        ]
        if parameter_ids and not trained.intersection(parameter_ids):
            name = type(optimizer).__name__
            raise ConfigError(
                f"the {name} holds {len(parameter_ids)} parameters, all of them frozen: it was made before the "
                f"adapter. Give a function: optimizer=lambda parameters: {name}(parameters, ...)"
            )


def check_plan(model: nn.Module, styles: Mapping[str, Any]) -> None:
    """Refuse a plan that leaves the output of an adapted layer in parts: the adapter adds a whole one to it."""
    for name, style in styles.items():
        parent, _, last = name.rpartition(".")
        is_adapted = hasattr(model.get_submodule(name), "base_layer")
        layouts = getattr(style, "output_layouts" if type(style).__name__ == "ColwiseParallel" else "input_layouts", ())
        layouts = layouts if isinstance(layouts, (tuple, list)) else (layouts,)
        is_base = last == "base_layer" and hasattr(model.get_submodule(parent), "base_layer")
        if is_adapted or (is_base and not all(layout.is_replicate() for layout in layouts)):
            raise ConfigError(
                f"tensor_plan: {name} is a layer with an adapter, whose inputs and outputs must be whole; write "
                f"{{'{name if is_base else name + '.base_layer'}': ColwiseParallel(output_layouts=Replicate())}}"
            )


# ----------------------------------------------------------------------------------------------- what is not trained


def _frozen(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a model's state that no gradient reaches."""
    for name, value in plain_state(model, keep_vars=True).items():
        if not (isinstance(value, Tensor) and value.requires_grad):
            yield name, value


def frozen_names(model: nn.Module) -> set[str]:
    """Return the keys of a model's state that no gradient reaches."""
    return {name for name, _ in _frozen(model)}


def hash_parameters(
    model: nn.Module, names: Collection[str], full_tensor: Callable[[Tensor], Tensor]
) -> dict[str, str]:
    """Return a hash of each frozen parameter among these keys."""
    frozen = [(name, value) for name, value in _frozen(model) if isinstance(value, nn.Parameter) and name in names]
    return {name: _digest(name, full_tensor(value)) for name, value in frozen}


def base_weights(model: nn.Module) -> dict[str, str]:
    """Return a hash of each entry of a model's state that is not trained."""
    return {name: _digest(name, value) for name, value in _frozen(model)}


def changed_weights(model: nn.Module, base: Mapping[str, str], marks: dict[str, Any]) -> set[str]:
    """Return the entries that are not trained, but differ from those that were hashed; ``marks`` is a cache.

    They are buffers that training changes, as BatchNorm's, and weights that were trained before they were frozen.
    """
    changed = set()
    for name, value in _frozen(model):
        if isinstance(value, Tensor) and is_sharded(value):
            continue
        mark = _mark(value)
        if name not in base:
            changed.add(name)
        elif mark is None or marks.get(name) != mark:
            if _digest(name, value) == base[name]:
                marks[name] = mark
            else:
                changed.add(name)
    return changed


def _mark(value: Any) -> Any:
    """Return what is equal while a tensor has not changed; None for one that is compared each time."""
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    if not isinstance(value, nn.Parameter) and value.numel() * value.element_size() <= _SMALL:
        return None
    return id(value), value._version, _address(value)


def _address(value: Tensor) -> int:
    try:
        return value.data_ptr()
    except RuntimeError:  # A tensor that consists of others.
        return 0


def _digest(name: str, value: Any) -> str:
    """Return the beginning of the SHA-256 of an entry of a state."""
    sha = hashlib.sha256()
    _update(sha, name, value)
    return sha.hexdigest()[:_LETTERS]


def _update(sha: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise ConfigError(
            f"PEFTAddon hashes the frozen weights, and {name} is on the meta device; build the model with its weights, "
            "without meta_init=True"
        )
    flatten = getattr(value, "__tensor_flatten__", None)  # Quantized by torchao.
    if isinstance(value, Tensor) and flatten is not None:
        inner, context = flatten()
        sha.update(repr(context).encode())
        for attribute in inner:
            _update(sha, f"{name}.{attribute}", getattr(value, attribute))
    elif isinstance(value, Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(byte_view(dense(value, name)))
    else:
        sha.update(repr(value).encode())


def check_base(model: nn.Module, saved: Any, present: Mapping[str, str], weights: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another base model, whose saved hashes differ where it does not contain the weights."""
    if not isinstance(saved, Mapping):
        raise CheckpointMismatch("the state of PEFTAddon does not contain the hashes of a base model")
    known_names = {*weights, *plain_state(model)}
    alone = [name for name in present if name not in saved and name not in weights]
    if alone := alone or [name for name in saved if name not in known_names]:
        problem = "the checkpoint has no hash of" if alone[0] in present else "this model does not have"
        raise CheckpointMismatch(
            f"the checkpoint was saved with another base model: {problem} {len(alone)} frozen weights, first "
            f"{alone[0]}. Build the base model with the same configuration, or load only the trained weights: "
            "apply_weights(path)"
        )
    common = [name for name in saved if name in present and name not in weights]
    differing = [name for name in common if saved[name] != present[name]]
    if differing:
        raise CheckpointMismatch(
            "the checkpoint was saved with another base model: its frozen weights have the hash "
            f"{_short(saved, common)} and those of this model {_short(present, common)}; {len(differing)} of "
            f"{len(common)} differ, first {differing[0]}. Build the base model with the same weights (the same "
            "pretrained name and revision, or the same seed), or load only the trained weights into this one: "
            "apply_weights(path)"
        )


def check_adapter(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Refuse the weights of a model without the adapter, which none of the trained ones is among."""
    trained = plain_state(model).keys() - frozen_names(model)
    if hasattr(model, "peft_config") and weights and trained.isdisjoint(weights):
        raise CheckpointMismatch(
            f"the checkpoint has the weights of a model without this adapter (first {next(iter(weights))}). Load them "
            "into the base model before the adapter is applied: "
            "safetensors.torch.load_model(model, '.../step-00000012/model.safetensors')"
        )


def _short(hashes: Mapping[str, str], names: list[str]) -> str:
    return hashlib.sha256("".join(f"{name}{hashes[name]}" for name in sorted(names)).encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------------- export


def merged_copy(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the base model with the adapter added to its weights, where it then computes the same."""
    _refuse_tied(model)
    copied = deep_copy(model)
    plain = plain_names(copied, copied.state_dict())
    copied.load_state_dict(
        {own_name: weights[name] for own_name, name in plain.items() if name in weights}, strict=False
    )
    try:
        merged: nn.Module = copied.merge_and_unload()  # type: ignore[operator]
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"the adapter of {type(model).__name__} cannot be merged ({error}): the sum of a quantized weight and an "
            "adapter is not quantized, and prompts have no weights to be added to. Save the adapter alone, "
            "save_model(folder), or apply it to the base model in float and merge there"
        ) from error
    return merged


def _refuse_tied(model: Any) -> None:
    """Refuse an adapter on a weight that several modules of the base hold: the sum would change all of them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    marks = ("base_layer", "unload_and_optionally_merge_module")  # Of layers with an adapter, and of replaced modules.
    adapted = []  # Beginnings of the names of parameters.
    for path, module in base.named_modules():
        if path and any(hasattr(module, mark) for mark in marks):
            adapted.append(f"{path}.")
    holders: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        if len(names) > 1 and any(name.startswith(tuple(adapted)) for name in names):
            names = [name.replace(".base_layer", "").replace(".original_module", "") for name in names]
            raise ConfigError(
                f"the merged model would not be the one that was trained: {' and '.join(names)} are one weight of "
                f"{type(base).__name__}, and the adapter changes a module that holds it. Export the adapter alone, "
                "save_model(folder); or train with another peft_config, without these modules, or on a base model "
                "without tied weights (tie_word_embeddings=False)"
            )


def save_folder(model: Any, folder: Path, **options: Any) -> None:
    """Call ``save_pretrained`` of a model for a folder in which each file is whole, the weights at last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".zae-", dir=folder) as staging:
        model.save_pretrained(staging, **options)
        for path in sorted(Path(staging).rglob("*"), reverse=True):
            if path.is_file():
                target = folder / path.relative_to(staging)
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)


def refuse_sharded(model: nn.Module) -> None:
    """Refuse to merge weights of which each rank holds a part."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ConfigError(
            "save_merged adds the adapter to whole weights, and the ranks hold parts of them; call "
            "save_model('adapter') on all ranks, and merge in one process: "
            "peft.PeftModel.from_pretrained(base, 'adapter').merge_and_unload()"
        )


def refuse_merged(model: nn.Module) -> None:
    """Refuse to save while an adapter is merged into the base weights, which a checkpoint does not contain."""
    merged = next((name for name, module in model.named_modules() if getattr(module, "merged", False) is True), None)
    if merged is not None:
        raise CheckpointError(
            f"the adapter is merged into the base weights ({merged}), which checkpoints do not contain; call "
            "unmerge_adapter() first, and trainer.save_merged(path) to export"
        )


def save_adapter(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Save the adapter as ``peft`` does, in a folder that ``PeftModel.from_pretrained`` loads; each file is whole."""
    plain = plain_names(model, model.state_dict())
    if buffers := sorted(
        weights.keys() - {plain[own_name] for own_name, _ in model.named_parameters(remove_duplicate=False)}
    ):
        _log.warning(
            "%s does not contain %s, which training has changed: the format of peft has no place for buffers. Save "
            "them with save_model('adapter.safetensors') or save_merged(path)",
            folder,
            ", ".join(buffers[:_SHOWN]),
        )
    state = {own_name: weights[name] for own_name, name in plain.items() if name in weights}
    save_folder(model, folder, state_dict=state)
