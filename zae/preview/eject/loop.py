"""The functions `train` and `evaluate` of a script: what the core does, around the places that add-ons have filled."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from zae.common import optim
from zae.data.loaders import length_of, parts_with_epoch
from zae.loop.progress import Every
from zae.preview.eject.script import Script, indent, quoted
from zae.preview.eject.states import States
from zae.schedulers.lengths import is_per_step, is_plateau
from zae.schedulers.warmup import takes_total_steps

__all__ = ["Loop"]


class Loop:
    """The loop of a trainer, written as functions; ``arguments`` are those of its ``run``.

    ``steps`` has the keys that ``train_step`` and ``test_step`` return, None where their source does not say, and
    whether they count targets.
    """

    def __init__(self, script: Script, arguments: Mapping[str, Any], steps: Mapping[str, Any]) -> None:
        self.keys, self.test_keys, self.counts = steps["train_step"], steps["test_step"], steps["counts"]
        self.script, self.trainer, self.arguments = script, script.trainer, dict(arguments)
        self.is_several = script.several
        self.valid_every = Every.parse(self.arguments.get("valid_every"), "valid_every", Every(epochs=1))
        self.max_steps = self.arguments.get("max_steps")
        self.in_epoch = self.arguments.get("steps_per_epoch")
        self.has_loss_dict = isinstance(self.trainer.optimization.optimizer, Mapping)
        self.ends_in_epoch = bool(self.max_steps or self.in_epoch)
        self.states = States(script, self.arguments, self._logs_steps)

    @property
    def counts_targets(self) -> bool:
        """Whether the losses of a window are weighed by their targets."""
        return bool(self.script.window) and self.counts and (self.keys is None or "num_targets" in self.keys)

    # ------------------------------------------------------------------------------------------------- training

    def train(self) -> list[str]:
        """Return the function `train`."""
        script = self.script
        first = "first, " if script.resumes else ""
        epochs = f"range({first}n_epoch)"
        if self.arguments and self.arguments.get("n_epoch") is None:
            epochs = f"itertools.count({first[:-2]})"
            script.imports.add("import itertools")
        body = [
            *self._setup(),
            "step = 0",
            *self.states.defined(),
            *self.states.resumed(),
            f"for epoch in {epochs}:",
            *indent(self._epoch()),
            *script.places.get("end", []),
        ]
        return [
            "def train(task, n_epoch, loader, valid_loader=None):",
            *indent(['"""Train for n_epoch epochs."""', *body]),
        ]

    def _setup(self) -> list[str]:
        """Return the lines before the first epoch."""
        script, lines = self.script, list[str]()
        if self.trainer.seed is not None:
            script.define("seed_everything")
            lines.append(f"seed_everything({self.trainer.seed})")
        moved = "" if self.trainer.device.type == "cpu" else ".to(task.device)"
        lines.append(f"model = task.model = task.model{moved}" if moved else "model = task.model")
        lines += script.places.get("model", [])
        lines += [*self._optimizers(), *self._schedulers(), *script.places.get("setup", [])]
        lines += ["done = False"] * self._has_done + ["recent = Means()"] * self._logs_steps
        if self.trainer.history.direction == "max" and "best" in self._text_of("validated"):
            return [*lines, "best = -math.inf"]
        return [*lines, "best = math.inf"] if "best" in self._text_of("validated") else lines

    def _text_of(self, place: str) -> str:
        return "\n".join(self.script.places.get(place, []))

    @property
    def _has_done(self) -> bool:
        return self.ends_in_epoch or "done = " in self._text_of("validated")

    def _optimizers(self) -> list[str]:
        """Return the lines that take the optimizers, or make them."""
        given = self.trainer.optimization.optimizer
        each = optim.as_dict(given)
        if not self.is_several:
            (name,) = each
            place = (
                f"[{quoted(name)}]" if self.has_loss_dict else f"[{name}]" if isinstance(given, (list, tuple)) else ""
            )
            return [f"optimizer = {self._made(each[name], f'task.optimizer{place}')}"]
        if self.has_loss_dict and not any(map(optim.is_factory, each.values())):
            return ["optimizers = task.optimizer"]
        made = []
        for name, one in each.items():
            place = quoted(name) if self.has_loss_dict else name
            made.append(f"{quoted(name)}: {self._made(one, f'task.optimizer[{place}]')},")
        return ["optimizers = {", *indent(made), "}"]

    @staticmethod
    def _made(given: Any, took: str) -> str:
        """Return the expression of an optimizer, called where it is a function that makes one."""
        arguments = {"model": "model", "named_parameters": "model.named_parameters"}
        if not optim.is_factory(given):
            return took
        return f"{took}({arguments.get(optim.argument_of(given), 'model.parameters()')})"

    def _schedulers(self) -> list[str]:
        given = self.trainer.optimization.scheduler
        each = optim.as_dict(given)
        if not each:
            return []
        lines, made = list[str](), []
        if any(optim.is_factory(one) and takes_total_steps(one) for one in each.values()):
            steps = "len(loader)" if not self.script.window else f"-(-len(loader) // ({self.script.window}))"
            steps = f"min({self.in_epoch}, {steps})" if self.in_epoch else steps
            total = f"n_epoch * {steps}"
            lines.append(f"total_steps = {f'min({self.max_steps}, {total})' if self.max_steps else total}")
        for name, one in each.items():
            place = f"[{quoted(name)}]" if isinstance(given, Mapping) else f"[{name}]" if len(each) > 1 else ""
            took = f"task.scheduler{place}"
            whose = "optimizer" if not self.is_several else f"optimizers[{quoted(name)}]"
            if optim.is_factory(one):
                took += f"({whose}, total_steps=total_steps)" if takes_total_steps(one) else f"({whose})"
            made.append((name, took))
        if len(made) == 1:
            return [*lines, f"scheduler = {made[0][1]}"]
        return [*lines, "schedulers = {", *indent([f"{quoted(name)}: {took}," for name, took in made]), "}"]

    def steps_of_schedulers(self, when: str) -> list[str]:
        """Return the lines that step the schedulers of a "batch" or an "epoch"."""
        default = bool(self.trainer.scheduler_step_on_batch)
        each = optim.as_dict(self.trainer.optimization.scheduler)
        due = [name for name, one in each.items()
               if not is_plateau(one) and is_per_step(one, default) == (when == "batch")]  # fmt: skip
        if len(each) == 1:
            return ["scheduler.step()"] * len(due)
        return [f"schedulers[{quoted(name)}].step()" for name in due]

    def _plateaus(self) -> list[str]:
        each = optim.as_dict(self.trainer.optimization.scheduler)
        found = [name for name, one in each.items() if is_plateau(one)]
        names = ["scheduler"] if len(each) == 1 else [f"schedulers[{quoted(name)}]" for name in found]
        return [f"{name}.step(score)" for name in names] if found else []

    def _epoch(self) -> list[str]:
        """Return the lines of an epoch."""
        script, ends = self.script, self._has_done and self._breaks_in_epoch
        script.define("Means")
        lines = ["if not model.training:", "    model.train()", "means = Means()"]
        lines += [f"loader{part}.set_epoch(epoch)" for part in parts_with_epoch(self.arguments.get("loader"))]
        hooks = script.places.get("epoch_begin", [])
        lines += self.states.opened(hooks) if self.states.within_epoch else hooks
        lines += self._batches()
        if ends:
            lines += ["if done and left:", "    break"] if self._counts_left else []
        schedules = [*script.places.get("epoch_schedules", []), *self.steps_of_schedulers("epoch")]
        validation = self._validation()
        both = "metrics = train_metrics" if any("train_metrics" in line for line in validation) else "metrics"
        lines += [f"{both} = {self._result('means')}", *self._logged_epoch(), *schedules, *validation]
        lines += script.places.get("epoch_end", [])
        lines += [*script.on_main(self._printed()), *self.states.saved()]
        lines += ["if done:", "    break"] if self._has_done else []
        return lines

    @property
    def _breaks_in_epoch(self) -> bool:
        return bool(self.ends_in_epoch or self.valid_every.steps)

    @property
    def _counts_left(self) -> bool:
        return bool(self.max_steps) and length_of(self.arguments.get("loader")) is not None

    def _batches(self) -> list[str]:
        """Return the loop over the batches, or windows, of an epoch."""
        script, count = self.script, self.script.window
        if not count:
            batches, left = ("batches", "len(loader) - used") if self.states.within_epoch else ("loader", "len(loader)")
            first = f"for left, batch in zip(reversed(range({left})), {batches}):"
            first = first if self._counts_left else f"for batch in {batches}:"
            return [first, *indent([*self._used("1"), *self._micro_step(), *self._step()])]
        script.imports.add("import itertools")
        if length_of(self.arguments.get("loader")) is None:
            batches = "window"
            head = ["batches = iter(loader)"] * (not self.states.within_epoch) + [
                f"while window := list(itertools.islice(batches, {count})):"
            ]
            inner = ["count = len(window)", *self._used("count")]
        else:
            head = ["batches, left = iter(loader), len(loader)", "while left:"]
            if self.states.within_epoch:
                head[0] = "left = len(loader) - used"
            inner = [f"count = min({count}, left)", "left -= count", *self._used("count")]
            batches = "itertools.islice(batches, count)"
        inner.append(f"for batch in {batches}:" if script.ranks is None
                     else f"for index, batch in enumerate({batches}):")  # fmt: skip
        begin = "outputs, targets = [], []" if self.counts_targets else "outputs = []"
        return [*head, *indent([begin, *inner, *indent(self._micro_step()), *self._step()])]

    def _used(self, count: str) -> list[str]:
        return [f"used += {count}"] * self.states.within_epoch

    def _micro_step(self) -> list[str]:
        """Return the forward and the backward of a batch."""
        script, lines = self.script, list[str]()
        if self.trainer.device.type != "cpu":
            script.define("to_device")
            lines.append("batch = to_device(batch, task.device)")
        if script.window and script.ranks is not None:
            lines.append("replica.require_backward_grad_sync = index == count - 1  # As no_sync().")
        lines += self._called("train_step", self.keys)
        loss = 'out["loss"]'
        if self.counts_targets:
            lines.append('targets.append(float(out["num_targets"]))')
            lines.append('loss = out["loss"] * out["num_targets"] if count > 1 else out["loss"]')
            loss = "loss"
        elif script.window:
            loss += " / count"
        if self.has_loss_dict:
            lines += self._backward_of_several(loss)
        else:
            shown = script.loss_of.format(loss)
            is_one = isinstance(ast.parse(shown, mode="eval").body, (ast.Call, ast.Name, ast.Subscript))
            lines.append(f"{shown}.backward()" if is_one else f"({shown}).backward()")
        keep = "outputs.append((out, {}))" if script.window else ""
        return [*lines, *([keep.format(self._weight(self.keys))] if keep else [])]

    def _backward_of_several(self, loss: str) -> list[str]:
        self.script.define("backward_each")
        shown = self.script.loss_of.format(loss.replace('out["loss"]', "loss"))
        if shown == "loss":
            return ['backward_each(out["loss"], optimizers)']
        return [f'backward_each(out["loss"], optimizers, lambda loss: {shown})']

    def _called(self, step: str, keys: set[str] | None) -> list[str]:
        """Return the call of a step, within the contexts of the add-ons."""
        lines = [f"out = task.{step}(batch)"]
        for context in reversed(self.script.contexts):
            lines = [f"with {context}:", *indent(lines)]
        if keys is None:
            lines += ["if not isinstance(out, dict):", '    out = {"loss": out}']
        return lines

    def _weight(self, keys: set[str] | None) -> str:
        """Return the expression for the weight of a batch in the means of an epoch."""
        if keys is not None and "num_targets" in keys:
            return 'float(out["num_targets"])'
        self.script.define("samples_in")
        if keys is None and self.counts:
            return 'float(out.get("num_targets", samples_in(batch) or 1))'
        return "samples_in(batch) or 1"

    def _step(self) -> list[str]:
        """Return what follows the gradients of a step: clip, guard, optimizers, schedulers, log."""
        script, lines = self.script, list[str]()
        if self.counts_targets:
            lines += [
                "if count > 1:",
                "    for parameter in model.parameters():",
                "        if parameter.grad is not None:",
                "            parameter.grad.div_(sum(targets))",
            ]
        lines += script.places.get("before_clip", [])
        lines += self._clip()
        stepped = [*script.step_lines]
        after = [*script.places.get("after_step", []), *self.steps_of_schedulers("batch")]
        stepped += ["if stepped:", *indent(after)] if script.can_skip and after else [] if script.can_skip else after
        lines += self._guarded(stepped)
        lines += [*script.of_each("optimizer.zero_grad()"), "step += 1"]
        out = f"means.add(out, {'weight' if script.window else self._weight(self.keys)})"
        recorded = [out, out.replace("means", "recent")] if self._logs_steps else [out]
        lines += ["for out, weight in outputs:", *indent(recorded)] if script.window else recorded
        return [*lines, *script.places.get("step_end", []), *self._in_epoch()]

    def _clip(self) -> list[str]:
        """Return the line that clips the gradients, each optimizer's on its own."""
        clip = self.trainer.gradient_clip
        if not clip:
            return []
        self.script.imports.add("from torch import nn")
        most = "float('inf')" if clip == math.inf else repr(clip)
        if not self.is_several:
            return [f"norm = nn.utils.clip_grad_norm_(model.parameters(), {most})"]
        self.script.define("parameters_of")
        each = f"nn.utils.clip_grad_norm_(parameters_of(optimizer, model), {most})"
        return [f"norm = torch.stack([{each} for optimizer in optimizers.values()]).norm()"]

    def _guarded(self, stepped: list[str]) -> list[str]:
        """Return the step, with what ``on_nonfinite`` does."""
        if self.trainer.nonfinite.policy == "warn":
            return stepped
        each = '*losses_in(out["loss"])' if self.has_loss_dict else 'out["loss"]'
        if self.has_loss_dict:
            self.script.define("losses_in")
        if self.script.window:
            each = '*(loss for out, _ in outputs for loss in losses_in(out["loss"]))' if self.has_loss_dict else (
                '*(out["loss"] for out, _ in outputs)')  # fmt: skip
        looked_at = [each, *(["norm"] if self.trainer.gradient_clip and not self.script.can_skip else [])]
        finite = f"all(torch.isfinite(each) for each in [{', '.join(looked_at)}])"
        if looked_at == ['out["loss"]']:
            finite = 'torch.isfinite(out["loss"])'
        if self.trainer.nonfinite.policy == "skip":
            if self.script.ranks is not None:
                self.script.define("of_all_ranks")
                finite = f"all(of_all_ranks(bool({finite})))"
            return [f"if {finite}:", *indent(stepped), *self._else_update()]
        text = 'f"step {step + 1}: the loss or the gradient norm is not finite"'
        return [f"if not {finite}:", f"    raise FloatingPointError({text})", *stepped]

    def _else_update(self) -> list[str]:
        """Return what follows a step that was left out, with a loss scale."""
        return ["else:", "    scaler.update()"] if "scaler" in self.script.objects else []

    def _in_epoch(self) -> list[str]:
        """Return what is done between two steps: log, validate, end."""
        lines, every = list[str](), self.trainer.log_every
        if self._logs_steps:
            written = self.script.on_main(self.script.places["logged"])
            logged = [f"logged, recent = {self._result('recent')}, Means()", *written]
            lines += [f"if step % {every.steps} == 0:", *indent(logged)]
        if self.valid_every.steps:
            lines += [f"if step % {self.valid_every.steps} == 0:", *indent(self._validated())]
        if self.max_steps:
            lines.append(f"done = done or step == {self.max_steps}")
        if self.max_steps or ("done = " in self._text_of("validated") and self.valid_every.steps):
            lines += ["if done:", "    break"]
        if self.in_epoch:
            lines += [f"if step % {self.in_epoch} == 0:", "    break"]
        return [*lines, *self.states.saved_within()]

    @property
    def _logs_steps(self) -> bool:
        """Whether records have the means since the last one."""
        return bool(self.trainer.log_every.steps and self.script.places.get("logged"))

    # ----------------------------------------------------------------------------------------------- validation

    @property
    def _has_validation(self) -> bool:
        return self.arguments.get("valid_loader") is not None or "loader" not in self.arguments

    def _validated(self) -> list[str]:
        """Return the lines of a validation."""
        name = "evaluate_each" if isinstance(self.arguments.get("valid_loader"), Mapping) else "evaluate"
        lines = [f"metrics = {name}(task, valid_loader{self._more})"]
        if self.script.ranks is not None:
            lines = ["task.model = model", *lines, "task.model = replica"]
        written = self.script.on_main(self.script.places.get("valid_logged", []))
        return [*lines, *written, *self._after_validation()]

    def _result(self, means: str) -> str:
        """Return the expression of the means, over all ranks where there are several."""
        if self.script.ranks is None:
            return f"{means}.result()"
        self.script.define("over_ranks")
        return f"over_ranks({means}).result()"

    @property
    def _more(self) -> str:
        return ", average" if any("average" in each for each in self.script.evaluation) else ""

    def _after_validation(self) -> list[str]:
        lines = [*self._plateaus(), *self.script.places.get("validated", [])]
        prefix = "train_metrics" if self.trainer.monitor.startswith(("train_", "train/")) else "metrics"
        bare = self.trainer.monitor.removeprefix("train_").removeprefix("train/")
        bare = bare if prefix == "train_metrics" else bare.removeprefix("valid_").removeprefix("valid/")
        needed = any("score" in line for line in lines)
        return [*([f'score = {prefix}["{bare}"]'] * needed), *lines]

    def _validation(self) -> list[str]:
        """Return what follows the batches of an epoch: validation, or what looks at the training metrics."""
        if not self._has_validation:
            return self._after_validation()
        if self.valid_every.steps:
            return []
        if (self.valid_every.epochs or 1) > 1:
            return [f"if (epoch + 1) % {self.valid_every.epochs} == 0:", *indent(self._validated())]
        if "loader" in self.arguments:
            return self._validated()
        return ["if valid_loader is not None:", *indent(self._validated())]

    def _logged_epoch(self) -> list[str]:
        lines, every = self.script.places.get("logged", []), self.trainer.log_every
        if not lines or every.steps:
            return []
        due = self.script.on_main(["logged = metrics", *lines])
        return due if every.epochs == 1 else [f"if (epoch + 1) % {every.epochs} == 0:", *indent(due)]

    def _printed(self) -> list[str]:
        shown = '", ".join(f"{key} {value:.4f}" for key, value in {text}.items())'
        if not self.trainer.log_bar:
            return []
        return [f'print(f"epoch {{epoch + 1}}:", {shown.replace("{text}", "metrics")})']

    def evaluate(self) -> list[str]:
        """Return the function `evaluate`, and `evaluate_each` where there are several loaders."""
        script = self.script
        for name in ("Means", "apart_from_training"):
            script.define(name)
        step = self._called("test_step", self.test_keys)
        if self.trainer.device.type != "cpu":
            step.insert(0, "batch = to_device(batch, task.device)")
        loop = ["for batch in loader:", *indent([*step, f"means.add(out, {self._weight(self.test_keys)})"])]
        contexts = ["apart_from_training(task.model, loader)", *script.evaluation]
        lines = [
            f"def evaluate(task, loader{self._more}):",
            *indent(['"""Return the means of what test_step returns."""', "means = Means()"]),
            *indent([f"with {', '.join(contexts)}:", *indent(loop), f"return {self._result('means')}"]),
        ]
        if isinstance(self.arguments.get("valid_loader"), Mapping):
            lines += ["", "", *self._evaluate_each()]
        return lines

    def _evaluate_each(self) -> list[str]:
        return [
            f"def evaluate_each(task, loaders{self._more}):",
            '    """Return the means over several loaders, and those of each under its name."""',
            f"    rows = {{name: evaluate(task, loader{self._more}) for name, loader in loaders.items()}}",
            '    each = {f"{name}/{key}": value for name, row in rows.items() for key, value in row.items()}',
            "    common = set.intersection(*(set(row) for row in rows.values()))",
            "    return {**{key: sum(row[key] for row in rows.values()) / len(rows) for key in common}, **each}",
        ]
