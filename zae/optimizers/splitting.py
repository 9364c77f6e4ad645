"""Muon for the hidden matrices of a model, with AdamW for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zae.errors import ConfigError, MissingError

__all__ = ["hidden_matrices", "muon"]

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def hidden_matrices(model: nn.Module, exclude: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that Muon is for: the matrices between its first and its last layer.

    Parameters
    ----------
    model : Module
        The model.
    exclude : sequence of str, optional
        Regular expressions: parameters whose name contains a match are left out, in place of those of the last
        ``torch.nn.Linear`` of the model, which is taken for its output.

    Returns
    -------
    dict of str to Parameter
        The trainable parameters of two dimensions, without the tables of embeddings, the weights that are tied to them,
        and the output layer.

    Raises
    ------
    ConfigError
        If there are none, or an expression matches no parameter, or is not one.

    Examples
    --------
    >>> from torch import nn
    >>> from zae.optimizers import hidden_matrices
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 50))
    >>> list(hidden_matrices(model))
    ['1.weight']
    >>> list(hidden_matrices(model, exclude=[]))
    ['1.weight', '3.weight']
    """
    _check_exclude(exclude)
    modules = list(model.modules())
    left_out = {id(p) for module in modules if isinstance(module, _TABLES) for p in module.parameters()}
    if exclude is None:
        last = next((module for module in reversed(modules) if isinstance(module, nn.Linear)), None)
        left_out |= {id(p) for p in ([] if last is None else last.parameters())}
    named = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}  # Of a compiled model.
    for pattern in exclude or ():
        if not any(re.search(pattern, name) for name in named):
            raise ConfigError(f"exclude has {pattern!r}, which matches no parameter; the model has {_some([*named])}")
    found = {
        name: p
        for name, p in named.items()
        if p.requires_grad
        and p.ndim == 2
        and id(p) not in left_out
        and not any(re.search(pattern, name) for pattern in exclude or ())
    }
    if not found:
        shapes = [f"{name} {tuple(p.shape)}" for name, p in named.items() if p.requires_grad]
        raise ConfigError(
            f"the model has no matrix for Muon beside its embeddings and its output layer: {_some(shapes)}; use "
            "torch.optim.AdamW alone, name the output layer: exclude=['head'], or unfreeze: requires_grad_(True)"
        )
    return found


def _check_exclude(exclude: Any) -> None:
    """Refuse what is not a list of regular expressions; a string would be one for each letter."""
    is_list = exclude is None or isinstance(exclude, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(each, str) for each in exclude or ()):
        written = [exclude] if isinstance(exclude, str) else ["head"]
        raise ConfigError(f"exclude={exclude!r:.80}; give a list of regular expressions for names: exclude={written!r}")


def _check_options(kind: Any, options: dict[str, Any]) -> None:
    """Refuse options that an optimizer refuses, before there is a model."""
    try:
        kind([nn.Parameter(torch.zeros(1, 1))], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"muon(): torch.optim.{kind.__name__} refuses its options {options}: {error}") from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def muon(
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_weight_decay: float | None = None,
    exclude: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Callable[[nn.Module], Optimizer]]:
    """Return Muon for the hidden matrices of a model, and AdamW for all others: ``Task(model, optimizer=muon())``.

    Muon (Jordan et al. 2024) makes the update of each matrix orthogonal, so that all its directions are learned alike.
    Embeddings, the output layer, biases and norms are for AdamW. Both optimizers step together, of one loss;
    ``gradient_clip`` clips the parameters of each on its own.

    Parameters
    ----------
    lr, weight_decay : float
        Those of Muon.
    adamw_lr, adamw_weight_decay : float, optional
        Those of AdamW; by default the same. The updates of both have the same size with
        ``adjust_lr_fn="match_rms_adamw"``, which is the default here, so that a rate that is good for AdamW is good
        for both.
    adamw_betas : (float, float)
        The decay rates of AdamW.
    exclude : sequence of str, optional
        What is not for Muon: see `hidden_matrices`.
    **options : object
        Further options of ``torch.optim.Muon``: ``momentum``, ``nesterov``, ``ns_steps``, ``adjust_lr_fn``.

    Returns
    -------
    dict of str to callable
        Functions of the model that make "muon" and "adamw"; give schedulers as a dict with these names.

    Raises
    ------
    ConfigError
        An optimizer does not have an option, or refuses its value; or ``exclude`` is not a list of regular expressions.
    MissingError
        If this release of torch has no Muon (from 2.9 on it has).

    Examples
    --------
    >>> from torch import nn
    >>> from zae.optimizers import muon
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> for name, make in muon(lr=1e-3).items():
    ...     print(name, [tuple(p.shape) for group in make(model).param_groups for p in group["params"]])
    muon [(8, 4), (8, 8)]
    adamw [(8,), (8,), (2, 8), (2,)]
    """
    if not hasattr(torch.optim, "Muon"):
        raise MissingError(f"torch {torch.__version__} has no torch.optim.Muon; it is in torch 2.9 and later")
    _check_exclude(exclude)
    decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
    rest = {"lr": lr if adamw_lr is None else adamw_lr, "betas": adamw_betas, "weight_decay": decay}
    options = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw", **options}
    _check_options(torch.optim.Muon, options)
    _check_options(torch.optim.AdamW, rest)
    return {
        "muon": partial(_muon, exclude=exclude, options=options),
        "adamw": partial(_adamw, exclude=exclude, options=rest),
    }


def _muon(model: nn.Module, *, exclude: Sequence[str] | None, options: dict[str, Any]) -> Optimizer:
    return torch.optim.Muon(list(hidden_matrices(model, exclude).values()), **options)


def _adamw(model: nn.Module, *, exclude: Sequence[str] | None, options: dict[str, Any]) -> Optimizer:
    hidden = {id(p) for p in hidden_matrices(model, exclude).values()}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in hidden]
    if not rest:
        raise ConfigError("all parameters of the model are hidden matrices; use torch.optim.Muon alone")
    return torch.optim.AdamW(rest, **options)
