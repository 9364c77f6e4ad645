"""`Trainer.plan`: what a call of run will do, without a side effect.

Steps and epochs are counted as `zae.loop.run` counts them, and learning rates come from copies of the schedulers on an
optimizer without parameters. No batch is loaded, and no step is made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from zae import random_state
from zae.compose.introspect import is_overridden
from zae.data.gather import why_not
from zae.data.loader_parts import LoaderParts, own_batch_sampler
from zae.data.loaders import batch_size_of, describe, length_of
from zae.data.sharding import shard, shards_of
from zae.data.shards import Ranks
from zae.loop.limits import RunLimits
from zae.loop.progress import NO_LIMIT
from zae.model.copying import deep_copy
from zae.optim import learning_rates
from zae.optim.factories import as_dict, is_factory, make_optimizer, make_scheduler, optimizer_for, takes_model
from zae.optim.optimization import Optimization
from zae.optim.schedule_checks import check_schedules
from zae.plan.page import RunPreview
from zae.schedulers.lengths import is_per_step, is_plateau
from zae.values.walk import copy_of

if TYPE_CHECKING:
    from zae.description import Description
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["Preview", "plan"]

_SHOWN_OTHERWISE = ("option", "optimizer", "trainer", "ranks")  # They are no notes.
_LONGEST = 200_000  # Steps whose learning rates are simulated; longer runs show those of the first ones.


def plan(trainer: Trainer, loader: Iterable[Any], valid_loader: Any, limits: RunLimits) -> RunPreview:
    """Preview what ``run`` would do with these loaders and limits; see `Trainer.plan`."""
    limits.check(type(trainer), loader, valid_loader)
    return Preview(trainer.current_run.new_call(loader, valid_loader, limits)).plan()


class Preview:
    """What a call of `Trainer.run` will do, and what of it would fail; neither the run nor its trainer is changed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer = run.trainer
        self.page = RunPreview(type(self.trainer).__name__, monitor=self.trainer.monitor)

    def plan(self) -> RunPreview:
        """Fill the page; another line of it is a method called here, a field of RunPreview, and one of its rows."""
        page = self.page
        trainer = self.trainer
        run = self.run
        page.batch_size = batch_size_of(run.loader) if trainer.mode == "train" else None
        self.descriptions = trainer.describe()
        self.set_ranks()
        if trainer.mode == "test":
            self.describe_evaluation()
            return page
        trainer.optimization.check_present()
        self.count_steps()
        self.simulate_schedules()
        page.logs_at = page.due(trainer.log_every)
        page.validates_at = [] if run.valid_loader is None else page.due(run.limits.valid_every)
        for name, option in (("should_validate", "valid_every"), ("should_checkpoint", "save_every")):
            if is_overridden(trainer, name):
                page.notes.append(f"{name} is overridden: it decides, and what follows from {option} may differ")
        self.note_descriptions()
        reason = why_not(run.loader) if trainer.loader_position.is_fast else "fast_data=False"
        if reason is not None and hasattr(run.loader, "dataset"):
            page.notes.append(f"batches come from the loader itself, not over the exact data path: {reason}")
        return page

    # ---------------------------------------------------------------------------------------- what add-ons tell

    def descriptions_at(self, *where: str) -> Iterator[Description]:
        """Yield the descriptions of some places, each with its value for this run."""
        for description in self.descriptions:
            if description.where in where:
                yield self.for_this_run(description)

    def for_this_run(self, description: Description) -> Description:
        """Return a description with its value for this run."""
        value = description.value
        return replace(description, value=value(self.page)) if callable(value) else description

    def set_ranks(self) -> None:
        """Set how many processes the run will have, how they divide the work, and how many batches make a step."""
        page = self.page
        for description in self.descriptions_at("ranks"):
            setattr(page, description.name, description.value)
        batches = self.trainer.step_window.batches_of(page.batch_size, page.dp_world_size)
        page.batches_per_step = batches or 1

    def note_descriptions(self) -> None:
        """Note the rest of the descriptions."""
        elsewhere = [description for description in self.descriptions if description.where not in _SHOWN_OTHERWISE]
        for description in map(self.for_this_run, elsewhere):
            if description.value is not None:
                self.page.notes += description.value if isinstance(description.value, list) else [str(description)]

    # ------------------------------------------------------------------------------------------- steps and epochs

    def describe_evaluation(self) -> None:
        """Describe a run in mode "test"."""
        page = self.page
        page.batches_per_epoch = length_of(self.run.loader)
        page.steps_per_epoch = 0
        page.last_step = self.trainer.progress_checker.step
        page.first_step = page.last_step + 1
        page.notes.append("the mode is 'test': the loader is evaluated, and nothing is trained")

    def count_steps(self) -> None:
        """Count steps and epochs as `Run` and the loop do."""
        page = self.page
        run = self.run
        progress = self.trainer.progress_checker
        last_epoch, last_step = run.extent.end_of_call()
        wrapped = self._wrapped_loader()
        in_loader = self.trainer.steps_per_epoch(wrapped)
        in_epoch = run.extent.steps_per_epoch(wrapped)
        page.batches_per_epoch = length_of(wrapped)
        page.steps_per_epoch = in_epoch
        page.first_step = progress.step + 1
        if run.limits.max_time is not None:
            page.notes.append(
                f"may end earlier: after the step in which max_time={run.limits.max_time:g} s have passed"
            )
            if last_epoch == last_step == NO_LIMIT:
                page.last_step = None
                return
        if in_epoch is None:
            page.last_step = None if last_step == NO_LIMIT else max(last_step, progress.step)
            page.notes.append(f"the loader has no length ({describe(run.loader)}): where an epoch ends is not known")
            return
        if run.limits.steps_per_epoch is not None and (in_loader is None or in_epoch < in_loader):
            page.batches_per_epoch = None if in_loader is None else page.batches_per_epoch
        epoch = progress.epoch
        step = progress.step
        done = progress.epoch_step  # Steps of the present epoch that are done.
        if run.cannot_continue_epoch(wrapped):
            epoch += 1
            last_epoch += 1
            done = 0
        while epoch < last_epoch and step < last_step:
            if step + in_epoch - done > last_step:
                step = last_step  # The run ends in the middle of an epoch.
                break
            epoch += 1
            step += in_epoch - done
            done = 0
            page.epoch_ends.append((epoch, step))
        page.last_step = step
        sampler = own_batch_sampler(LoaderParts(run.loader).facts())
        if sampler and len(page.epoch_ends) > 1:
            page.notes.append(
                f"each epoch is counted with the {page.batches_per_epoch} batches that {sampler} has now; it may make "
                "another number of them later"
            )

    def _wrapped_loader(self) -> Any:
        """Return the loader of this rank, or that of the first one where the ranks are still to be started."""
        page = self.page
        if self.run.setup.is_done or page.dp_world_size == 1:
            return self.trainer.wrap_loader(self.run.loader, True)
        shared = shard(self.run.loader, True, Ranks(0, page.dp_world_size, list, bool))
        shards = shards_of(shared)
        page.leaves_out = shards is not None and shards.leaves_out
        return shared

    # -------------------------------------------------------------------------------------------- learning rates

    def simulate_schedules(self) -> None:
        """Step copies of the schedulers as the run will."""
        page = self.page
        run = self.run
        optimization = self.trainer.optimization
        total_steps = run.limits.total_steps(page.steps_per_epoch)
        optimizers, schedulers = _copy_without_parameters(optimization, self.trainer.unwrap(), total_steps)
        on_batch, is_set = optimization.scheduler_step_on_batch, optimization.is_step_explicit
        has_metric = run.valid_loader is not None or self.trainer.history.watches_training
        page.notes += check_schedules(schedulers, on_batch, is_set, *run.extent.spans(page.steps_per_epoch), has_metric)
        stepped = [candidate for candidate in schedulers.values() if not is_plateau(candidate)]
        if len(stepped) < len(schedulers):
            page.notes.append("ReduceLROnPlateau goes by the monitored metric: its cuts are not in the learning rates")
        ends = {step for _, step in page.epoch_ends}
        last = 0 if page.steps is None else page.first_step + min(page.steps, _LONGEST) - 1
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The copies of the schedulers see no optimizer step.
            for step in range(page.first_step, last + 1):
                for name, rate in learning_rates(optimizers).items():
                    page.learning_rates.setdefault(name, []).append(rate)
                for scheduler in stepped:
                    if step in ends or is_per_step(scheduler, on_batch):
                        scheduler.step()
        if page.steps is not None and page.steps > _LONGEST:
            page.notes.append(f"the learning rates are those of the first {_LONGEST} steps")


