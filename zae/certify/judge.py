"""Compare the rows of two runs of a script: where they part, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zae.certify.runs import Attempt, Run

__all__ = [
    "FAILED",
    "NOT_TRIED",
    "PASSED",
    "Judgement",
    "compare_whole",
    "failure",
    "forget_unseeded",
    "judge_kill",
    "last_words",
]

PASSED = "passed"
FAILED = "failed"
NOT_TRIED = "not tried"
"""The verdicts on a promise, and on a run."""


Row = Mapping[str, Any]

_CAUSES = {
    "before": "weights",
    "frozen": "weights",
    "inputs": "samples",
    "shapes": "samples",
    "state before": "optimizer state",
    "hyper": "learning rate",
    "scale": "loss scale",
    "random": "random state",
    "loss": "gradients",
    "gradients": "gradients",
    "skipped": "loss scale",
    "buffers": "buffers",
    "after": "weights",
    "state": "optimizer state",
}
"""What differs in a row, in the order in which it is a cause of what follows, and the word for it."""

_FOLLOWS = ("loss", "gradients", "skipped", "buffers", "after", "state")
_RESULTS = ("before", "after", "buffers", "skipped")  # What a run is about: all else is a way to it.
_LASTING = ("after", "scale", "buffers")  # What the last row of a right run has in common.
_WORDS = {
    "weights": "the weights that it began with are not those that were saved",
    "samples": "other samples, or another order of them: their position or the order of the epoch is not resumed",
    "optimizer state": "the state of the optimizer (its moments) is not that of the run without a kill",
    "learning rate": "a scheduler or an option of the optimizer is not resumed",
    "loss scale": "the loss scale of mixed precision is not resumed",
    "random state": "the same samples, and other random numbers (dropout, noise): the random states are not resumed",
    "gradients": "the same weights, samples and random numbers, and other gradients: something else that the loss or "
    "the accumulation of gradients depends on is not resumed",
    "buffers": "buffers of the model (BatchNorm's running statistics) are not resumed",
}


@dataclass
class Judgement:
    """What was found of one run."""

    verdict: str
    cause: str | None = None
    causes: list[str] = field(default_factory=list)
    step: int | None = None
    message: str = ""
    resumed: int | None = None
    """The step after which a killed run went on."""


def failure(
    cause: str,
    message: str,
    *,
    causes: list[str] | None = None,
    step: int | None = None,
    resumed: int | None = None,
) -> Judgement:
    """Judge a run that fails; its only cause is the first one, where others are not given."""
    return Judgement(FAILED, cause, [cause] if causes is None else causes, step, message, resumed)


def compare_whole(one: Run, other: Run) -> Judgement:
    """Judge whether two runs without a kill are the same."""
    first, second = one.attempts[0], other.attempts[0]
    for rank in first.events:
        a, b = first.rows(rank), second.rows(rank)
        index, keys = _first_difference(a, b)
        told = f" (rank {rank})" if len(first.events) > 1 else ""
        if keys:
            if not _lost_streams(a[index:], b[index:]):
                keys = [key for key in keys if key != "random"]
            step, cause = index + 1, _causes(keys)[0]
            return failure(
                "not repeatable",
                f"two runs differ first in step {step}{told}: {_describe(first, rank, a[index], b[index], keys)}",
                causes=[cause],
                step=step,
            )
        if len(a) != len(b):
            return failure("not repeatable", f"two runs have {len(a)} and {len(b)} steps{told}", causes=[])
        if _ends(first, rank) != _ends(second, rank):
            return failure(
                "not repeatable", f"the weights differ after the last step{told}", causes=["weights"], step=len(a)
            )
    count = len(first.rows())
    return Judgement(PASSED, step=count, message=f"two runs of {count} steps are bitwise the same")


def _first_difference(a: Sequence[Row], b: Sequence[Row]) -> tuple[int, list[str]]:
    """Return the first row in which two whole runs differ, and what differs there."""
    for index, (one, other) in enumerate(zip(a, b)):
        keys = _differing(one, other)
        if set(keys) - {"random"}:
            return index, keys
    return 0, []


def _describe(attempt: Attempt, rank: int, one: Row, other: Row, keys: Sequence[str]) -> str:
    """Say what differs first in a step of two runs that should be the same, and what usually makes it so."""
    if "before" in keys:
        where = _first_part(attempt, rank, one, one.get("parts before", ""), other.get("parts before", ""))
        return f"the weights before it{where}. No seed is set before the model is made, or a file was read that changes"
    if "inputs" in keys or "shapes" in keys:
        return (
            "the samples. Usual causes: a shuffle or a worker without a seed, random.random or numpy in a dataset, the "
            "order of a set or of the files of a folder, the time"
        )
    if "random" in keys:
        return "the random state before it. Something drew before: no seed is set, or a thread draws as well"
    where = _first_part(attempt, rank, one, one["parts"], other["parts"])
    loss = ""
    if one["loss"] != other["loss"]:
        loss = f"the loss ({_text(one['loss'])} and {_text(other['loss'])})"
    what = loss or ("the gradients" if "gradients" in keys else "the update")
    return (
        f"{what}{where}, of the same weights and samples. Usual causes: kernels that are not deterministic "
        "(torch.use_deterministic_algorithms), the time, the hash order of text, threads"
    )


def _first_part(attempt: Attempt, rank: int, row: Row, one: str, other: str) -> str:
    """Name the first parameter whose hash differs."""
    names = _names(attempt, rank, row["o"])
    for index, name in enumerate(names):
        place = slice(4 * index, 4 * index + 4)
        if one[place] != other[place]:
            return f", first in {name}"
    return ""


def _names(attempt: Attempt, rank: int, optimizer: str) -> list[str]:
    return next((each["names"] for each in attempt.all("optimizer", rank) if each["o"] == optimizer), [])


def _differing(one: Row, other: Row, keys: Sequence[str] = tuple(_CAUSES)) -> list[str]:
    """Return what two rows do not have in common; the state before is known of the first row of a process alone."""
    found = [key for key in keys if key in one and key in other and not _is_same(one[key], other[key])]
    if not _sees_inputs(one) and one["loaded"] != other["loaded"]:
        found.append("inputs")
    return found


def _sees_inputs(row: Row) -> bool:
    """Whether the inputs of a model were seen; else the batches of a loader stand for them."""
    return bool(row["inputs seen"])


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; of random streams those that both have are compared."""
    if isinstance(one, dict):
        return all(one[name] == other[name] for name in one.keys() & other.keys())
    return bool(one == other)


