"""Every guarantee of docs/explanation/reliability.md has tests, and the command of that page runs them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")

PROMISES = {
    "A run can be killed at any instant": (
        "test_killed_at_every_operation_of_a_save",
        "test_killed_after_every_update",
        "test_a_script_killed_anywhere_ends_as_if_it_was_not",
        "test_power_loss_leaves_the_old_or_the_new",
        "test_every_add_on_resumes_bitwise",
    ),
    "Damage is detected": (
        "test_nothing_is_changed_by_what_is_damaged",
        "test_any_file_cut_means_the_one_before",
        "test_what_does_not_read_back_removes_nothing",
        "test_no_file_of_a_checkpoint_runs_code",
        "test_text_of_a_checkpoint_is_not_believed",
    ),
    "A resume reads each byte once": ("test_resume_reads_each_byte_once", "test_resume_holds_each_byte_once"),
    "A sharded model is saved without gathering it": (
        "test_each_rank_writes_its_parts",
        "test_two_ranks_are_resumed_by_any_number",
        "test_a_disk_that_refuses_is_reported_by_all_ranks",
        "test_a_flipped_byte_in_any_file_is_refused",
    ),
    "`python -m zae consolidate PATH OUT`": ("test_doctor_and_consolidate",),
    "SIGTERM, SIGUSR1, SIGHUP, Ctrl-C": (
        "test_finish_the_step_and_save",
        "test_a_second_signal_ends_at_once",
        "test_a_validation_is_given_up_and_made_first",
        "test_handlers_that_were_there",
        "test_the_status_that_a_shell_sees",
    ),
    "An exception": ("test_an_exception_saves_apart", "test_out_of_memory_says_what_was_computed"),
    "A NaN or infinite loss": (
        "test_raise_before_the_step",
        "test_skip_leaves_the_step_out",
        "test_warn_takes_the_step_and_never_saves_it",
        "test_the_late_look_of_an_accelerator",
    ),
    "A write error": (
        "test_a_disk_that_refuses_from_any_operation_on",
        "test_on_save_error_warn_trains_on",
        "test_a_real_disk_that_is_full",
    ),
    "`save_async=True`": (
        "test_an_async_save_is_committed_by_the_same_rules",
        "test_an_async_save_that_fails_surfaces_at_the_next_step",
    ),
    "A folder belongs to one run at a time": ("test_a_second_run_is_refused", "test_a_stale_lock_is_taken_over"),
}
"""What the page guarantees, by the first words of its items, and some of the tests that would fail without it."""


def files_of_tests() -> dict[str, Path]:
    """Map each test to its file."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = path
    return found


def test_each_guarantee_has_its_tests() -> None:
    guaranteed = PAGE.partition("## What is guaranteed")[2].partition("\n## ")[0]
    leads = re.findall(r"^- \*\*(.*?)[.:]?\*\*", guaranteed, re.M | re.S)
    assert leads == [*PROMISES]
    known = files_of_tests()
    assert [name for names in PROMISES.values() for name in names if name not in known] == []


def test_the_command_of_the_page_runs_them() -> None:
    """At least one of each guarantee has one of its words in its name or in that of its file."""
    command = re.search(r'python -m pytest -k "(.*?)"', PAGE, re.S)[1]  # type: ignore[index]
    words, known = re.sub(r"\s+", " ", command).split(" or "), files_of_tests()
    for promise, names in PROMISES.items():
        assert any(word in f"{known[name].name} {name}" for name in names for word in words), promise
    assert len([name for name, path in known.items() if any(word in f"{path.name} {name}" for word in words)]) > 100
