"""What a ledger notes of a step: settings of the optimizers, and a hash for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim
from zae import random_state as rng
from zae.model.weights import named_parameters
from zae.values.hashes import digest, fingerprint, fingerprints, random_streams

__all__ = [
    "gradient_hashes",
    "hash_each",
    "note_settings",
    "random_state",
    "settings_of",
    "state_hashes",
    "weight_hashes",
]


def random_state() -> str:
    """Hash the random streams of the process and of its accelerators, without drawing from them."""
    return digest((random_streams(), {kind: fingerprint(states) for kind, states in rng.of_devices().items()}))


def hash_each(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each tensor, by its name; what is not a tensor is left out."""
    tensors_by_name = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return {
        name: f"{value % 2**64:016x}" for name, value in zip(tensors_by_name, fingerprints(tensors_by_name.values()))
    }


def weight_hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash for each weight and buffer of a model."""
    return hash_each({f"weight:{name}": tensor for name, tensor in model.state_dict().items()})


def gradient_hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash for each gradient, the last layer first, as a backward computes them."""
    parameters = reversed(named_parameters(model).items())
    return hash_each({f"gradient:{name}": parameter.grad for name, parameter in parameters})


def state_hashes(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """Return a hash for each tensor that an optimizer keeps for a parameter."""
    hashes = dict[str, Any]()
    for name, parameter in named_parameters(model).items():
        for optimizer in optimizers.values():
            if parameter in optimizer.state:  # Looking a key up would add it.
                hashes |= {f"{key}:{name}": value for key, value in optimizer.state[parameter].items()}
    return hash_each(hashes)


def settings_of(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the learning rates and the other numeric settings of each group."""
    settings = {
        name: [_settings_of_group(group) for group in optimizer.param_groups] for name, optimizer in optimizers.items()
    }
    return {"lr": optim.learning_rates(optimizers), "settings": settings}


def _settings_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric settings of a parameter group but its learning rate."""
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "lr") and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Return whether a setting is a number, or a few of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


@contextmanager
def note_settings(optimizers: Mapping[str, Optimizer], noted: dict[str, Any]) -> Iterator[None]:
    """Note the settings again when each optimizer steps, as ``step_one`` may change them before."""

    def note(name: str) -> None:
        settings = settings_of(optimizers)
        rate_names = {key for key in settings["lr"] if len(optimizers) == 1 or key.split("/")[1] == name}
        noted["lr"] |= {key: settings["lr"][key] for key in rate_names}
        noted["settings"][name] = settings["settings"][name]

    hooks = [
        optimizer.register_step_pre_hook(lambda *_, name=name: note(name)) for name, optimizer in optimizers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