def forget_unseeded(reference: Run, other: Run) -> None:
    """Forget the random streams that two equal runs do not have in common: nobody seeds them, and nobody needs them."""
    for rank in reference.attempts[0].events:
        rows, others = reference.attempts[0].rows(rank), other.attempts[0].rows(rank)
        unsteady = {
            name for a, b in zip(rows, others) for name in a["random"] if a["random"][name] != b["random"].get(name)
        }
        for row in rows:
            for name in unsteady:
                row["random"].pop(name, None)


def _causes(keys: Iterable[str]) -> list[str]:
    """Return the causes among what differs; what follows from others is one where there is no other."""
    keys = set(keys)
    roots = [key for key in _CAUSES if key in keys and key not in _FOLLOWS]
    chosen = roots or [key for key in _CAUSES if key in keys][:1]
    return list(dict.fromkeys(_CAUSES[key] for key in chosen))


# --- killed runs


def judge_kill(reference: Run, run: Run) -> Judgement:
    """Judge a run that was killed and started again by the one that was not."""
    whole, killed = reference.attempts[0], run.attempts[0]
    stop = killed.first("kill", run.kill.get("rank", 0))
    if stop is None or len(run.attempts) == 1:
        return Judgement(NOT_TRIED, message="the run ended before its kill")
    if run.kill["kind"] == "worker" and len(killed.rows()) >= len(whole.rows()):
        return Judgement(NOT_TRIED, message="no DataLoader fetched a sample after the step of the kill")
    if run.kill["kind"] == "term" and (killed.is_late or len(killed.rows()) >= len(whole.rows())):
        return Judgement(NOT_TRIED, message="the script goes on after the signal: it handles it and does not end")
    again = run.attempts[1]
    where = _where(run, killed)
    if again.status != 0:
        return _judge_failure(run, again, where)
    if not again.rows():
        return _judge_no_steps(whole, killed, where)
    found = [_judge_rank(whole, killed, again, rank, run, where) for rank in whole.events]
    failed = next((each for each in found if each.verdict == FAILED), None)
    return failed or found[0]


def _where(run: Run, killed: Attempt) -> str:
    """Say where a run was killed."""
    count = len(killed.rows(run.kill.get("rank", 0)))
    if run.kill["kind"] == "save":
        at = run.kill
        how = "in the middle of writing" if at.get("torn") else f"before the {at['op']} of"
        return f"killed in a save after step {count}, {how} {at['name']}"
    how = {"step": "killed", "term": run.kill.get("signal", ""), "worker": "an error in the loader"}[run.kill["kind"]]
    return f"{how} after step {count}"


