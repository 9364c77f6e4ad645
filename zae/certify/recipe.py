"""Read the recipe of the loop by hand from a trainer that has not run, and name what that loop does not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zae import optim
from zae.certify.loop import Recipe, Uncovered
from zae.common.random_state import seed_everything
from zae.compose.introspect import add_ons_of, hooks_of, is_add_on, is_trainer
from zae.compose.options import option_value
from zae.data.loaders import length_of, parts_with_epoch
from zae.schedulers.lengths import is_per_step, is_plateau, takes_total_steps

__all__ = ["make_loop", "uncovered", "uncovered_add_ons"]

_WATCHING_LAYERS = ("observe", "state", "parallel")  # Of one process, "parallel" is idle.
_COVERED = ("AMPAddon", "GradientAccumulationAddon")
_KEEP_WEIGHTS = ("EMAAddon", "GradientCheckpointingAddon", "ActivationOffloadAddon", "PrefetchAddon")
_RUN = ("n_epoch", "loader", "max_steps", "valid_loader", "valid_every")
_STEPS = ("train_step", "test_step", "predict_step", "metric_on_epoch_end")
_OF_A_RUN = ("progress_checker", "current_run", "history", "loader_position")


def uncovered_add_ons(trainer: Any) -> list[str]:
    """Name the add-ons whose part in training the loop by hand does not have."""
    known = {*_COVERED, *_KEEP_WEIGHTS}
    found = [each for each in add_ons_of(type(trainer)) if each.layer not in _WATCHING_LAYERS]
    return [each.__name__ for each in found if each.__name__ not in known]


def uncovered(trainer: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Name what else of a trainer, and of the arguments of its run, the loop by hand does not do."""
    optimizers, found = optim.as_dict(trainer.optimization.optimizer), list[str]()
    if len(optimizers) != 1:
        found.append(f"{len(optimizers)} optimizers")
    given = {option: option_value(trainer, option) for option in ("dtype", "global_batch_size")}
    found += [f"{option}={value!r}" for option, value in given.items() if value is not None]
    found += [f"{name}= of run()" for name, value in arguments.items() if name not in _RUN and value is not None]
    own = _classes_of_user(trainer)
    if not any("train_step" in vars(each) for each in own):
        found.append("a train_step that is not the user's")
    overridden = [name for name in hooks_of(type(trainer)) if any(name in vars(each) for each in own)]
    found += [f"{own[0].__name__}.{name}" for name in overridden if name not in _STEPS]
    return found


def make_loop(trainer: Any, arguments: Mapping[str, Any], precision: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `loop.train` for a trainer that has not run, made as a script would make them.

    Uncovered names what that loop does not do with an optimizer or a scheduler.
    """
    if trainer.seed is not None:
        seed_everything(trainer.seed)
    model, loader = trainer.unwrap().to(trainer.device), arguments["loader"]
    recipe = Recipe(
        n_epoch=arguments["n_epoch"],
        max_steps=arguments.get("max_steps"),
        accumulate=trainer.step_window.batches,
        clip=trainer.gradient_clip,
        precision=precision,
        loss_scale=option_value(trainer, "loss_scale", Recipe.loss_scale),
    )
    (optimizer,) = optim.as_dict(trainer.optimization.optimizer).values()
    if optim.is_factory(optimizer):
        optimizer = optim.make(optimizer, model)
    _check_optimizer(optimizer, model)
    per_step, per_epoch = list[Any](), list[Any]()
    for given in optim.as_dict(trainer.optimization.scheduler).values():
        made = given
        if optim.is_factory(given):
            more = {"total_steps": _total_steps(loader, recipe)} if takes_total_steps(given) else {}
            made = given(optimizer, **more)
        if is_plateau(made):
            raise Uncovered(f"{type(made).__name__}, which follows the validation")
        due = per_step if is_per_step(given, trainer.scheduler_step_on_batch) else per_epoch
        due.append(made)
    with_epoch = [*parts_with_epoch(loader).values()]
    step = _step_of_user(trainer)
    vars(trainer).update({name: _OfARun(name) for name in _OF_A_RUN})
    return (step, model, optimizer, loader, recipe), {
        "per_step": per_step,
        "per_epoch": per_epoch,
        "with_epoch": with_epoch,
    }


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what the loop by hand would step otherwise."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Uncovered("LBFGS, which calls the step several times")
    if callable(getattr(optimizer, "eval", None)):
        raise Uncovered(f"{type(optimizer).__name__}, which has other weights in a validation")
    trained = {id(each) for each in model.parameters()}
    if any(id(each) not in trained for group in optimizer.param_groups for each in group["params"]):
        raise Uncovered("an optimizer with parameters outside of the model")


def _total_steps(loader: Any, recipe: Recipe) -> int | None:
    """Return the optimizer steps that a run is planned to take."""
    length = length_of(loader)
    if length is None or recipe.n_epoch is None:
        return recipe.max_steps
    planned = recipe.n_epoch * -(-length // recipe.accumulate)
    return planned if recipe.max_steps is None else min(planned, recipe.max_steps)


def _classes_of_user(trainer: Any) -> list[Any]:
    """Return the classes of the user's task, without add-ons and without what add_on has made."""
    tasks = [each for each in type(trainer).__mro__ if is_trainer(each) and not is_add_on(each)]
    return [each for each in tasks if not each.__module__.startswith("zae.") and "_recipe" not in vars(each)]


def _step_of_user(trainer: Any) -> Callable[[Any], Any]:
    """Return the step as the user's class has it, without what add-ons put around it."""
    owner = next(each for each in _classes_of_user(trainer) if "train_step" in vars(each))
    step: Callable[[Any], Any] = vars(owner)["train_step"].__get__(trainer)
    return step


class _OfARun:
    """Stands for a part of the trainer that changes in a run; a step that reads it is another one in the loop."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise Uncovered(f"self.{self._name}.{attribute}, which the step reads")
