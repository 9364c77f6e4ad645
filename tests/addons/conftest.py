"""What the tests of add-ons on several ranks share."""

from __future__ import annotations

import pytest

from kit.rank_tasks import outcomes_by_world


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return a function of the number of ranks: what each of the module's CHECKS found there, by name."""
    return outcomes_by_world(request.module.CHECKS, tmp_path_factory)