def _judge_failure(run: Run, again: Attempt, where: str) -> Judgement:
    """Judge a script that failed when it was started again."""
    if again.rows():
        step = len(again.rows())
        return failure(
            "fails after the resume",
            f"{where}; started again it fails after {step} steps: {last_words(again)}",
            causes=[],
            step=step,
        )
    if run.has_saved:
        return failure("cannot load", f"{where}; started again it fails: {last_words(again)}", causes=[])
    return failure(
        "cannot load", f"{where}, with no whole checkpoint yet; started again: {last_words(again)}", causes=[]
    )


def _judge_no_steps(whole: Attempt, killed: Attempt, where: str) -> Judgement:
    """Judge a script that ended at once when it was started again."""
    missing = len(whole.rows()) - len(killed.rows())
    if missing <= 0:
        return Judgement(PASSED, message=f"{where}; nothing was left to do", resumed=len(killed.rows()))
    return failure(
        "skipped work",
        f"{where}; started again it ends without a step, and {missing} are missing",
        step=len(killed.rows()) + 1,
        resumed=len(killed.rows()),
    )


def _judge_rank(whole: Attempt, killed: Attempt, again: Attempt, rank: int, run: Run, where: str) -> Judgement:
    """Judge what one rank did after the resume."""
    expected, made = whole.rows(rank), again.rows(rank)
    if not made:
        return failure("skipped work", f"{where}; rank {rank} makes no step again")
    done = len(killed.rows(rank))
    start = _align(whole, expected, made[0], rank, done)
    told = f" (rank {rank})" if len(whole.events) > 1 else ""
    if start is None:
        return _judge_weights(whole, expected, made[0], rank, where + told)
    if start == 0 and run.has_saved and done:
        return _judge_first_weights(expected, made, where + told, _subject(whole, rank, made[0]["o"]))
    foreign = _find_foreign(expected, made, start)
    if foreign is not None:
        return _judge_weights(whole, expected, foreign, rank, where + told)
    parted, causes, seen = _part(expected, made, start)
    total, count = start + len(made), len(expected)
    if total != count:
        parted = parted if causes else min(len(made), count - start)
        causes.insert(0, "repeated work" if total > count else "skipped work")
    ends = _ends(whole, rank) == _ends(again, rank)
    begun = f"{where}; resumed after step {start}{told}" if start else f"{where}; begun anew{told}"
    if not causes and ends and not start and run.kill["kind"] != "save":
        return Judgement(NOT_TRIED, message=f"{begun}, as no checkpoint was there; the end is the same", resumed=0)
    if not causes and ends:
        notes = f" ({', '.join(seen)} differs, and nothing depends on it)" if seen else ""
        return Judgement(PASSED, message=f"{begun}, the end is bitwise the same{notes}", resumed=start)
    if not causes:
        return failure(
            "weights",
            f"{begun}: each step is the same, and the weights at the end of the script are not (a best or averaged "
            "model that is not resumed?)",
            step=count,
            resumed=start,
        )
    step = start + parted + 1
    also = f"; what differs as well: {', '.join(causes[1:])}" if len(causes) > 1 else ""
    words = _words(causes, expected, made, start, parted, total, count)
    whose = _whose(whole, rank, expected[step - 1]["o"]) if step <= count else ""
    message = f"{begun}, parted at step {step}{f' ({whose})' if whose else ''}: {words}{also}"
    return failure(causes[0], message, causes=causes, step=step, resumed=start)


def _find_foreign(expected: Sequence[Row], made: Sequence[Row], start: int) -> Row | None:
    """Return the first row of an optimizer that began with other weights than it had, though it alone changes them."""
    last = {each["o"]: each["after"] for each in expected[:start]}
    begun = {made[0]["o"]}
    for one, other in zip(expected[start:], made):
        name = other["o"]
        if one["o"] != name:
            return None
        if name not in begun and last.get(name) == one["before"] != other["before"]:
            return other
        begun.add(name)
    return None


def _whose(whole: Attempt, rank: int, optimizer: str) -> str:
    """Name an optimizer among several by its number, in the order of their first steps, and what it trains."""
    all_names = [each["o"] for each in whole.all("optimizer", rank)]
    if len(all_names) == 1:
        return ""
    names = _names(whole, rank, optimizer)
    more = ", ..." if len(names) > 1 else ""
    kind = optimizer.partition("-")[0]
    return f"{kind}, optimizer {all_names.index(optimizer) + 1} of {len(all_names)}, of {names[0]}{more}"


