"""The ranks on which the engines are tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kit.ranks import Crew


@pytest.fixture(scope="package")
def crews() -> Iterator[Callable[[int], Crew]]:
    """Return a function that returns so many ranks, which stay until one of them fails."""
    made: dict[int, Crew] = {}

    def crew(world: int) -> Crew:
        if world not in made or not made[world].alive:
            made[world] = Crew(world, timeout=75)
        return made[world]

    yield crew
    for each in made.values():
        each.end()
