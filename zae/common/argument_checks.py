"""What was wrong with an argument of the constructor, or with what a step returned; read only when something is."""

from __future__ import annotations

import difflib
import errno
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from zae.common import random_state
from zae.errors import ConfigError, StepError, did_you_mean

__all__ = [
    "as_mapping",
    "check_count",
    "check_devices",
    "check_file",
    "check_flags",
    "check_folder",
    "check_metrics",
    "check_mode",
    "check_model",
    "check_number",
    "check_outputs",
    "check_same",
    "count_of",
    "describe_batch",
    "explain_outputs",
]


def check_model(model: Any, seed: int | None = None) -> nn.Module:
    """Return a module, or what a function made with the seed returns; the random streams stay as they are."""
    if not isinstance(model, nn.Module) and callable(model):
        if seed is None:
            model = model()
        else:
            with random_state.isolated():
                random_state.seed_everything(seed)
                model = model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module, or a function that returns one")
    return model


def check_same(present: Any, wrapped: Any, given: nn.Module) -> nn.Module:
    """Refuse another model in the place of the one that is trained, saved and loaded, or of its wrapper."""
    if present is not given and present is not wrapped:
        raise ConfigError(
            f"trainer.model was set to a {type(present).__name__}, and what is trained is the {type(given).__name__} "
            "that was given; make a new trainer for another model, or override wrap_model(model), which returns what "
            "train_step is to call"
        )
    return given


def check_devices(devices: list[Any], name: str, slots: Mapping[str, Any]) -> list[Any]:
    """Refuse several devices for a trainer that uses one."""
    if len(devices) > 1 and "parallel" not in slots:
        raise ConfigError(
            f"device is a list of {len(devices)}, and {name} trains on one; add what trains on several: "
            ".add_on(MultiGPUAddon)"
        )
    return devices


def check_mode(mode: Any) -> str:
    """Refuse a mode that is neither "train" nor "test"."""
    if mode not in ("train", "test"):
        hint = did_you_mean(str(mode), ("train", "test"))
        raise ConfigError(f"mode={mode!r}; it must be 'train' or 'test'{hint}")
    return str(mode)


def check_number(name: str, value: Any, least: float = 0.0) -> float:
    """Refuse what is not a finite number of at least so much."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    good = is_number and least <= value < math.inf
    if not good:
        raise ConfigError(f"{name}={value!r}; it must be a number of at least {least:g}")
    return float(value)


def check_count(name: str, value: Any, least: int = 1, *, bits: int = 0, optional: bool = False) -> Any:
    """Refuse what is not a whole number of at least so much, and, where that is given, of at most so many bits."""
    if value is None and optional:
        return None
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}; it must be a whole number of at least {least}")
    if bits and int(value).bit_length() > bits:
        raise ConfigError(f"{name}={value!r}; it must be a whole number below 2**{bits}")
    return int(value)


def check_flags(**flags: Any) -> list[bool]:
    """Refuse what is neither true nor false: the text "False", of a file or a command line, would count as true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name}={value!r}; it must be True or False")
    return [bool(value) for value in flags.values()]


def check_partial(files: Any) -> list[str]:
    """Take over the files that a checkpoint may lack; a text would be taken for a list of its letters."""
    if not isinstance(files, (list, tuple, set, frozenset)):
        example = files if isinstance(files, str) else "state.json"
        raise ConfigError(f"allow_partial={files!r}; it must be a list of files: [{example!r}]")
    return list(files)


def check_folder(path: Any, name: str) -> Path:
    """Refuse what cannot be a folder to write to, without making it."""
    folder = _path_of(path, name, "folder")
    _check_place(folder.absolute(), f"{name}={str(path)!r}")
    return folder


def check_file(path: Any, name: str, example: str) -> Path:
    """Refuse what cannot be a file to write to, without making it."""
    file = _path_of(path, name, "file").absolute()
    if os.path.isdir(file):
        raise ConfigError(f"{name}={str(file)!r} is a folder; give a file in it: {str(file / example)!r}")
    _check_place(file.parent, f"{name}={str(path)!r}")
    if os.path.exists(file) and stat.S_IFMT(os.stat(file).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK):
        raise ConfigError(f"{name}={str(file)!r} is a pipe or a socket, which may wait for ever; give a file")
    if os.path.exists(file) and not os.access(file, os.W_OK):
        raise ConfigError(f"{name}={str(file)!r} cannot be written to; give another path or change its rights")
    return file


def _path_of(path: Any, name: str, kind: str) -> Path:
    """Take a path over, or say why it is none."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigError(f"{name}={path!r}; it must be the path of a {kind}")
    try:
        found = Path(path).expanduser()
        os.stat(found)
    except RuntimeError:
        raise ConfigError(f"{name}={str(path)!r} has no home folder here; write the path in full") from None
    except (OSError, ValueError) as error:  # That nothing is there, or that it may not be looked at, is no fault yet.
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{name}={str(path)!r} cannot be a path: {why}; give another one") from None
    return found


def _check_place(folder: Path, option: str) -> None:
    """Refuse a folder that nothing can be written to, or that cannot be made."""
    # Unlike those of a Path, these tests say False of what may not even be looked at.
    present = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not os.path.isdir(present):
        raise ConfigError(f"{option}: {present} is a file, and must be a folder; give another path")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {present} cannot be written to; give another path or change its rights")


def describe_batch(batch: Any, depth: int = 0) -> str:
    """Describe a batch by the shapes and types in it."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return f"{type(batch).__name__}{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping) and depth < 3:
        return "{" + ", ".join(f"{k}: {describe_batch(v, depth + 1)}" for k, v in list(batch.items())[:8]) + "}"
    if isinstance(batch, (tuple, list)) and depth < 3:
        return f"{type(batch).__name__}({', '.join(describe_batch(v, depth + 1) for v in batch[:8])})"
    return type(batch).__name__