def _subject(whole: Attempt, rank: int, optimizer: str) -> str:
    """Name the weights that an optimizer trains."""
    whose = _whose(whole, rank, optimizer)
    return f"the weights of {whose}," if whose else "its weights"


def _judge_first_weights(expected: Sequence[Row], made: Sequence[Row], where: str, subject: str) -> Judgement:
    """Judge a run that had a checkpoint, and began with the weights of the first step."""
    if len(made) < len(expected):  # It knows what was done: all but the weights is resumed.
        return failure(
            "weights",
            f"{where}; started again {subject} are those before the first step, and it makes the last "
            f"{len(made)} steps with them",
        )
    return failure(
        "does not resume",
        f"{where}; started again it begins with the first step, although a checkpoint was there",
        step=1,
        resumed=0,
    )


def _align(whole: Attempt, expected: Sequence[Row], row: Row, rank: int, done: int) -> int | None:
    """Return how many steps of the reference lie before a row: the weights before it say so."""
    found = [i for i, each in enumerate(expected) if each["o"] == row["o"] and each["before"] == row["before"]]
    if not found:
        return None
    states = _states_before(expected)

    def score(index: int) -> tuple[int, int]:
        each = {**expected[index], "state before": states[index]}
        same = sum(_is_same(each[key], row[key]) for key in ("inputs", "state before", "hyper", "random", "scale"))
        return same, -abs(done - index)

    return max(found, key=score)


def _states_before(rows: Sequence[Row]) -> list[str]:
    """Return the hash of the optimizer's state before each row: that after the last row of the same optimizer."""
    last: dict[str, str] = {}
    found = []
    for row in rows:
        found.append(str(last.get(row["o"], row.get("state before", ""))))
        last[row["o"]] = row["state"]
    return found


def _part(whole: Sequence[Row], made: Sequence[Row], start: int) -> tuple[int, list[str], list[str]]:
    """Return the first row from which on two runs part for good, the causes, and what differs harmlessly."""
    expected, states = whole[start:], _states_before(whole)[start:]
    frozen = {each["o"]: each["frozen"] for each in whole if "frozen" in each}
    first: int | None = None
    causes: list[str] = []
    notes: dict[str, None] = {}
    for index, (one, other) in enumerate(zip(expected, made)):
        keys = _differing({**one, "state before": states[index], "frozen": frozen.get(other["o"])}, other)
        ways = [key for key in keys if key not in ("random", "state", "after")]
        notes.update(dict.fromkeys(_causes(key for key in keys if key not in ("state", "after"))))
        if first is None and (ways or "after" in keys):
            first, causes = index, _rank(keys, whole, made, start, index)
        if any(key in keys for key in _RESULTS):
            return first or 0, causes, []
    last = min(len(expected), len(made)) - 1
    lasting = _differing(expected[last], made[last], _LASTING) if last >= 0 else []
    if lasting:
        return first or 0, causes or _causes(lasting), []
    return 0, [], list(notes)


def _rank(keys: Sequence[str], whole: Sequence[Row], made: Sequence[Row], start: int, index: int) -> list[str]:
    """Return the causes of a difference in a row, the likeliest first."""
    causes = _causes(keys)
    if "random state" not in causes:
        return causes
    row, other = whole[start + index], made[index]
    lost = _lost_streams(whole[start + index :], made[index:])
    if not lost:
        return _causes(key for key in keys if key != "random")
    if "samples" not in causes:
        return causes
    # The order of an epoch that begins here is drawn from the stream, or what the loaded samples are mixed with. Of
    # numpy and of Python no step draws: what draws is what makes the samples.
    before = whole[start + index - 1]["random"] if start + index else {}
    makes_samples = any(name != "torch" and name != "cuda" and before.get(name) != row["random"][name] for name in lost)
    causes.remove("random state")
    is_first = row["shuffled"] or row["loaded"] == other["loaded"] or makes_samples
    causes.insert(0 if is_first else causes.index("samples") + 1, "random state")
    return causes


def _lost_streams(whole: Sequence[Row], made: Sequence[Row]) -> list[str]:
    """Return the random streams that differ, unless nothing draws from them later or they are seeded anew."""
    expected, found = [each["random"] for each in whole], [each["random"] for each in made]
    shared = expected[0].keys() & found[0].keys()
    lost = [name for name in shared if expected[0][name] != found[0][name]]
    if len(expected) > 1:  # Of the last step nobody knows.
        lost = [name for name in lost if _is_drawn_from(expected, found, name)]
    return sorted(lost)


