"""The lines of a script that save its state, at the end of an epoch and within it, and that continue from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zae.common import optim
from zae.preview.eject.script import Script, indent

__all__ = ["States"]


class States:
    """What a script saves, and how it continues; ``arguments`` are those of ``run``."""

    def __init__(self, script: Script, arguments: Mapping[str, Any], logs_steps: bool) -> None:
        self.script, self.logs_steps = script, logs_steps
        self.schedulers = len(optim.as_dict(script.trainer.optimization.scheduler))
        self.has_norm = bool(script.trainer.gradient_clip)
        self.has_generator = getattr(arguments.get("loader"), "generator", None) is not None

    @property
    def within_epoch(self) -> bool:
        """Whether the state is saved within an epoch too."""
        return bool(self.script.saves and self.script.save_steps)

    def _parts(self) -> tuple[list[str], list[str], list[str]]:
        """Return the variables that a state contains: values, objects with a ``state_dict``, and dicts of these."""
        objects = ["model", *(["optimizer"] if not self.script.several else [])]
        objects += ["scheduler"] if self.schedulers == 1 else []
        dicts = [*(["optimizers"] if self.script.several else []), *(["schedulers"] if self.schedulers > 1 else [])]
        return ["step", *self.script.values], [*objects, *self.script.objects], dicts

    def _entries(self) -> list[str]:
        """Return the lines of the dict of a state."""
        values, objects, dicts = self._parts()
        entries = [f'"{name}": {name}.state_dict(),' for name in objects]
        entries += [f'"{name}": {{name: each.state_dict() for name, each in {name}.items()}},' for name in dicts]
        return entries + [f'"{name}": {name},' for name in values]

    def defined(self) -> list[str]:
        """Return the lines before the first epoch that define the state within one."""
        if not self.within_epoch:
            return []
        recent = ['"recent": recent.sums,'] if self.logs_steps else []
        lines = [*self._entries(), *recent, '"epoch": epoch,', '"random": streams_of(loader),', "**more,"]
        return ["", "def state_of(epoch, **more):", *indent(["return {", *indent(lines), "}"]), ""]

    def saved(self) -> list[str]:
        """Return the lines that save the state at the end of an epoch."""
        script = self.script
        if not script.saves:
            return []
        script.define("save")
        if self.within_epoch:
            return [f"save(state_of(epoch + 1, used=0), {script.saves})"]
        script.define("random_streams")
        streams = "random_streams()"
        if script.ranks is not None:
            script.define("of_all_ranks")
            streams = f"of_all_ranks({streams})"
        entries = [*self._entries(), '"epoch": epoch + 1,', f'"random": {streams},']
        entries += ['"loader": loader.generator.get_state(),'] if self.has_generator else []
        return ["state = {", *indent(entries), "}", *script.on_main([f"save(state, {script.saves})"])]

    def saved_within(self) -> list[str]:
        """Return the lines that save the state after a step."""
        if not self.within_epoch:
            return []
        norm = ", norm=norm" if self.has_norm else ""
        line = f"save(state_of(epoch, used=used, means=means.sums, begin=begin{norm}), {self.script.saves})"
        every = self.script.save_steps
        return [line] if every == 1 else [f"if step % {every} == 0:", f"    {line}"]

    def resumed(self) -> list[str]:
        """Return the lines that load the state of an earlier start of the script."""
        script = self.script
        if not (script.saves and script.resumes):
            return []
        script.imports.add("import os")
        values, objects, dicts = self._parts()
        lines = [f'{name}.load_state_dict(state["{name}"])' for name in objects]
        for name in dicts:
            lines += [f"for name, each in {name}.items():", f'    each.load_state_dict(state["{name}"][name])']
        lines += [f'{name} = state["{name}"]' for name in values]
        lines.append('first = state["epoch"]')
        if self.within_epoch:
            script.define("set_streams_of")
            lines += ['recent.sums = state["recent"]'] if self.logs_steps else []
            lines += ['set_streams_of(loader, state["random"])', 'rest = state if state["used"] else None']
        else:
            script.define("set_random_streams")
            of_rank = "" if script.ranks is None else "[rank]"
            lines.append(f'set_random_streams(state["random"]{of_rank})')
            lines += ['loader.generator.set_state(state["loader"])'] if self.has_generator else []
        load = f"state = torch.load({script.saves}, weights_only=True)"
        begin = "first, rest = 0, None" if self.within_epoch else "first = 0"
        return [begin, f"if os.path.exists({script.saves}):", *indent([load, *lines])]

    def opened(self, hooks: list[str]) -> list[str]:
        """Return the lines that begin an epoch, or continue within it, where the state is saved within one."""
        script = self.script
        for name in ("streams_of", "set_streams_of"):
            script.define(name)
        script.imports.add("import itertools")
        begin = ["begin, used = streams_of(loader), 0"]
        if not script.resumes:
            return [*hooks, *begin, "batches = iter(loader)"]
        continued = ['begin, used, means.sums = rest["begin"], rest["used"], rest["means"]',
                     *(['norm = rest["norm"]'] if self.has_norm else []), "set_streams_of(loader, begin)"]  # fmt: skip
        hooks = ["if rest is None:", *indent(hooks)] if hooks else []
        return [
            *hooks, *begin,
            "if rest is not None:  # Continue within the epoch, after the batches that were used.", *indent(continued),
            "batches = iter(loader)",
            "for _ in range(used):", "    next(batches)",
            "if rest is not None:", *indent(['set_streams_of(loader, rest["random"])', "rest = None"]),
        ]  # fmt: skip
