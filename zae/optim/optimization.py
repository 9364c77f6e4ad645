"""The optimizers and schedulers of a trainer: clip, step, clear and save them, and check that schedules fit a run."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zae import optim, random_state
from zae.arguments import NonNegative, check_argument
from zae.errors import CheckpointMismatch, ConfigError, MonitorError
from zae.model.weights import named_parameters
from zae.optim import modes
from zae.optim.checks import check_disjoint, check_scheduler_owners
from zae.optim.copies import copy_optimizer
from zae.optim.factories import as_dict, call_factories, is_factory, make_scheduler, optimizer_for
from zae.optim.optimizer_state import are_small_and_whole, check_loaded, match_layout, with_enums
from zae.optim.saved_state import added_groups, check_rates, grow_lambdas, in_present_order, parameter_order
from zae.optim.schedule_checks import Span, check_schedules
from zae.schedulers.lengths import is_per_step, is_plateau, steps_taken, takes_total_steps
from zae.values.walk import leaves_of

__all__ = ["Optimization"]

_log = logging.getLogger("zae")
_MAX_SHOWN = 5  # Names of parameters in a warning.
_LOW_RATE = 0.1  # Of the base rate: a first epoch below it trains very little.


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
    structure : int
        It grows when a group is added to an optimizer: what is saved then has another form.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any = None,
        gradient_clip: float = 0.0,
        scheduler_step_on_batch: bool | None = None,
    ) -> None:
        if not isinstance(gradient_clip, float) or gradient_clip != math.inf:
            gradient_clip = check_argument("gradient_clip", gradient_clip, NonNegative)
        self.gradient_clip = gradient_clip
        self.is_step_explicit = scheduler_step_on_batch is not None
        self.scheduler_step_on_batch = scheduler_step_on_batch or False
        self.parameters: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.grad_norms: dict[str, Tensor] = {}
        self.clipped_parameters: list[list[Tensor]] = []  # Together: all for one optimizer, else those of each.
        self.tensors_to_clip: Callable[[list[Tensor]], list[Any]] = list  # An engine may set it.
        self._clearing: list[Optimizer] = []  # Those whose ``zero_grad`` does more than to drop gradients.
        self._warned: set[str] = set()
        self.structure = 0
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.index_by_name()

    def index_by_name(self) -> None:
        """Store the optimizers and schedulers that were given or made by their names."""
        self.optimizers: dict[str, Optimizer] = _objects_in(self.optimizer)
        self.schedulers: dict[str, Any] = _objects_in(self.scheduler)

    @property
    def has_factory(self) -> bool:
        """Whether an optimizer or a scheduler is still to be made."""
        arguments = [*as_dict(self.optimizer).values(), *as_dict(self.scheduler).values()]
        return any(map(is_factory, arguments))

    def build(
        self,
        build_optimizer: Callable[[], Any],
        build_scheduler: Callable[[], Any],
        wrap_optimizers: Callable[[Mapping[str, Optimizer]], None] | None = None,
    ) -> None:
        """Make the optimizers, and then the schedulers that change their learning rates."""
        self.optimizer = build_optimizer()
        self.index_by_name()
        # Before the schedulers are made, which read the groups: an engine may change these.
        if wrap_optimizers is not None:
            wrap_optimizers(self.optimizers)
        self.scheduler = build_scheduler()
        self.index_by_name()
        check_scheduler_owners(self.schedulers, self.optimizers)

    def make_schedulers(self, total_steps: Callable[[], int | None]) -> Any:
        """Return the schedulers that were given, with what their factories make of the optimizers."""
        factories = [scheduler for scheduler in as_dict(self.scheduler).values() if is_factory(scheduler)]
        # Only where it is asked for: outside of a run it is not known, which is an error.
        total = total_steps() if any(map(takes_total_steps, factories)) else None
        call = partial(make_scheduler, total_steps=total)
        optimizer_of = partial(optimizer_for, self.optimizers)
        return call_factories(self.scheduler, optimizer_of, LRScheduler, "scheduler", call)

    def check_present(self) -> None:
        """Refuse to train without an optimizer, as a trainer that was made to evaluate would."""
        if self.optimizer is None:
            raise ConfigError("optimizer is None, and training needs one; give it to the trainer, or use mode='test'")

    def track(self, model: nn.Module) -> None:
        """List the parameters of a model and of the optimizers; the lists follow groups that are added later."""
        check_disjoint(self.optimizers, model)
        self._list_parameters(model)
        for optimizer in self.optimizers.values():  # On the object: searching for new groups in each step is slower.
            vars(optimizer)["add_param_group"] = partial(self._add_group, model, optimizer)
        self._clearing = [one for one in self.optimizers.values() if type(one).zero_grad is not Optimizer.zero_grad]

    def _list_parameters(self, model: nn.Module) -> None:
        self.clipped_parameters = optim.parameters_to_clip(self.optimizers, model)
        parameters: dict[int, Tensor] = {id(parameter): parameter for parameter in model.parameters()}
        for optimizer in self.optimizers.values():
            parameters |= {id(parameter): parameter for parameter in optim.parameters_of(optimizer)}
        self.parameters = [*parameters.values()]

    def _add_group(self, model: nn.Module, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Add a group to an optimizer, and list its parameters."""
        try:
            type(optimizer).add_param_group(optimizer, group)
        except ValueError as error:
            if "more than one parameter group" in str(error):
                error.add_note(
                    "zae: a resume has added the groups that training had added, and on_epoch_begin is called again "
                    "where a run resumes within an epoch; add a group only while len(optimizer.param_groups) is less"
                )
            raise
        self._list_parameters(model)
        self.structure += 1

    def release(self) -> None:
        """Stop following the groups of the optimizers."""
        for optimizer in self.optimizers.values():
            vars(optimizer).pop("add_param_group", None)

    def check_unreplaced(self) -> None:
        """Refuse optimizers or schedulers that were assigned to the trainer within a run."""
        for name in ("optimizer", "scheduler"):
            assigned = list(as_dict(getattr(self, name)).values())
            in_use = list(getattr(self, f"{name}s").values())
            if assigned != in_use:
                raise ConfigError(
                    f"trainer.{name} was replaced within a run, which continues with the one it has; replace it "
                    "between two calls of run, or change what is in its param_groups"
                )

    def warn_of_untrained(self, model: nn.Module, is_main: bool) -> None:
        """Warn once of each parameter that requires a gradient and that no optimizer holds."""
        trained: set[int] = set()
        for optimizer in self.optimizers.values():
            trained.update(map(id, optim.parameters_of(optimizer)))
        untrained = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
        names = [name for name in untrained if name not in self._warned]
        self._warned.update(names)
        if not names or not is_main:
            return
        shown = ", ".join(names[:_MAX_SHOWN])
        if len(names) > _MAX_SHOWN:
            shown += f" and {len(names) - _MAX_SHOWN} more"
        _log.warning(
            "no optimizer of the trainer holds %s (%d parameters with requires_grad=True), and until one does, the "
            "trainer leaves them as they are; give them to one, optimizer.add_param_group({'params': [...]}), or "
            "freeze them: requires_grad_(False)",
            shown,
            len(names),
        )

    # --------------------------------------------------------------------------------------- the parts of a step

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss to ``.grad``; of several losses, each to the parameters of its optimizer.

        Several losses may share a graph.
        """
        if isinstance(loss, Tensor):
            loss.backward(**kwargs)
            return
        last = list(loss)[-1]
        for name, loss_of_one in loss.items():
            inputs = [p for p in optim.parameters_of(self.optimizers[str(name)]) if p.requires_grad]
            if inputs:  # Else all of them are frozen.
                loss_of_one.backward(**{"inputs": inputs, "retain_graph": name != last, **kwargs})

    def clip(self, norm_of: Callable[[list[Tensor]], Tensor]) -> None:
        """Clip the gradients of each group of parameters to ``gradient_clip``, and keep the norm that they had."""
        if not self.gradient_clip:
            return
        norms = []
        for parameters in self.clipped_parameters:  # In turn: two optimizers may share a parameter.
            norm = norm_of(parameters)
            if self.gradient_clip != math.inf:
                nn.utils.clip_grads_with_norm_(self.tensors_to_clip(parameters), self.gradient_clip, norm)
            norms.append(norm)
        self.grad_norm = norms[0]
        if len(norms) > 1:
            self.grad_norm = torch.stack(norms).norm()
            self.grad_norms = dict(zip(self.optimizers, norms))

    def scheduler_step(self, when: str) -> None:
        """Step the schedulers that are stepped after a "batch" or an "epoch", but those that wait for a metric."""
        is_after_batch = when == "batch"
        for scheduler in self.schedulers.values():
            # A schedule of `zae.schedulers` states its unit itself.
            on_batch = getattr(scheduler, "steps_on_batch", self.scheduler_step_on_batch)
            if on_batch == is_after_batch and not is_plateau(scheduler):
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
        return any(
            is_per_step(scheduler, default) == (when == "batch") for scheduler in as_dict(self.scheduler).values()
        )

    def zero_grad(self) -> None:
        """Set every gradient to None, and call each ``zero_grad`` that a class of optimizers overrides."""
        # Every parameter, also one that no optimizer holds: its gradient would grow from step to step.
        for parameter in self.parameters:
            parameter.grad = None
        for optimizer in self._clearing:
            optimizer.zero_grad()

    # ------------------------------------------------------------------------------------- schedules and the run

    def check_run(self, epochs: Span, steps: Span, has_metric: bool) -> list[str]:
        """Refuse schedules that do not fit a run, and return warnings of schedules that probably do not."""
        texts = check_schedules(
            self.schedulers, self.scheduler_step_on_batch, self.is_step_explicit, epochs, steps, has_metric
        )
        return texts if steps.present else texts + self._low_rates()

    def _low_rates(self) -> list[str]:
        """Describe the schedules, stepped by epochs, whose first epoch has less than a tenth of the base rate."""
        if self.scheduler_step_on_batch:
            return []
        texts = []
        for name, scheduler in self.schedulers.items():
            # A schedule that states its unit is as long as it is meant to be.
            if is_plateau(scheduler) or hasattr(scheduler, "steps_on_batch"):
                continue
            if steps_taken(scheduler) != 0 or _highest(scheduler) >= _LOW_RATE:
                continue
            rate = optim.learning_rates({"0": scheduler.optimizer}).get("lr", 0.0)
            texts.append(
                f"scheduler {name} ({type(scheduler).__name__}) keeps the learning rate under a tenth of its base rate "
                f"through the whole first epoch (it begins at {rate:g}); "
                "if its steps are optimizer steps, write scheduler_step_on_batch=True"
            )
        return texts

    # ------------------------------------------------------------------------------------------------ the state

    def copy_unloaded(self, shared: Mapping[int, Any]) -> Optimization:
        """Return a copy on the same parameters, into which a state may be loaded; what cannot be copied is left out.

        ``shared`` has other objects that the copy shares, by their ids.
        """
        twin = copy.copy(self)
        twin.optimizers = {}
        twin.schedulers = {}
        memo = {**shared}
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A scheduler of a copy sees no optimizer step.
            for name, optimizer in self.optimizers.items():
                copied = memo | {id(parameter): parameter for parameter in optim.parameters_of(optimizer)}
                tensors = [value for _, value in leaves_of(vars(optimizer), "") if isinstance(value, Tensor)]
                # Without parameters, which may be lazy.
                state_tensors = [tensor for tensor in tensors if id(tensor) not in copied]
                if not are_small_and_whole(state_tensors):  # Mostly nothing: the state is made in the first step.
                    copied |= {id(tensor): tensor for tensor in state_tensors}
                with suppress(Exception):
                    twin.optimizers[name] = copy_optimizer(optimizer, copied)
                    memo = copied
            for name, scheduler in self.schedulers.items():
                if id(scheduler.optimizer) in memo:
                    with suppress(Exception):
                        twin.schedulers[name] = copy.deepcopy(scheduler, dict(memo))
        return twin

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group, named as `log` records it."""
        return optim.learning_rates(self.optimizers)

    def state_dict(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
        """Return the entries of a state beside "optimizer", which the engine reads.

        ``parameters`` are those of the module, by their plain names.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        return {
            "scheduler": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
            # Parameters that an optimizer trains outside of the model, a learnt loss weight for instance.
            "outside": {name: optim.parameters_outside(part, module) for name, part in self.optimizers.items()},
            "order": {name: parameter_order(part, names) for name, part in self.optimizers.items()},
        }

    def records(self) -> dict[str, Any]:
        """Return its part of the entry "records"."""
        records: dict[str, Any] = {"grad_norm": self.grad_norm}
        if self.grad_norms:
            records["grad_norms"] = self.grad_norms
        return records

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
        self.check_names(state)
        named = named_parameters(module)
        names = {id(part): name for name, part in named.items()}
        added = {name: added_groups(name, part, state, named) for name, part in self.optimizers.items()}
        optimizers = {
            name: in_present_order(name, part, state, names, strict, added[name])
            for name, part in self.optimizers.items()
        }
        schedulers = {name: state["scheduler"][name] for name in self.schedulers}
        for name, part in self.schedulers.items():
            check_rates("scheduler", schedulers[name], part.state_dict())
            if is_plateau(part) and not keeps_best:
                best = {"mode": part.mode, "mode_worse": part.mode_worse, "best": part.mode_worse, "num_bad_epochs": 0}
                schedulers[name] = {**schedulers[name], **best}
        records = state["records"]
        is_begun = bool(state["progress"]["step"])
        # Then the parameters have the order in memory that they had, and so has each tensor of the state.
        is_ordered = state["module"]["strides"] is not None
        grad_norm = records["grad_norm"]
        grad_norms = dict(records.get("grad_norms", {}))

        def load() -> None:
            for name, part in self.optimizers.items():
                if added[name]:
                    part.param_groups = list(part.param_groups)  # On an error the list from before is put back.
                for group in added[name]:
                    part.add_param_group({**group})
                load_optimizer(name, optimizers[name])
                if not is_ordered:
                    match_layout(part)
                if is_begun:  # Else a scheduler that is stepped before it warns.
                    part._opt_called = True  # type: ignore[attr-defined]
            for name, part in self.schedulers.items():
                grow_lambdas(part)
                part.load_state_dict(with_enums(copy.deepcopy(schedulers[name]), part.state_dict()))
                check_loaded("scheduler", part, schedulers[name])
            self.grad_norm = grad_norm
            self.grad_norms = grad_norms

        return load

    def check_names(self, state: Mapping[str, Any], kinds: Sequence[str] = ("optimizer", "scheduler")) -> None:
        """Refuse a state with other names of optimizers or schedulers."""
        for kind in kinds:
            present = self.optimizers if kind == "optimizer" else self.schedulers
            if set(state[kind]) != set(present):
                raise CheckpointMismatch(
                    f"the state was saved with the {kind}s {sorted(state[kind])}, and this trainer has "
                    f"{sorted(present)}; build the trainer as it was, load only the weights: apply_weights(path), or "
                    "begin a new run from parts of it: start_from=PATH, start_with=('model',), options of "
                    "StateManagerAddon"
                )

    def pair_outside(self, saved: Mapping[str, Any], module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Pair the optimizers' parameters outside of the model with their saved values."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, optimizer in self.optimizers.items():
            present = optim.parameters_outside(optimizer, module)
            values = saved.get(name, [])
            shapes = [tuple(parameter.shape) for parameter in present]
            saved_shapes = [tuple(value.shape) for value in values]
            if shapes != saved_shapes:
                raise CheckpointMismatch(
                    f"optimizer {name} trains parameters outside of the model of shapes {shapes}, and the state has "
                    f"{saved_shapes}; build the trainer as it was"
                )
            pairs += zip(present, values, strict=True)
        return pairs

    # ------------------------------------------------------------------ optimizers with train and evaluation modes

    def begin_training(self) -> None:
        """Put the training weights into the model, where an optimizer has left its evaluation weights there."""
        modes.begin_training(self.optimizers)

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context with the evaluation weights in the model; the training weights are restored bitwise."""
        return modes.evaluation_weights(self.optimizers)


def _objects_in(value: Any) -> dict[str, Any]:
    return {name: entry for name, entry in as_dict(value).items() if not is_factory(entry)}


def _highest(scheduler: Any) -> float:
    """Return the highest learning rate of the groups of a scheduler, as a fraction of their base rates."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    highest = None
    for group in groups:
        rate, base = group.get("lr"), group.get("initial_lr")
        if rate is not None and base:
            fraction = float(rate) / float(base)
            highest = fraction if highest is None else max(highest, fraction)
    return 1.0 if highest is None else highest