def _copy_without_parameters(
    optimization: Optimization, module: nn.Module, total_steps: int | None
) -> tuple[dict[str, Optimizer], dict[str, Any]]:
    """Copy the optimizers without their parameters, and the schedulers that change their learning rates.

    Factories are called: with the parameters of this model, and with this number of steps.
    """
    with random_state.isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A scheduler of a copy sees no optimizer step.
        twins: dict[str, Optimizer] = {}
        memo: dict[int, Any] = {}
        for name, entry in as_dict(optimization.optimizer).items():
            optimizer = entry if isinstance(entry, Optimizer) else _made_apart(entry, module)
            twins[name] = _twin(optimizer)
            memo[id(optimizer)] = twins[name]  # A copied scheduler then steps the copy of its optimizer.
        schedulers = {}
        for name, scheduler in as_dict(optimization.scheduler).items():
            if is_factory(scheduler):
                schedulers[name] = make_scheduler(scheduler, optimizer_for(twins, name), total_steps)
            else:
                schedulers[name] = copy.deepcopy(scheduler, dict(memo))
        return twins, schedulers


def _made_apart(factory: Any, module: nn.Module) -> Any:
    """Return the optimizer of a factory for copies of a model's parameters: its steps leave the model as it is."""
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        is_lazy = nn.parameter.is_lazy(parameter)
        copies[id(parameter)] = parameter if is_lazy else nn.Parameter(parameter.detach(), parameter.requires_grad)
    if takes_model(factory):
        return make_optimizer(factory, deep_copy(module, copies))
    return factory([*copies.values()])


def _twin(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups and settings, and one number for the parameters of each type."""
    twin = SGD([torch.zeros(1)], lr=0.0)
    twin.defaults = dict(optimizer.defaults)
    twin.param_groups = []
    for group in optimizer.param_groups:
        settings = {name: copy_of(value) for name, value in group.items() if name != "params"}
        dtypes = {parameter.dtype for parameter in group["params"]}
        twin.param_groups.append({"params": [torch.zeros(1, dtype=dtype) for dtype in dtypes], **settings})
    return twin
