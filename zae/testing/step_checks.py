"""Checks of the steps of a run: what an add-on does to gradients, batches, metrics, modes and random streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zae.testing import watch
from zae.testing.kit import CLIP, Kit, build_optimizer, in_new_folder

__all__ = [
    "check_batch",
    "check_clip",
    "check_evaluation",
    "check_frozen",
    "check_graph",
    "check_loader",
    "check_metrics",
    "check_mode",
    "check_neutral",
    "check_random",
    "check_scheduler",
    "check_transfer",
]

_OBSERVING = ("observe", "state")
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_clip(kit: Kit) -> Iterator[str]:
    """Find gradients larger than ``gradient_clip`` that reach the optimizer."""
    norms = kit.clipped_run.notes.norms
    largest = max((norm for norm in norms if norm == norm and norm != float("inf")), default=0.0)
    if largest > CLIP * 1.001:
        yield (
            f"drops clipping: with gradient_clip={CLIP}, a gradient of norm {largest:.3g} reached the optimizer; call "
            "super().clip(), and change gradients before it (in clip or unscale), not after"
        )


def check_scheduler(kit: Kit) -> Iterator[str]:
    """Find a scheduler that is not stepped once for each optimizer step, or once for each epoch."""
    for trainer, unit in ((kit.standard.trainer, "optimizer steps"), (kit.clipped_run, "epochs")):
        progress, taken = trainer.progress_checker, trainer.schedulers["0"].last_epoch
        due = progress.step - progress.skipped_steps if unit == "optimizer steps" else progress.epoch
        if unit == "optimizer steps" and not due:  # It may be hidden that steps took place.
            due = trainer.notes.steps
        if taken != due:
            yield (
                f"steps the scheduler {taken} times in {due} {unit}; leave it to scheduler_step, and call "
                "super().scheduler_step(when) once"
            )
            return


def check_batch(kit: Kit) -> Iterator[str]:
    """Find batches of the user that are changed."""
    run = kit.standard
    for label, before, now in (("batches", kit.data(), run.data), ("valid_batches", kit.valid_data(), run.valid)):
        found = watch.difference(before, now, label)
        if found is not None:
            yield f"mutates the batch: {found} is not what the loader gave; change a copy, in to_device"
            return


def check_loader(kit: Kit) -> Iterator[str]:
    """Find an observer that iterates over the loader itself."""
    more, usual = kit.standard.passes, kit.bare.passes
    if kit.add_on.layer in (*_OBSERVING, "control") and more > usual:
        yield (
            f"consumes the loader: it is iterated over {more} times in 2 epochs, and {usual} times without the add-on, "
            "so a generator would have no batches left; look at each batch as it passes, in to_device or batches"
        )


def check_mode(kit: Kit) -> Iterator[str]:
    """Find steps that run with the model in the wrong mode."""
    trainer = kit.standard.trainer
    for step, training in dict.fromkeys(trainer.notes.modes):
        if training != (step == "train_step"):
            yield (
                f"changes model.training: it is {training} inside {step}; put it back where you change it (in a "
                "context: try, yield, finally)"
            )
    if not trainer.unwrap().training:
        yield "changes model.training: it is False after a run in mode 'train'; put it back where you change it"


def check_evaluation(kit: Kit) -> Iterator[str]:
    """Find a validation that leaves other weights in the model."""
    found = kit.standard.trainer.notes.disturbed
    if found is not None:
        yield (
            f"leaves other weights in the model after a validation: {found} is not what it was; put them back in the "
            "finally of evaluation_context()"
        )


def check_metrics(kit: Kit) -> Iterator[str]:
    """Find metrics of the user that do not arrive in the history or in the log."""
    bare, watched = kit.bare.trainer, kit.standard.trainer
    for label in ("train_history", "valid_history", "log_history"):
        wanted = {key: None for row in getattr(bare, label) for key in row if key.startswith(("train", "valid"))}
        present = {key for row in getattr(watched, label) for key in row}
        lost = [key for key in wanted if key not in present]
        if lost:
            yield (
                f"drops the user's metrics: {', '.join(lost)} are not in {label}; keep what the inner method gives: "
                "return {**super().metric_on_epoch_end(), ...}, and in train_step, logging and log likewise"
            )
            return


def check_frozen(kit: Kit) -> Iterator[str]:
    """Find an add-on that thaws, in the first epoch, what the user has frozen."""
    found: list[str] = []
    model = kit.build_model()
    if kit.model is None:  # The places of the layers stay as they are in all other checks.
        model[1] = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())  # type: ignore[operator]
    frozen, still = _freeze(model)
    trainer = kit.make(model=model, optimizer=build_optimizer(model.parameters()))

    def look() -> None:
        found.extend(f"parameter {name!r} requires a gradient" for name, p in frozen if p.requires_grad)
        found.extend(f"module {name!r} is in training mode" for name, module in still if module.training)

    trainer.notes.watched = look
    before = watch.snapshot(model)
    with in_new_folder(), contextlib.suppress(Exception):  # Some add-ons refuse a frozen layer.
        kit.run(trainer, 1)
    now = watch.snapshot(model)
    kept = [name for name, _ in frozen] + [k for k in before for n, _ in still if k.startswith(f"{n}.")]
    found += [f"{n!r} has another value after the run" for n in kept if not torch.equal(before[n], now[n])]
    look()
    if found:
        yield (
            f"unfreezes what the user froze: {found[0]}; remember requires_grad and training of each before you "
            "change them, and put those back (where thawing is the purpose: allow=['frozen'])"
        )


def _freeze(model: nn.Module) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Freeze the normalization layers of a model, or one parameter where there are none; return what is frozen."""
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _NORMS)]
    frozen: list[tuple[str, Any]] = [(f"{n}.{key}", p) for n, module in norms for key, p in module.named_parameters()]
    if not frozen:
        frozen = list(model.named_parameters())[1:2]
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    for _, module in norms:
        module.eval()
    return frozen, norms