def _is_drawn_from(expected: Sequence[Row], found: Sequence[Row], name: str) -> bool:
    """Whether a stream that differs goes on, and differs still."""
    drawn = next((i for i, each in enumerate(expected) if each.get(name) != expected[0][name]), None)
    if drawn is None:
        return False
    return drawn >= len(found) or found[drawn].get(name) != expected[drawn].get(name)


def _words(
    causes: Sequence[str], expected: Sequence[Row], made: Sequence[Row], start: int, parted: int, total: int, count: int
) -> str:
    """Say in words why two runs part."""
    index, cause = start + parted, causes[0]
    if cause == "random state" and "samples" in causes:
        streams = ", ".join(_lost_streams(expected[index:], made[parted:]))
        return f"the random states are not resumed ({streams}), and the samples or their order are drawn from them"
    if cause == "repeated work":
        return f"{total} steps are made in all, and {count} without a kill: work that was saved is done again"
    if cause == "skipped work":
        return f"{total} steps are made in all, and {count} without a kill"
    if cause == "learning rate" and index < count:
        return f"{_WORDS[cause]} (lr {_text(made[parted]['lr'])}, and {_text(expected[index]['lr'])} without a kill)"
    if cause == "loss scale" and index < count:
        return f"{_WORDS[cause]} ({_text(made[parted]['scale'])}, and {_text(expected[index]['scale'])} without a kill)"
    if cause in ("gradients", "random state") and not _sees_inputs(expected[min(index, count - 1)]):
        return f"{_WORDS[cause]} (the inputs of the model are not seen; the batches of its loader are the same)"
    if cause == "samples":
        seen, usual = made[parted]["inputs seen"], expected[index]["inputs seen"]
        if seen < usual:
            return (
                f"the step sees {seen} inputs, and {usual} without a kill: the gradients of the others are lost. Was "
                "the checkpoint saved between the batches of an accumulated step?"
            )
        same = [i for i, each in enumerate(expected) if each["inputs"] == made[parted]["inputs"]]
        if same and made[parted]["inputs seen"]:
            return f"the batch of step {same[0] + 1} comes again instead of that of step {index + 1}"
        return f"{_WORDS[cause]}; the batch is that of no step"
    return _WORDS[cause]


def _judge_weights(whole: Attempt, expected: Sequence[Row], row: Row, rank: int, where: str) -> Judgement:
    """Judge a resume whose first weights are those of no step: name what is another one."""
    names, own = _names(whole, rank, row["o"]), row.get("parts before", "")
    subject = _subject(whole, rank, row["o"])
    groups = [own[i : i + 4] for i in range(0, len(own), 4)]
    best, lost = 0, list(range(len(groups)))
    first = next((each for each in expected if each["o"] == row["o"]), expected[0])
    candidates = [(0, first.get("parts before", ""))]
    candidates += [(i + 1, each["parts"]) for i, each in enumerate(expected) if each["o"] == row["o"]]
    for index, parts in candidates:
        differs = [i for i, group in enumerate(groups) if parts[4 * i : 4 * i + 4] != group]
        if len(differs) < len(lost):
            best, lost = index, differs
    when = f"after step {best}" if best else "before the first step"
    if not lost:
        words = f"{subject} are those {when}"
    elif len(lost) < len(groups):
        shown = ", ".join(names[i] for i in lost[:4] if i < len(names)) + (", ..." if len(lost) > 4 else "")
        words = f"{subject} are those {when}, but for {shown}"
    else:
        words = f"{subject} are those of no step of the run without a kill"
    return failure("weights", f"{where}; started again, {words}")


def _ends(attempt: Attempt, rank: int) -> Any:
    """Return the hashes of the weights at the end of the process."""
    end = attempt.first("end", rank)
    return None if end is None else end["weights"]


def last_words(attempt: Attempt) -> str:
    """Return the last line that a failed script printed, and its status."""
    lines = [line.strip() for line in attempt.words.splitlines() if line.strip()]
    errors = [each for each in lines if "Error" in each or "Exception" in each]
    own = [each for each in errors if "ChildFailedError" not in each]  # torchrun says with it that a rank has failed.
    error = (own or errors or lines or [""])[-1]
    return f"{error[:300]} (status {attempt.status})"


def _text(values: Any) -> str:
    found = values if isinstance(values, list) else [values]
    return ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in dict.fromkeys(found))
