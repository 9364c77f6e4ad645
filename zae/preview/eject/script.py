"""The script that `eject` writes: a loop of plain PyTorch with places, which the add-ons of a trainer fill."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.preview.eject import helpers

__all__ = ["Script", "indent", "quoted"]


def quoted(text: object) -> str:
    """Return text as a literal, with double quotes where it has none itself."""
    return f'"{text}"' if str(text).isprintable() and not {'"', "\\"} & {*str(text)} else repr(str(text))


def indent(lines: list[str], depth: int = 1) -> list[str]:
    """Indent lines of code."""
    return [f"{'    ' * depth}{line}" if line else line for line in lines]


@dataclass
class Script:
    """A training script, which an add-on's ``eject_lines`` adds its part to.

    Lines of a place are code without indentation; in them ``task`` has the steps, and ``model``, ``loader``, ``step``
    and ``epoch`` (from 0) are what their names say.

    Attributes
    ----------
    trainer : Trainer
        What is written.
    several : bool
        Whether there are several optimizers: ``optimizers`` is then a dict, else there is ``optimizer``.
    places : dict of str to list of str
        Lines at "model" (the model is on its device), "setup" (once, before the first epoch), "epoch_begin",
        "before_clip" (the gradients of a step are complete), "after_step" (the optimizers have stepped), "step_end",
        "epoch_schedules" (before the schedulers of an epoch), "validated" (``metrics`` has the means of the
        validation; without one, those of the epoch), "epoch_end" and "end".
    contexts : list of str
        Expressions of context managers around ``train_step`` and ``test_step``, outermost first.
    evaluation : list of str
        Expressions of context managers around an evaluation, outermost first.
    step_lines : list of str
        What steps the optimizer.
    loss_of : str
        A format for the loss that is differentiated, ``"{}"`` by default.
    can_skip : bool
        Whether ``step_lines`` set ``stepped`` to False where a step was left out.
    window : str
        The number of batches in a step, as an expression; empty for one.
    imports : set of str
        Lines of imports.
    values, objects : list of str
        Variables that a saved state contains: values as they are, objects by their ``state_dict``.
    saves : str
        The literal of the file of the state that is saved at the end of each epoch; empty where none is.
    resumes : bool
        Whether the script continues from that file where it exists.
    save_steps : int
        After how many steps the state is saved within an epoch too; 0 for never.
    arguments : dict of str to object
        The arguments of ``run``; empty where they are not known.
    engine : str
        The add-on that trains on several ranks; empty for none.
    ranks : dict of str to object, optional
        The options of DistributedDataParallel where the script trains on several ranks; ``rank`` is then the number
        of this one. None for one process.

    Examples
    --------
    >>> from zae import AddOnBase
    >>> class SignAddon(AddOnBase):
    ...     "Step by the sign of the gradient."
    ...     layer = "loop"
    ...     def unscale(self):
    ...         super().unscale()
    ...         for parameter in self.parameters:
    ...             parameter.grad.sign_()
    ...     def eject_lines(self, script):
    ...         super().eject_lines(script)
    ...         script.add("before_clip", "for parameter in model.parameters():", "    parameter.grad.sign_()")
    """

    trainer: Any
    several: bool = False
    places: dict[str, list[str]] = field(default_factory=dict)
    contexts: list[str] = field(default_factory=list)
    evaluation: list[str] = field(default_factory=list)
    step_lines: list[str] = field(default_factory=list)
    loss_of: str = "{}"
    can_skip: bool = False
    window: str = ""
    imports: set[str] = field(default_factory=set)
    helpers: dict[str, str] = field(default_factory=dict)
    missing: list[tuple[str, bool]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    saves: str = ""
    resumes: bool = False
    save_steps: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)
    engine: str = ""
    ranks: dict[str, Any] | None = None

    def add(self, place: str, *lines: str) -> None:
        """Add lines to a place, after those that are there.

        Parameters
        ----------
        place : str
            One of `places`.
        *lines : str
            Code, without the indentation of the place.
        """
        self.places.setdefault(place, []).extend(lines)

    def of_each(self, *lines: str) -> list[str]:
        """Return lines with ``optimizer`` in them, in a loop over the optimizers where there are several."""
        return ["for optimizer in optimizers.values():", *indent([*lines])] if self.several else [*lines]

    def define(self, name: str) -> None:
        """Take a function of `zae.preview.eject.helpers` into the script, with those that it calls.

        Parameters
        ----------
        name : str
            Its name.
        """
        if name not in self.helpers:
            self.helpers[name] = ""  # Its place, before those that it calls.
            text, imports, others = helpers.source_of(name)
            self.imports |= imports
            for other in others:
                self.define(other)
            del self.helpers[name]
            self.helpers[name] = text

    def on_main(self, lines: list[str]) -> list[str]:
        """Return lines that one rank alone executes, where there are several.

        Parameters
        ----------
        lines : list of str
            Code.

        Returns
        -------
        list of str
            The code, under a condition where the script trains on several ranks.
        """
        return lines if self.ranks is None or not lines else ["if rank == 0:", *indent(lines)]

    @property
    def torchrun(self) -> str:
        """The beginning of the command that starts the script on several ranks."""
        count = len(self.trainer.devices)
        return f"torchrun --nproc_per_node {count if count > 1 else 'N'}"

    def leave_out(self, what: str, changes_weights: bool = True) -> None:
        """Name what the script does not do, in the text at its top.

        Parameters
        ----------
        what : str
            A sentence.
        changes_weights : bool
            Whether the weights differ without it.
        """
        self.missing.append((what, changes_weights))

    def save_to(self, path: Path, resumes: bool, save_steps: int = 0) -> None:
        """Save the state at the end of each epoch, in a file that plain torch reads.

        Parameters
        ----------
        path : Path
            The file.
        resumes : bool
            Whether the script continues from the file where it exists.
        save_steps : int
            After how many steps to save it within an epoch too; 0 for never.
        """
        self.saves, self.resumes, self.save_steps = self.path(path), resumes, save_steps
        within = "" if save_steps else "within an epoch and "
        when = f"{save_steps} steps, and after an epoch" if save_steps else "whole epoch"
        what = f"checkpoints {within}of the best epoch, hashes, and the save at a signal"
        self.leave_out(f"{what}: {self.saves[1:-1]} has the state after the last {when}", False)

    @staticmethod
    def path(path: Path) -> str:
        """Return a path as a literal of a script: relative to the present folder where it lies there.

        Parameters
        ----------
        path : Path
            A file.

        Returns
        -------
        str
            The literal.
        """
        whole, here = path.absolute(), Path.cwd()
        return quoted(whole.relative_to(here) if whole.is_relative_to(here) else whole)

    def heading(self, name: str, origin: str) -> str:
        """Return the text at the top of the script."""
        paragraphs = [f"The training loop of {name}{origin} in plain PyTorch, written by zae."]
        for changes, begin in ((True, "Not written, so that the weights differ: "), (False, "Left out: ")):
            found = [what for what, each in self.missing if each == changes]
            if found:
                paragraphs.append(begin + "; ".join(found) + ".")
        if self.ranks is not None:
            paragraphs.append(f"It trains on several ranks: start it with {self.torchrun}.")
        text = "\n\n".join(textwrap.fill(each, 114) for each in paragraphs)
        return f'"""{text}' + ("\n" if "\n" in text else "") + '"""'