def as_mapping(trainer: Any, out: Any, batch: Any) -> Mapping[str, Any]:
    """Return what a step returned as a mapping: a loss alone is ``{"loss": loss}``.

    Parameters
    ----------
    trainer : Trainer
        Whose step it is.
    out : object
        What it returned.
    batch : object
        What it was given.

    Returns
    -------
    mapping
        With an entry for each thing to record.

    Raises
    ------
    StepError
        It is neither a mapping nor a loss.
    """
    if isinstance(out, Mapping):
        return out
    is_train = trainer.mode == "train"
    is_number = isinstance(out, (int, float, np.number)) and not is_train
    if is_number or (isinstance(out, Tensor) and out.numel() == 1):
        return {"loss": out}
    check_outputs(f"{type(trainer).__name__}.{'train' if is_train else 'test'}_step", out, batch, train=is_train)
    raise AssertionError("check_outputs refuses what is not a mapping")


def explain_outputs(trainer: Any, out: Any, batch: Any, error: Exception) -> None:
    """Say what is wrong with what ``train_step`` returned, where something could not be done with it.

    Parameters
    ----------
    trainer : Trainer
        Whose step it is.
    out : object
        What it returned.
    batch : object
        What it was given.
    error : Exception
        What was raised of it; it gets a note where we know more.

    Raises
    ------
    StepError
        In place of the error, where the output is to blame.
    """
    name = f"{type(trainer).__name__}.train_step"
    check_outputs(name, out, batch, train=True, keys=list(trainer._optimizers), error=error)


def check_outputs(
    name: str,
    out: Any,
    batch: Any,
    *,
    train: bool,
    keys: list[str] | None = None,
    error: Exception | None = None,
) -> None:
    """Refuse what a step returned, saying why; returns when nothing is wrong with it.

    Parameters
    ----------
    name : str
        The method, for instance ``"Task.train_step"``.
    out : object
        What it returned.
    batch : object
        What it was given.
    train : bool
        Whether a loss to be differentiated is needed.
    keys : list of str, optional
        Names of several optimizers; ``loss`` may be a dict with one entry for each.
    error : Exception, optional
        What was raised of it; it gets a note where we know more.

    Raises
    ------
    StepError
        With what came, the keys, shapes and types.
    """
    where = f"{name} (batch: {describe_batch(batch)})"
    if not isinstance(out, Mapping):
        value = " (is a return missing?)" if out is None else f" {_describe(out)}"
        raise StepError(f"{where} returned {type(out).__name__}{value}; return a dict: return {{'loss': loss}}")
    if not train:
        return
    if "loss" not in out:
        found = ", ".join(map(repr, out)) or "no key"
        near = difflib.get_close_matches("loss", list(map(str, out)), n=1)
        cure = f"rename {near[0]!r} to 'loss'" if near else "return {'loss': loss, ...}"
        raise StepError(f"{where} returned a dict without 'loss'; it holds {found}; {cure}")
    loss = out["loss"]
    if isinstance(loss, Mapping):
        if not keys or set(map(str, loss)) != set(keys):
            raise StepError(
                f"{where} returned losses for {list(loss)}, and the optimizers are {keys or ['0']}; "
                "return one scalar, or a dict with one entry for each optimizer of the dict that was given"
            )
        for key, each in loss.items():
            _check_loss(f"{where}, loss[{key!r}]", each)
    else:
        _check_loss(where, loss)
    _check_targets(where, out.get("num_targets"))
    if error is not None and "backward through the graph a second time" in str(error):
        error.add_note(
            f"zae: {name} computes the loss, and backward(), optimizer.step() and zero_grad() are done for you; take "
            "them out of it"
        )


def count_of(trainer: Any, num_targets: Any) -> Any:
    """Take over the number of targets that a step counted; one on an accelerator is not read yet."""
    if isinstance(num_targets, Tensor) and not num_targets.is_cpu and num_targets.numel() == 1:
        return num_targets.reshape(())
    return float(_check_targets(f"{type(trainer).__name__}.{trainer.mode}_step", num_targets))


def _check_targets(where: str, count: Any) -> Any:
    """Refuse a number of targets that is none; give it back, read from its tensor."""
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    good = isinstance(count, (int, float, np.integer, np.floating)) and 0 <= count < math.inf
    if count is not None and not good:
        raise StepError(
            f"{where} returned num_targets {_describe(count)}; return how many targets the loss is the mean over, "
            "for instance 'num_targets': targets.numel()"
        )
    return count


def check_metrics(name: str, metrics: Any) -> dict[str, float]:
    """Take over what ``metric_on_epoch_end`` returned, or say why not."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise StepError(f"{name} returned {type(metrics).__name__} {_describe(metrics)}; return a dict of numbers")
    numbers = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise StepError(
                f"{name} returned {key!r} of type {type(value).__name__} {_describe(value)}; return a number, for "
                f"instance the mean"
            ) from None
    return numbers


def _check_loss(where: str, loss: Any) -> None:
    """Refuse one loss."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{where} returned a loss of type {type(loss).__name__}; return the tensor, without .item() or float()"
        )
    if loss.numel() != 1:
        raise StepError(f"{where} returned a loss of shape {tuple(loss.shape)}; reduce it to a scalar: loss.mean()")
    if not loss.requires_grad:
        raise StepError(
            f"{where} returned a loss that has no gradient; was it detached, or computed under torch.no_grad()? "
            "Are the model's parameters frozen?"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"of {len(value)} entries" if isinstance(value, (tuple, list)) else repr(value)[:60]
