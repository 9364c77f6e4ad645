"""Compare the steps of a resumed run with those of the reference: where they part, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAILED", "NOT_JUDGED", "PASSED", "Judgement", "Resume", "fail", "first_difference", "judge"]

PASSED, FAILED, NOT_JUDGED = "passed", "failed", "not judged"
_MIN_STEPS_WITHOUT_EFFECT = 2  # So many equal results after a difference say that nothing depends on it.
_LENGTH = 8  # Digits of the hash of one tensor.

Row = Mapping[str, Any]

_CAUSES = {
    "before": "weights",
    "words_before": "weights",
    "frozen": "weights",
    "inputs": "samples",
    "shapes": "samples",
    "state_before": "optimizer state",
    "options": "learning rate",
    "scale": "loss scale",
    "random": "random state",
    "skipped": "loss scale",
    "loss": "gradients",
    "buffers": "buffers",
    "after": "gradients",
}
"""What differs in a row, in the order in which it is a cause of what follows, and the word for it."""
_FOLLOWS = ("loss", "skipped", "buffers", "after")
_OF_BATCHES = ("inputs", "shapes", "loss")
_RESULTS = ("before", "words_before", "after", "buffers", "skipped")  # What a run is about: all else is a way to it.


@dataclass
class Judgement:
    """What was found of one instant."""

    verdict: str
    message: str
    causes: list[str] = field(default_factory=list)
    step: int | None = None
    """The first step that differs."""
    resumed: int | None = None
    """The step after which the run went on."""
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """The files of tensors that differ at the end, though all steps are the same."""

    @property
    def cause(self) -> str:
        """The first cause, or nothing."""
        return self.causes[0] if self.causes else ""


@dataclass
class Resume:
    """A run that was started again, and what is known of the instant in which it was."""

    rows: Mapping[int, Sequence[Row]]
    lowest: int
    """The step of the last save that was whole."""
    done: int
    """The steps that were made before the kill."""
    is_to_end: bool
    has_whole_save: bool
    saved: Collection[int]
    """The steps of the saves, if what is left may be of two of them: the kill fell into one."""


def fail(cause: str, message: str, step: int | None = None, resumed: int | None = None) -> Judgement:
    """Judge an instant that fails, with one cause."""
    return Judgement(FAILED, message, [cause], step, resumed)


def judge(reference: Mapping[int, Sequence[Row]], resume: Resume, names: Mapping[str, Sequence[str]]) -> Judgement:
    """Judge all ranks; return the first that fails, else the first."""
    judgements = []
    for rank, expected in sorted(reference.items()):
        judgement = _Comparison(expected, resume.rows.get(rank, []), resume, names).judge()
        if len(reference) > 1 and judgement.verdict == FAILED:
            judgement.message += f" (rank {rank})"
        judgements.append(judgement)
    return next((judgement for judgement in judgements if judgement.verdict == FAILED), judgements[0])


def first_difference(one: Sequence[Row], other: Sequence[Row]) -> tuple[int, str] | None:
    """Return the first row in which two runs from the beginning differ, and the cause."""
    for index, (a, b) in enumerate(zip(one, other)):
        keys = [key for key in _differing(a, b) if key != "random"]
        if keys:
            return index, _causes_of(keys)[0]
    return None


class _Comparison:
    """The rows of a rank of the reference, and those after a resume."""

    def __init__(
        self, expected: Sequence[Row], made: Sequence[Row], resume: Resume, names: Mapping[str, Sequence[str]]
    ) -> None:
        self.expected, self.made, self.resume, self.names = expected, made, resume, names
        self.count = len(expected)
        self.start = 0
        """How many steps of the reference lie before the first row."""
        self.rest = expected
        """The rows of the reference after these."""

    def judge(self) -> Judgement:
        """Find where the run goes on in the reference, and whether it goes on as that."""
        resume = self.resume
        if not self.made:
            missing = self.count - resume.done
            if missing <= 0 or self.count == resume.lowest:
                return Judgement(PASSED, "nothing was left to do", resumed=resume.done)
            message = f"it ends without a step, and {missing} are missing"
            return fail("skipped work", message, resume.done + 1, resume.done)
        start = self._align()
        if start is None:
            return fail("weights", self._nearest(self.made[0]))
        self.start, self.rest = start, self.expected[start:]
        self.made = [self._without_probe(self.made[0]), *self.made[1:]]
        foreign = self._find_foreign_weights()
        if foreign is not None:
            ends = {row["after"]: row["n"] for row in self.expected if row["optimizer"] == foreign["optimizer"]}
            is_of_a_save = bool(self.resume.saved) and foreign["before"] in ends
            return fail("two saves" if is_of_a_save else "weights", self._nearest(foreign))
        if start == 0 and resume.has_whole_save and resume.lowest:
            return self._judge_first_weights()
        index, causes = self._part()
        total = start + len(self.made)
        if resume.is_to_end and total != self.count:
            counted = "repeated work" if total > self.count else "skipped work"
            causes.insert(1 if causes[:1] == ["other state"] else 0, counted)
        lost = resume.lowest - start
        begun = f"resumed after step {start}" if start else "begun anew, as nothing was saved"
        begun += f", {lost} steps of work that was saved are lost" if lost > 0 else ""
        if not causes and lost > 0:
            return fail("lost work", f"{begun}; each step after that is the same", start + 1, start)
        if not causes:
            end = ", and the end" if resume.is_to_end else ""
            return Judgement(PASSED, f"{begun}, {len(self.made)} steps the same{end}", resumed=start)
        has_other_state = "optimizer state" in causes and self._step_of_state(self.made[0]) not in (None, 0, start)
        if index == 0 and (has_other_state or self._other_save()):
            causes.insert(0, "two saves")
        if lost > 0:
            causes.append("lost work")
        also = f"; as well: {', '.join(causes[1:])}" if len(causes) > 1 else ""
        step = start + index + 1
        whose = self._whose(self.expected[step - 1]["optimizer"]) if step <= self.count else ""
        where = f"{step} ({whose})" if whose else str(step)
        message = f"{begun}, parted at step {where}: {self._reason(causes, index)}{also}"
        return Judgement(FAILED, message, causes, step, start)

    def _judge_first_weights(self) -> Judgement:
        """Judge a run that begins with the weights of the first step, although a whole checkpoint was there."""
        row, lowest = self.made[0], self.resume.lowest
        goes_on = lowest < self.count and row["inputs"] == self.expected[lowest]["inputs"] != self.expected[0]["inputs"]
        if goes_on:
            subject = self._subject(row["optimizer"])
            return fail("weights", f"it goes on after step {lowest}, with {subject} from before the first step")
        return fail("does not resume", "it begins with the first step, although a whole checkpoint was there", 1, 0)

    def _align(self) -> int | None:
        """Return how many steps of the reference lie before the first row: its weights say so."""
        row, resume = self.made[0], self.resume
        places = [
            index
            for index, expected in enumerate(self.expected)
            if expected["optimizer"] == row["optimizer"] and expected["before"] == row["before"]
        ]

        def score(index: int) -> tuple[int, int]:
            candidate = self.expected[index]
            keys = ("inputs", "state_before", "options", "random", "scale")
            same = sum(_is_same(candidate.get(key), row.get(key)) for key in keys)
            is_usual = len(places) > 1 and index in (resume.lowest, resume.done)
            return 10 * is_usual + same, -abs(resume.lowest - index)

        return max(places, key=score) if places else None

    def _without_probe(self, row: Row) -> Row:
        """Leave out inputs of the first row with which the model is called at each start, before the first step."""
        usual, first = self.rest[0], self.expected[0]
        probe = _LENGTH * (row["seen"] - usual["seen"])
        is_probe = first["inputs"][:probe] == row["inputs"][:probe] or row["inputs"][probe:] == usual["inputs"]
        if self.start and usual["seen"] and probe > 0 and is_probe:
            return {**row, **{key: usual[key] for key in ("seen", "shapes")}, "inputs": row["inputs"][probe:]}
        return row

    def _find_foreign_weights(self) -> Row | None:
        """Return the first row of an optimizer that begins with weights that nobody else has changed."""
        last = {row["optimizer"]: row["after"] for row in self.expected[: self.start]}
        begun = {self.made[0]["optimizer"]}
        for one, other in zip(self.rest, self.made):
            name = other["optimizer"]
            if one["optimizer"] != name:
                return None
            if name not in begun and last.get(name) == one["before"] != other["before"]:
                return other
            begun.add(name)
        return None

    def _whose(self, optimizer: str) -> str:
        """Name an optimizer among several, by its number in the order of their first steps, and what it trains."""
        optimizers = list(dict.fromkeys(row["optimizer"] for row in self.expected))
        names = self.names.get(optimizer, [])
        if len(optimizers) == 1 or not names:
            return ""
        more = ", ..." if len(names) > 1 else ""
        kind = optimizer.partition("-")[0]
        return f"{kind}, optimizer {optimizers.index(optimizer) + 1} of {len(optimizers)}, of {names[0]}{more}"

    def _subject(self, optimizer: str) -> str:
        whose = self._whose(optimizer)
        return f"the weights of {whose}," if whose else "the weights"

    def _part(self) -> tuple[int, list[str]]:
        """Return the first row from which on the runs part for good, and the causes."""
        frozen = {row["optimizer"]: row["frozen"] for row in self.expected if "frozen" in row}
        first, causes = None, list[str]()
        last = min(len(self.rest), len(self.made)) - 1
        for index, (one, other) in enumerate(zip(self.rest, self.made)):
            keys = _differing({**one, "frozen": frozen.get(other["optimizer"])}, other)
            if index == 0 and other["seen"] < one["seen"] and not any(key in _RESULTS for key in keys):
                keys = [key for key in keys if key not in _OF_BATCHES]  # The gradients of the others were saved.
            if first is None and any(key != "random" for key in keys):
                first, causes = index, self._rank(keys, index)
            if any(key in _RESULTS for key in keys):
                return first or 0, causes
        if first is not None and last - first < _MIN_STEPS_WITHOUT_EFFECT:
            return first, causes
        return 0, []

    def _rank(self, keys: Sequence[str], index: int) -> list[str]:
        """Return the causes of a difference in a row, the likeliest first."""
        row, other = self.rest[index], self.made[index]
        causes = _causes_of(keys)
        if index == 0 and "samples" in causes and other["seen"] > row["seen"] > 0:
            return ["other state", *(cause for cause in causes if cause not in ("samples", "random state"))]
        if "random state" not in causes:
            return causes
        lost = self._lost_streams(index)
        if not lost:
            return _causes_of(key for key in keys if key != "random")
        if self._are_put_back(lost, index):
            rest = [cause for cause in causes if cause not in ("random state", "samples")]
            if other["shuffled"]:
                return ["samples", *rest]
            if other["new_epoch"]:  # What a loader gives does not depend on what the script keeps.
                return [*(cause for cause in causes if cause == "samples"), "random state", *rest]
            return ["other state", *rest]
        if "samples" not in causes:
            return causes
        # The order of an epoch that begins here is drawn from the stream, or what the loaded samples are mixed with. Of
        # numpy and of Python no step draws: what draws is what makes the samples.
        before = self._random_before(index)
        makes_samples = any(name not in ("torch", "cuda") and before.get(name) != row["random"][name] for name in lost)
        is_first = row["shuffled"] or row["batches"] == other["batches"] or makes_samples
        causes.remove("random state")
        causes.insert(0 if is_first else causes.index("samples") + 1, "random state")
        return causes

    def _are_put_back(self, streams: Sequence[str], index: int) -> bool:
        """Return whether streams are put back exactly, so that something draws from them before the first step."""
        saved = self.rest[index].get("saved_random") or {}
        restored = self.made[index].get("restored") or {}
        return index == 0 and all(name in saved and saved[name] == restored.get(name) for name in streams)

    def _lost_streams(self, index: int) -> list[str]:
        """Return the random streams that differ and matter: something draws from them later, or made these samples."""
        row, other = self.rest[index], self.made[index]
        lost = _lost_streams(self.rest[index:], self.made[index:])
        lost = [name for name in lost if name in self._drawn_streams()]
        before = self._random_before(index)
        if lost or not before or row["inputs"] == other["inputs"]:
            return lost
        differing = [name for name, state in row["random"].items() if state != other["random"].get(name, state)]
        return sorted(name for name in differing if row["random"][name] != before.get(name))

    def _random_before(self, index: int) -> Mapping[str, str]:
        """Return the random streams one step before a row, if there is one."""
        place = self.start + index
        return self.expected[place - 1]["random"] if place else {}

    def _other_save(self) -> int | None:
        """Return the step of another save than that of the weights, of which all is that differs in the first row."""
        drawn = self._drawn_streams()

        def with_drawn_streams(row: Row) -> dict[str, Any]:
            return {**row, "random": {name: state for name, state in row["random"].items() if name in drawn}}

        row, *rows = map(with_drawn_streams, [self.made[0], *self.expected])
        keys = [key for key in _differing(rows[self.start], row) if key not in _FOLLOWS]
        for place in sorted(set(self.resume.saved) - {0, self.start, self.count}):
            if keys and all(_is_same(rows[place].get(key), row.get(key)) for key in keys):
                return place
        return None

    def _drawn_streams(self) -> list[str]:
        """Return the random streams from which something draws."""
        names = {name for row in self.expected for name in row["random"]}
        return [name for name in names if len({row["random"].get(name) for row in self.expected}) > 1]

    def _step_of_state(self, row: Row) -> int | None:
        """Return the last step after which the optimizer had the state that a row begins with."""
        keys = ("optimizer", "state_before")
        places = [
            n for n, expected in enumerate(self.expected) if all(expected.get(key) == row.get(key) for key in keys)
        ]
        return places[-1] if places else None

    def _reason(self, causes: Sequence[str], index: int) -> str:
        """Say in words why the runs part."""
        cause, start = causes[0], self.start
        one = self.rest[min(index, len(self.rest) - 1)]
        other = self.made[min(index, len(self.made) - 1)]
        if cause == "random state":
            lost = self._lost_streams(index)
            streams = ", ".join(lost)
            if self._are_put_back(lost, index):
                return f"the random state ({streams}) is put back, and drawn from before the first step, as by a loader"
            drawn = ", and the samples are drawn from it" if "samples" in causes else ": other dropout, noise or order"
            return f"the random state ({streams}) is not resumed{drawn}"
        if cause in ("repeated work", "skipped work"):
            return f"{start + len(self.made)} steps are made in all, and {self.count} without a kill"
        if cause == "learning rate":
            return f"the lr is {_text(other['lr'])}, and {_text(one['lr'])} without a kill (or another option differs)"
        if cause == "two saves" and (save := self._other_save()):
            return f"the weights are those after step {start}, and all else is of the save after step {save}"
        if cause in ("optimizer state", "two saves"):
            return self._reason_of_state(other)
        if cause == "samples":
            return self._reason_of_samples(one, other, start + index)
        if cause == "other state" and other["seen"] > one["seen"]:
            return f"the model is called with {other['seen']} inputs before the step, and {one['seen']} without a kill"
        words = {
            "other state": "the random state is put back exactly, and other samples are drawn from it",
            "gradients": "the same weights, as far as they are summed, samples and random numbers, and another update",
            "buffers": "buffers of the model (BatchNorm's running statistics) differ",
            "loss scale": "the loss scale of mixed precision differs",
            "weights": "the weights differ",
        }
        return words.get(cause, cause)

    def _reason_of_state(self, row: Row) -> str:
        step = self._step_of_state(row)
        if step is None:
            return "the state of the optimizer (its moments) is not that of the run without a kill"
        return f"the state of the optimizer is that {_when(step)}, the weights are those after step {self.start}"

    def _reason_of_samples(self, one: Row, other: Row, place: int) -> str:
        if other["seen"] < one["seen"]:
            begun = "was it saved between the batches of an accumulated step?"
            return f"the step sees {other['seen']} inputs, and {one['seen']} without a kill: {begun}"
        same = [index for index, expected in enumerate(self.expected) if expected["inputs"] == other["inputs"]]
        if same and other["seen"]:
            return f"the batch of step {same[0] + 1} comes again instead of that of step {place + 1}"
        return "the batch is that of no step"

    def _nearest(self, row: Row) -> str:
        """Name the weights that are others, where a run begins with weights of no step."""
        subject = self._subject(row["optimizer"])
        names, own = self.names.get(row["optimizer"], []), _chunks(row.get("parts_before", ""))
        rows = [step for step in self.expected if step["optimizer"] == row["optimizer"]] or list(self.expected)
        candidates = [(0, rows[0].get("parts_before", "")), *((expected["n"], expected["parts"]) for expected in rows)]
        best, others = 0, list(range(len(own)))
        for step, parts in candidates:
            differing = [index for index, part in enumerate(_chunks(parts)) if own[index : index + 1] != [part]]
            if len(differing) < len(others):
                best, others = step, differing
        when = _when(best)
        if len(others) == len(own):
            return f"{subject} are those of no step of the run without a kill"
        if not others:
            return f"{subject} are those {when}"
        shown = ", ".join(names[index] for index in others[:4] if index < len(names))
        return f"{subject} are those {when}, but for {shown}{', ...' if len(others) > 4 else ''}"


def _when(step: int) -> str:
    return f"after step {step}" if step else "before the first step"


def _chunks(text: str) -> list[str]:
    return [text[place : place + _LENGTH] for place in range(0, len(text), _LENGTH)]


def _differing(one: Row, other: Row) -> list[str]:
    """Return what two rows do not have in common."""
    keys = [key for key in _CAUSES if key in one and key in other and not _is_same(one[key], other[key])]
    if not one["seen"] and one["batches"] != other["batches"]:  # The inputs of the model are not seen.
        keys.append("inputs")
    return keys


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; of random streams those that both have are compared."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(one[name] == other[name] for name in one.keys() & other.keys())
    return bool(one == other)


def _causes_of(keys: Iterable[str]) -> list[str]:
    """Return the causes among what differs; what follows from others is one where there is no other."""
    keys = set(keys)
    roots = [key for key in _CAUSES if key in keys and key not in _FOLLOWS]
    chosen = roots or [key for key in _CAUSES if key in keys][:1]
    return list(dict.fromkeys(_CAUSES[key] for key in chosen))


def _lost_streams(whole: Sequence[Row], made: Sequence[Row]) -> list[str]:
    """Return the random streams that differ, unless nothing draws from them later or they are seeded anew."""
    expected, resumed = [row["random"] for row in whole], [row["random"] for row in made]
    shared = expected[0].keys() & resumed[0].keys()
    lost = [name for name in shared if expected[0][name] != resumed[0][name]]
    return sorted(name for name in lost if len(expected) == 1 or _is_drawn_from(expected, resumed, name))


def _is_drawn_from(expected: Sequence[Mapping[str, str]], resumed: Sequence[Mapping[str, str]], name: str) -> bool:
    """Return whether a stream that differs goes on, and differs still."""
    drawn = next((index for index, row in enumerate(expected) if row.get(name) != expected[0][name]), None)
    if drawn is None:
        return False
    return drawn >= len(resumed) or resumed[drawn].get(name) != expected[drawn].get(name)


def _text(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in dict.fromkeys(values))
