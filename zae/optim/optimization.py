"""The optimizers and schedulers of a trainer: clip, step, clear and save them, and check that schedules fit a run."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zae import optim
from zae.common import argument_checks, random_state
from zae.common.copying import deep_copy
from zae.common.model_weights import fit_name, named_parameters
from zae.common.walk import copy_of
from zae.errors import CheckpointMismatch, ConfigError, MonitorError
from zae.optim import modes
from zae.optim.checks import Span, check_disjoint, check_scheduler_owners, check_schedules
from zae.optim.settings import REMEDY, ScriptSettings
from zae.optim.state import (
    check_groups,
    check_rates,
    has_own_form,
    match_layout,
    match_order,
    parameter_order,
    with_enums,
    wraps_others,
)
from zae.schedulers.lengths import is_per_step, is_plateau, steps_taken
from zae.schedulers.warmup import takes_total_steps

__all__ = ["Optimization"]

_log = logging.getLogger("zae")
_SHOWN = 5  # Names of parameters in a warning.
_LOW = 0.1  # Of the base rate: a first epoch below it trains very little.


class Optimization:
    """The optimizers and schedulers of a trainer, and the parameters that they train.

    It takes the arguments of the trainer: a ``scheduler_step_on_batch`` that is None is False, and is not explicit.

    Attributes
    ----------
    optimizer, scheduler : object
        As they were given; after `build`, with what the factories made.
    optimizers, schedulers : dict
        By name; an only one is named "0". Factories are left out.
    parameters : list of Tensor
        Those of the model and of the optimizers, each once. It follows ``optimizer.add_param_group``.
    grad_norm : Tensor or None
        The norm of the gradients before they were last clipped.
    settings : ScriptSettings
        What the script has set on the optimizers and schedulers.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any = None,
        gradient_clip: float = 0.0,
        scheduler_step_on_batch: bool | None = None,
    ) -> None:
        if not isinstance(gradient_clip, float) or gradient_clip != math.inf:
            gradient_clip = argument_checks.check_number("gradient_clip", gradient_clip)
        self.gradient_clip = gradient_clip
        self.is_step_explicit = scheduler_step_on_batch is not None
        flag = {"scheduler_step_on_batch": scheduler_step_on_batch or False}
        (self.scheduler_step_on_batch,) = argument_checks.check_flags(**flag)
        self.parameters: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.grad_norms: dict[str, Tensor] = {}
        self.settings = ScriptSettings()
        self.clipped_parameters: list[list[Tensor]] = []  # Together: all for one optimizer, else those of each.
        self.tensors_to_clip: Callable[[list[Tensor]], list[Any]] = list  # An engine may set it.
        self._clearing: list[Optimizer] = []  # Those whose ``zero_grad`` does more than to drop gradients.
        self._warned: set[str] = set()
        self.optimizer, self.scheduler = optimizer, scheduler
        self.index_by_name()

    def index_by_name(self) -> None:
        """Store the optimizers and schedulers that were given or made by their names."""
        self.optimizers: dict[str, Optimizer] = _objects_in(self.optimizer)
        self.schedulers: dict[str, Any] = _objects_in(self.scheduler)

    @property
    def has_factory(self) -> bool:
        """Whether an optimizer or a scheduler is still to be made."""
        given = [*optim.as_dict(self.optimizer).values(), *optim.as_dict(self.scheduler).values()]
        return any(map(optim.is_factory, given))

    def build(
        self,
        build_optimizer: Callable[[], Any],
        build_scheduler: Callable[[], Any],
        wrap_optimizers: Callable[[Mapping[str, Optimizer]], None] | None = None,
    ) -> None:
        """Make the optimizers, and then the schedulers that change their learning rates."""
        self.optimizer = build_optimizer()
        self.index_by_name()
        if wrap_optimizers is not None:
            wrap_optimizers(self.optimizers)
        self.scheduler = build_scheduler()
        self.index_by_name()
        check_scheduler_owners(self.schedulers, self.optimizers)
        self.note_settings()

    def make_schedulers(self, total_steps: Callable[[], int | None]) -> Any:
        """Return the schedulers that were given, with what their factories make of the optimizers."""
        takes_total = any(
            optim.is_factory(each) and takes_total_steps(each) for each in optim.as_dict(self.scheduler).values()
        )
        call = partial(_call_factory, total_steps=total_steps() if takes_total else None)
        return optim.call_factories(
            self.scheduler, partial(optim.optimizer_for, self.optimizers), LRScheduler, "scheduler", call
        )

    def check_given(self) -> None:
        """Refuse to train without an optimizer, as a trainer that was made to evaluate would."""
        if self.optimizer is None:
            raise ConfigError("optimizer is None, and training needs one; give it to the trainer, or use mode='test'")

    def track(self, model: nn.Module) -> None:
        """List the parameters of a model and of the optimizers; the lists follow groups that are added later."""
        check_disjoint(self.optimizers, model)
        self.clipped_parameters, self.parameters, self._clearing = optim.track_parameters(self.optimizers, model)

    def release(self) -> None:
        """Stop following the groups of the optimizers."""
        optim.untrack_parameters(self.optimizers)

    def check_unreplaced(self) -> None:
        """Refuse optimizers or schedulers that were assigned to the trainer within a run."""
        for name in ("optimizer", "scheduler"):
            if [*optim.as_dict(getattr(self, name)).values()] != [*getattr(self, f"{name}s").values()]:
                raise ConfigError(
                    f"trainer.{name} was replaced within a run, which continues with the one it has; replace it "
                    "between two calls of run, or change what is in its param_groups"
                )

    def warn_of_untrained(self, model: nn.Module, is_main: bool) -> None:
        """Warn once of each parameter that requires a gradient and that no optimizer holds."""
        names = [name for name in optim.untrained_names(model, self.optimizers) if name not in self._warned]
        self._warned.update(names)
        if names and is_main:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            _log.warning(
                "no optimizer of the trainer holds %s%s (%d parameters with requires_grad=True), and until one "
                "does, the trainer leaves them as they are; give them to one, "
                "optimizer.add_param_group({'params': [...]}), or freeze them: requires_grad_(False)",
                ", ".join(names[:_SHOWN]), more, len(names),
            )  # fmt: skip

    # --------------------------------------------------------------------------------------- the parts of a step

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss to ``.grad``; of several losses, each to the parameters of its optimizer."""
        if isinstance(loss, Tensor):
            loss.backward(**kwargs)
        else:
            optim.backward_each(loss, self.optimizers, **kwargs)

    def clip(self, norm_of: Callable[[list[Tensor]], Tensor] = optim.gradient_norm) -> None:
        """Clip the gradients of each group of parameters to ``gradient_clip``, and keep the norm that they had."""
        if self.gradient_clip:
            norms = []
            for parameters in self.clipped_parameters:  # In turn: two optimizers may share a parameter.
                norms.append(norm_of(parameters))
                if self.gradient_clip != math.inf:
                    nn.utils.clip_grads_with_norm_(self.tensors_to_clip(parameters), self.gradient_clip, norms[-1])
            self.grad_norm = norms[0]
            if len(norms) > 1:
                self.grad_norm = torch.stack(norms).norm()
                self.grad_norms = dict(zip(self.optimizers, norms))

    step_one = staticmethod(optim.step)

    def scheduler_step(self, when: str) -> None:
        """Step the schedulers that are stepped after a "batch" or an "epoch", but those that wait for a metric."""
        on_batch, default = when == "batch", self.scheduler_step_on_batch
        for scheduler in self.schedulers.values():
            if getattr(scheduler, "steps_on_batch", default) == on_batch and not is_plateau(scheduler):
                scheduler.step()

    def step_plateaus(self, score: float | None, monitor: str, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that wait for a metric: by the score of these metrics, which is that of the monitor."""
        for name, scheduler in self.schedulers.items():
            if not is_plateau(scheduler):
                continue
            if score is None:
                raise MonitorError(f"scheduler {name} needs monitor={monitor!r}; available: {[*metrics]}")
            scheduler.step(score)

    def steps_schedulers(self, when: str) -> bool:
        """Return whether some scheduler is stepped after a "batch", or an "epoch"."""
        default = self.scheduler_step_on_batch
        return any(is_per_step(each, default) == (when == "batch") for each in optim.as_dict(self.scheduler).values())

    def zero_grad(self) -> None:
        """Set every gradient to None, and call each ``zero_grad`` that a class of optimizers overrides."""
        for parameter in self.parameters:
            parameter.grad = None
        for optimizer in self._clearing:
            optimizer.zero_grad()

    # ------------------------------------------------------------------------------------- schedules and the run

    def check_run(self, epochs: Span, steps: Span, has_metric: bool) -> list[str]:
        """Refuse schedules that do not fit a run, and return warnings of those that probably do not."""
        warned = check_schedules(
            self.schedulers, self.scheduler_step_on_batch, self.is_step_explicit, epochs, steps, has_metric
        )
        return warned if steps.present else warned + self._low_rates()

    def _low_rates(self) -> list[str]:
        """Describe the schedules, stepped by epochs, whose first epoch has less than a tenth of the base rate."""
        if self.scheduler_step_on_batch:
            return []
        low = {
            name: each
            for name, each in self.schedulers.items()
            # A schedule that states its unit is as long as it is meant to be.
            if not (is_plateau(each) or hasattr(each, "steps_on_batch"))
            and steps_taken(each) == 0
            and _highest(each) < _LOW
        }
        return [
            f"scheduler {name} ({type(each).__name__}) keeps the learning rate under a tenth of its base rate through "
            f"the whole first epoch (it begins at {optim.learning_rates({'0': each.optimizer}).get('lr', 0.0):g}); "
            "if its steps are optimizer steps, write scheduler_step_on_batch=True"
            for name, each in low.items()
        ]

    def simulate(self, module: nn.Module, total_steps: int | None) -> tuple[dict[str, Optimizer], dict[str, Any]]:
        """Copy the optimizers without their parameters, and the schedulers that change their learning rates.

        Factories are called: with the parameters of this model, and with this number of steps.
        """
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A scheduler of a copy sees no optimizer step.
            twins: dict[str, Optimizer] = {}
            memo: dict[int, Any] = {}
            for name, optimizer in self.optimizers_for(module):
                twins[name] = memo[id(optimizer)] = _twin(optimizer)
            schedulers = {}
            for name, scheduler in optim.as_dict(self.scheduler).items():
                if optim.is_factory(scheduler):
                    schedulers[name] = _call_factory(scheduler, optim.optimizer_for(twins, name), total_steps)
                else:
                    schedulers[name] = copy.deepcopy(scheduler, dict(memo))
            return twins, schedulers

    def optimizers_for(self, module: nn.Module | None) -> Iterator[tuple[str, Optimizer]]:
        """Yield each optimizer by name; of a factory, one for the parameters of a model that does not change them."""
        for name, optimizer in optim.as_dict(self.optimizer).items():
            if not isinstance(optimizer, Optimizer):
                own = [] if module is None else [*module.parameters()]
                twins = [
                    each if optim.has_lazy([each]) else nn.Parameter(each.detach(), each.requires_grad) for each in own
                ]
                with random_state.isolated():
                    if module is not None and optim.takes_model(optimizer):
                        optimizer = optim.make(optimizer, deep_copy(module, dict(zip(map(id, own), twins))))
                    else:
                        optimizer = optimizer(twins)
            yield name, optimizer

    # ------------------------------------------------------------------------------------------------ the state

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group, named as `log` records it."""
        return optim.learning_rates(self.optimizers)

    def note_settings(self) -> None:
        """Note the settings of optimizers and schedulers that are new: as the script has made them."""
        self.settings.note(optimizer=self.optimizers, scheduler=self.schedulers)

    def state_dict(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """Return the entries of a state beside "optimizer", which `Trainer.optimizer_state` returns."""
        names = {id(each): name for name, each in named_parameters(module).items()}
        return {
            "scheduler": {name: each.state_dict() for name, each in self.schedulers.items()},
            # Parameters that an optimizer trains outside of the model, a learnt loss weight for instance.
            "outside": {name: optim.parameters_outside(each, module) for name, each in self.optimizers.items()},
            "order": {name: parameter_order(each, names) for name, each in self.optimizers.items()},
        }

    def records(self) -> dict[str, Any]:
        """Return its part of the entry "records"."""
        each = {"grad_norms": self.grad_norms} if self.grad_norms else {}
        return {"settings": self.settings.state_dict(), "grad_norm": self.grad_norm, **each}

    def prepare(
        self,
        state: Mapping[str, Any],
        module: nn.Module,
        strict: bool,
        load_optimizer: Callable[[str, Any], None],
        *,
        keeps_best: bool,
    ) -> Callable[[], None]:
        """Check its entries of a whole state, and return a function that loads them with ``load_optimizer``.

        ``strict`` refuses parameters in another order where their names do not say which is which. ``keeps_best`` says
        that the state has the same monitor; else a scheduler that waits for a metric begins again.
        """
        self._check_names(state)
        self.settings.check_classes(state)
        named = named_parameters(module)
        names = {id(each): name for name, each in named.items()}
        added = {name: self._added_groups(name, state, named) for name in self.optimizers}
        optimizers = {name: self._in_present_order(name, state, names, strict, added[name]) for name in self.optimizers}
        schedulers = {name: copy.deepcopy(state["scheduler"][name]) for name in self.schedulers}
        for name, each in self.schedulers.items():
            check_rates("scheduler", schedulers[name], each.state_dict())
            if is_plateau(each) and not keeps_best:
                best = {"mode": each.mode, "best": each.mode_worse, "num_bad_epochs": 0}
                schedulers[name] = {**schedulers[name], **best}
        records, is_begun = state["records"], bool(state["progress"]["step"])
        # Then the parameters have the order in memory that they had, and so has each tensor of the state.
        is_ordered = (state.get("module") or {}).get("strides") is not None
        grad_norm, grad_norms = records["grad_norm"], dict(records.get("grad_norms", {}))

        def load() -> None:
            for name, each in self.optimizers.items():
                if added[name]:
                    each.param_groups = list(each.param_groups)  # On an error the list from before is put back.
                for group in added[name]:
                    each.add_param_group({**group})
                load_optimizer(name, optimizers[name])
                if not is_ordered:
                    match_layout(each)
                if is_begun:  # Else a scheduler that is stepped before it warns.
                    each._opt_called = True  # type: ignore[attr-defined]
            for name, each in self.schedulers.items():
                each.load_state_dict(with_enums(schedulers[name], each.state_dict()))
            self.grad_norm, self.grad_norms = grad_norm, grad_norms
            self.settings.load(records["settings"])

        return load

    def _check_names(self, state: Mapping[str, Any]) -> None:
        """Refuse a state with other names of optimizers or schedulers."""
        for what, own in (("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            if set(state[what]) != set(own):
                raise CheckpointMismatch(
                    f"the state was saved with the {what}s {sorted(state[what])}, and this trainer has {sorted(own)}; "
                    f"build the trainer as it was, load only the weights: apply_weights(path), or {REMEDY}"
                )

    def _added_groups(self, name: str, state: Mapping[str, Any], named: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the groups that training has added, as a script does that thaws layer by layer."""
        optimizer, own = self.optimizers[name], state["optimizer"][name]
        count, held = len(optimizer.param_groups), {id(each) for each in optim.parameters_of(optimizer)}
        added = []
        for names, group in zip(state["order"].get(name, ())[count:], _groups_in(own)[count:]):
            parameters = [named.get(fit_name(key, named)) for key in names]
            if any(each is None or id(each) in held for each in parameters):
                return []  # It is refused, by its parameters.
            held |= set(map(id, parameters))
            settings = {key: each for key, each in group.items() if key not in ("params", "param_names")}
            pairs = zip(group.get("param_names", ()), parameters)
            added.append({**settings, "params": [*pairs] if "param_names" in group else parameters})
        return [] if wraps_others(optimizer) else added

    def _in_present_order(
        self,
        name: str,
        state: Mapping[str, Any],
        names: Mapping[int, str],
        strict: bool,
        added: Sequence[Mapping[str, Any]],
    ) -> Any:
        """Return the saved state of an optimizer with its parameters in the present order."""
        optimizer, own = self.optimizers[name], state["optimizer"][name]
        if has_own_form(optimizer, own):
            return own
        check_groups(name, optimizer, own, [len(group["params"]) for group in added])
        for there, here in zip(own["param_groups"], optimizer.param_groups):
            check_rates("optimizer", there, here)
        present = parameter_order(optimizer, names)
        for group in added:
            held = [each[1] if isinstance(each, tuple) else each for each in group["params"]]
            present.append([names[id(each)] for each in held])
        known = dict.fromkeys([*names.values(), *itertools.chain(*present)])
        order = state["order"].get(name, ())  # Or with the names of wrappers.
        saved = [[fit_name(key, known) for key in keys] for keys in order]
        if not saved or not known.keys() >= set(itertools.chain(*saved)):
            return own  # The names have changed: only the numbers are left.
        return match_order(name, optimizer, own, saved, present, strict)

    def pair_outside(self, saved: Mapping[str, Any], module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Pair the optimizers' parameters outside of the model with their saved values."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, optimizer in self.optimizers.items():
            present, values = optim.parameters_outside(optimizer, module), saved.get(name, [])
            shapes = [[tuple(each.shape) for each in several] for several in (present, values)]
            if shapes[0] != shapes[1]:
                raise CheckpointMismatch(
                    f"optimizer {name} trains parameters outside of the model of shapes {shapes[0]}, and the state has "
                    f"{shapes[1]}; build the trainer as it was"
                )
            pairs += zip(present, values, strict=True)
        return pairs

    # ------------------------------------------------------------------ optimizers with train and evaluation modes

    def begin_training(self) -> None:
        """Put the training weights into the model, where an optimizer has left those of evaluation there."""
        modes.begin_training(self.optimizers)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context with the evaluation weights in the model; the training weights are restored bitwise."""
        return modes.evaluation_weights(self.optimizers)


def _groups_in(state: Any) -> list[Any]:
    """Return the groups in the state of an optimizer; none where it has a form of its own."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return groups if isinstance(groups, list) else []


def _objects_in(given: Any) -> dict[str, Any]:
    return {name: each for name, each in optim.as_dict(given).items() if not optim.is_factory(each)}


def _call_factory(factory: Callable[..., Any], optimizer: Any, total_steps: int | None) -> Any:
    """Call a scheduler's factory, with the planned number of steps where it has a parameter ``total_steps``."""
    return factory(optimizer, total_steps=total_steps) if takes_total_steps(factory) else factory(optimizer)


def _highest(scheduler: Any) -> float:
    """Return the highest learning rate of the groups of a scheduler, as a fraction of their base rates."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    pairs = [
        (float(g["lr"]), float(g["initial_lr"])) for g in groups if g.get("lr") is not None and g.get("initial_lr")
    ]
    return max((rate / base for rate, base in pairs), default=1.0)


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups and settings, and one number for the parameters of each type."""
    twin = SGD([torch.zeros(1)], lr=0.0)
    twin.defaults = dict(optimizer.defaults)
    twin.param_groups = [
        {"params": [torch.zeros(1, dtype=d) for d in types]}
        | {name: copy_of(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
        for types in [{p.dtype for p in group["params"]}]
    ]
    return twin
