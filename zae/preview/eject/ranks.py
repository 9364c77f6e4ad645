"""The lines of a script that trains on several ranks with DistributedDataParallel, and what it does not cover."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from zae.common import optim
from zae.data.loaders import parts_with_epoch, unwrap_sampler
from zae.preview.eject.script import Script

__all__ = ["main_lines", "why_not", "write_ranks"]

_OF_BOTH = ("eval", "modules", "parameters", "train", "training")
"""Attributes that the wrapper has as the model has them."""


def why_not(script: Script, own: list[Any], others: list[Any]) -> str:
    """Return why the script would not train on ranks as the trainer does, or nothing.

    ``own`` are the user's classes, ``others`` the other add-ons of the layer "parallel".
    """
    trainer, arguments = script.trainer, script.arguments
    model, devices = trainer.unwrap(), trainer.devices
    first = devices[0]
    held = {id(each) for each in model.parameters()}
    each = [one for one in optim.as_dict(trainer.optimization.optimizer).values() if not optim.is_factory(one)]
    on_device = script.resumes and "average" in script.values and first.type != "cpu"
    reasons = {
        f"with {', '.join(c.__name__ for c in others)}": bool(others),
        "with several optimizers": script.several,
        "with num_targets": any("num_targets" in inspect.getsource(c) for c in own),
        "with save_every in steps": bool(script.save_steps),
        "with an average that is resumed on an accelerator": on_device,
        "where no parameter is trained": not any(p.requires_grad for p in model.parameters()),
        "with parameters outside of the model": any(
            id(p) not in held for one in each for group in one.param_groups for p in group["params"]),
        "with sparse gradients": any(getattr(module, "sparse", False) for module in model.modules()),
        f"on {', '.join(map(str, devices))}": first.type not in ("cpu", "cuda") or (
            first.type == "cuda" and len(devices) > 1 and [d.index for d in devices] != [*range(len(devices))]),
        "where a step uses self.model other than by calling it": any(map(_takes_apart, own)),
    }  # fmt: skip
    found = next((reason for reason, holds in reasons.items() if holds), "")
    loader, valid = arguments.get("loader"), arguments.get("valid_loader")
    return found or _why_not_of(loader, True, len(devices)) or _why_not_of(valid, False)


def _why_not_of(loader: Any, training: bool, ranks: int = 1) -> str:
    """Return why a loader cannot be shared by so many ranks of the script, or nothing."""
    if not training and isinstance(loader, Mapping):
        return next(filter(None, (_why_not_of(each, False) for each in loader.values())), "")
    if loader is None:
        return ""
    what = "with a loader" if training else "with a valid_loader"
    batches = getattr(loader, "batch_sampler", None)
    if type(loader) is not DataLoader or batches is None or getattr(loader, "is_sharded", False):
        return f"{what} that is not a DataLoader of batches"
    is_sharded = isinstance(unwrap_sampler(batches.sampler if hasattr(batches, "sampler") else None),
                            DistributedSampler)  # fmt: skip
    if is_sharded:
        return "" if training else f"{what} that has a DistributedSampler"
    if training and type(batches) is not BatchSampler:
        return f"{what} that has a batch_sampler of another class"
    if training and any(not part.startswith(".dataset") for part in parts_with_epoch(loader)):
        return f"{what} whose sampler has set_epoch"
    if training and not batches.drop_last and 0 < len(batches.sampler) % (ranks * batches.batch_size) < ranks:
        return "with a last step of fewer samples than ranks"
    if loader.generator is not None and loader.num_workers:
        return f"{what} that has both a generator and workers"
    return ""


def _takes_apart(own: Any) -> bool:
    """Return whether a class reads ``self.model`` other than to call it, except in steps of evaluation."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(own)))
    fine = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("test_step", "predict_step"):
            fine |= {id(each) for each in ast.walk(node)}
        elif isinstance(node, ast.Call):
            fine.add(id(node.func))
        elif isinstance(node, ast.Attribute) and node.attr in _OF_BOTH:
            fine.add(id(node.value))
    return any(
        isinstance(node, ast.Attribute) and node.attr == "model" and id(node) not in fine
        and isinstance(node.value, ast.Name) and node.value.id == "self" for node in ast.walk(tree)
    )  # fmt: skip


def write_ranks(script: Script, options: Mapping[str, Any]) -> None:
    """Write the lines that share the loaders and wrap the model; ``options`` are those of the wrapper."""
    trainer, arguments = script.trainer, script.arguments
    loader, valid = arguments.get("loader"), arguments.get("valid_loader")
    script.imports |= {"import torch.distributed as dist",
                       "from torch.nn.parallel import DistributedDataParallel"}  # fmt: skip
    if len(trainer.devices) != 2:
        what = "the order in which the gradients of more than two ranks are summed, which rounds differently"
        script.leave_out(what, len(trainer.devices) > 2)
    lines = ["rank = dist.get_rank()"]
    if trainer.seed is not None or len(trainer.devices) > 1:
        script.define("seed_everything")
        lines += ["if rank > 0:  # Each rank draws its own numbers.",
                  "    seed_everything(int(torch.randint(2**62, ())) + rank)"]  # fmt: skip
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(unwrap_sampler(sampler), DistributedSampler):
        for name in ("with_batches", "SharedSteps"):
            script.define(name)
        lines.append("loader = with_batches(loader, SharedSteps(loader.batch_sampler))")
        if not getattr(loader, "drop_last", False):
            script.add("epoch_begin", "factors = loader.batch_sampler.factors()")
            script.loss_of = script.loss_of.replace("{}", "{} * next(factors)")
    lines += _valid_lines(script, valid)
    given = {"device_ids": "[task.device]"} if trainer.device.type != "cpu" else {}
    given |= {name: repr(value) for name, value in options.items() if value}
    if any(True for _ in trainer.unwrap().buffers()):
        parameters = inspect.signature(_ddp()).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        given[name] = "False"
        script.define("send_buffers")
        script.places["before_clip"] = ["send_buffers(model)", *script.places.get("before_clip", [])]
    shown = "".join(f", {name}={value}" for name, value in given.items())
    script.add("model", *lines, f"task.model = replica = DistributedDataParallel(model{shown})")
    script.add("end", "task.model = model")


def _valid_lines(script: Script, valid: Any) -> list[str]:
    """Return the lines that share the loaders of a validation."""
    if valid is None and "loader" in script.arguments:
        return []
    for name in ("with_batches", "SharedBatches"):
        script.define(name)
    each = "with_batches({0}, SharedBatches({0}.batch_sampler))"
    if isinstance(valid, Mapping):
        return [f"valid_loader = {{name: {each.format('each')} for name, each in valid_loader.items()}}"]
    line = f"valid_loader = {each.format('valid_loader')}"
    return [line] if "loader" in script.arguments else ["if valid_loader is not None:", f"    {line}"]


def _ddp() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel


def main_lines(script: Script, function: str) -> list[str]:
    """Return the main part of a script that torchrun starts on each rank."""
    device = script.trainer.device.type
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if script.trainer.backend not in ("auto", "nccl"):
        backend = script.trainer.backend
    begin = [f'dist.init_process_group("{backend}")  # torchrun sets the rank and the number of ranks.']
    if device == "cuda":
        begin = ['torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', *begin]
    return [
        'if __name__ == "__main__":',
        *(f"    {line}" for line in begin),
        f"    task, run = {function}()",
        '    train(task, run.get("n_epoch"), run["loader"], run.get("valid_loader"))',
        "    if dist.get_rank() == 0:",
        '        torch.save(task.model.state_dict(), "model.pt")',
        "    dist.destroy_process_group()",
    ]
