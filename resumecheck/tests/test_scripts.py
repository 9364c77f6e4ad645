"""Scripts of users, with several trainers: the verdict is that of the comparison by hand in test_by_hand.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import CASES, SCRIPTS, TORCHRUN
from resumecheck import Options, Refused, check
from resumecheck.report import as_text


@pytest.mark.exhaustive
@pytest.mark.parametrize("all_instants", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_that_by_hand(
    name: str, all_instants: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each instant after a save, or within one, where only that shows the fault."""
    case = CASES[name]
    command = case.command(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = Options(resume_with=" ".join(case.resume_with), all_instants=all_instants)
    result = check(command, options)
    kind = "save" if case.in_save else "step"
    causes = [result.whole.cause] if result.whole is not None else result.causes(kind)
    assert causes == ([case.cause] if case.cause else []), as_text(result)
    assert result.tried or result.whole


@pytest.mark.exhaustive
def test_the_error_of_a_rank_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of torchrun, which says that a rank has failed."""
    text = SCRIPTS.joinpath("with_ddp.py").read_text()
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text.replace("DistributedSampler(dataset)", "DistributedSampler(dataset, rank=5)"))
    with pytest.raises(Refused, match="ValueError: Invalid rank 5"):
        check([*TORCHRUN, "train.py"])