def check_graph(kit: Kit) -> Iterator[str]:
    """Find tensors that hold the graph of a step, and tensors that are kept of every step."""
    trainer = kit.standard.trainer
    bare = vars(kit.bare.trainer).keys()
    for name, value in vars(trainer).items():
        where = None if name in bare - {"log_history"} else watch.graph_in(value, f"self.{name}")
        if where is not None:
            yield f"keeps a tensor with its graph: {where}, so no step's memory is freed; keep tensor.detach()"
            return
    data, counts = kit.data(), []
    for batches in (data, [*data, *data]):
        with in_new_folder():
            trainer = kit.run(kit.make(), 1, batches, valid=False)
        counts.append({name: watch.tensors_in(value) for name, value in vars(trainer).items() if name not in bare})
    for name, count in counts[1].items():
        if count - counts[0].get(name, 0) >= len(data):
            yield (
                f"keeps tensors of every step: self.{name} holds {counts[0].get(name, 0)} after {len(data)} steps and "
                f"{count} after {2 * len(data)}; keep a running value, or empty it at the end of an epoch"
            )


def check_random(kit: Kit) -> Iterator[str]:
    """Find draws from training's random streams."""
    trainer, drawn = kit.make(), list[str]()
    before: dict[str, Any] = {}

    def look(name: str) -> None:
        now = watch.streams()
        drawn.extend(f"{name} draws from the global random stream {k!r}" for k in now if before[k] != now[k])
        before.update(now)

    torch.manual_seed(7)
    before.update(watch.streams())
    hooks = {code: name for code, name in kit.own_hooks.items() if name not in ("launch", "gradients")}
    with watch.Calls(hooks, look):
        trainer.run(2, kit.data(), kit.data()[:2], valid_every=2)
    if not drawn:  # By a hook of the model, or in another method of the add-on.
        usual, now = kit.bare.streams, kit.standard.streams
        drawn = [f"a run ends with another state of the stream {k!r}" for k in now if now[k] != usual[k]]
    for each in drawn[:1]:
        yield (
            f"{each}, and so changes training; draw from self.generator(name), or inside "
            "zae.common.random_state.isolated()"
        )


def check_transfer(kit: Kit) -> Iterator[str]:
    """Find values that are read from the device at every step."""
    trainer = kit.make()
    with watch.Transfers(set(kit.own_codes)) as transfers:
        kit.run(trainer, valid=False)
    steps = trainer.progress_checker.step
    if len(transfers.found) >= steps:
        places = ", ".join(dict.fromkeys(transfers.found))
        yield (
            f"synchronises at each step: it reads a tensor's value {len(transfers.found)} times in {steps} steps "
            f"({places}); keep tensors on their device, detached, and read them in log() or at the end of an epoch"
        )


def check_neutral(kit: Kit) -> Iterator[str]:
    """Find an observer, or an add-on that keeps state, that changes training."""
    if kit.add_on.layer not in _OBSERVING:
        return
    for part, found in list(watch.differing_parts(kit.bare.trainer, kit.standard.trainer, may_add=True))[:1]:
        yield (
            f"is in layer {kit.add_on.layer!r} and changes training: the {part} ends as another than without it "
            f"({found}); only look at what there is, or move to the layer 'loop'"
        )
