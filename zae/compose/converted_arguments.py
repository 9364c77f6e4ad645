"""What the arguments of another trainer become here: add-ons, options, and a report of what has no effect."""

from __future__ import annotations

from typing import Any

from zae.compose.composition import load_installed
from zae.compose.introspect import add_ons_of

__all__ = ["ConvertedArgumentsBase", "Report"]


class Report(dict[str, str]):
    """Why arguments have no effect, by their names; it prints as one line for each."""

    def __str__(self) -> str:
        return "\n".join(self.values()) or "every argument has an effect, or its default"


class ConvertedArgumentsBase:
    """The base of what a ``from_arguments`` returns.

    Attributes
    ----------
    add_ons : list of type
        For ``Task.add_on(*add_ons)``.
    options : dict
        For the constructor.
    run : dict
        For ``trainer.run(...)``, beside the loaders.
    report : Report
        The arguments that have no effect, or less than in the other library.
    """

    def __init__(self) -> None:
        self.add_ons: list[Any] = []
        self.options: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.report = Report()

    def add_on(self, name: str, **options: Any) -> None:
        """Add an add-on by its name."""
        self.add_ons.append(load_installed(name))
        self.options.update(options)

    def missing(self, cls: Any) -> list[Any]:
        """Return the add-ons that a class does not have."""
        return [add_on for add_on in self.add_ons if add_on not in add_ons_of(cls)]

    def __repr__(self) -> str:
        names = ", ".join(add_on.__name__ for add_on in self.add_ons)
        return f"ConvertedArguments(add_ons=[{names}], options={self.options}, run={self.run})\n{self.report}"
