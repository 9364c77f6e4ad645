"""Of a long table the default run keeps some cells: always the same, and each value in some of them."""

from __future__ import annotations

import itertools

import pytest

from kit.sample import choose

PAIRS = [{"pair": pair} for pair in itertools.combinations("abcdefgh", 2)]
GRID = [{"size": size, "name": name} for size in range(6) for name in ("x", "y", "z")]


@pytest.mark.parametrize("covering", [1, 2, 3])
def test_each_member_of_a_pair_is_in_so_many_cells(covering):
    chosen = [PAIRS[index]["pair"] for index in choose(PAIRS, "seed", covering=covering)]
    counts = [sum(name in pair for pair in chosen) for name in "abcdefgh"]
    assert min(counts) == covering
    assert len(chosen) < len(PAIRS)


def test_each_value_of_each_parameter_is_in_a_cell():
    chosen = [GRID[index] for index in choose(GRID, "seed", covering=1)]
    assert {cell["size"] for cell in chosen} == set(range(6))
    assert {cell["name"] for cell in chosen} == {"x", "y", "z"}
    assert len(chosen) < len(GRID)


def test_the_choice_is_always_the_same_and_differs_from_test_to_test():
    first = choose(PAIRS, "one", count=5)
    assert first == choose(PAIRS, "one", count=5)
    assert first != choose(PAIRS, "other", count=5)
    assert len(first) == 5


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("number", range(5))
def test_the_other_cells_are_marked(number, request):
    marked = [item.get_closest_marker("exhaustive") is not None for item in request.session.items
              if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]  # fmt: skip
    assert (marked.count(False), marked.count(True)) in ((2, 0), (0, 3), (2, 3))  # By default, the rest, and all.
