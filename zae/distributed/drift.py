"""What ranks compare over the store of their group: calls that they make together, weights, and errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from zae.distributed.rank_process import SIGNALS, has_lost_peer, has_timed_out, is_spawned, summarize
from zae.errors import DistributedError
from zae.torch_private import default_store

__all__ = ["CollectiveCalls", "DriftCheck", "find_failed_rank", "in_time"]

# Seconds in which the others may answer.
MIN_WAIT_S = 2.0
MAX_WAIT_S = 20.0
_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
_OWN_TIMEOUT = 5.0  # Seconds in which the timeout of torch's own may come.
_T = TypeVar("_T")
_AGAIN = "start the script again: with resume='auto' it continues from the newest checkpoint"


class _Answer(NamedTuple):
    """What a rank has learned about a call that all ranks make together."""

    call: str  # That of another rank where it differs, else its own.
    missing: Sequence[int] = ()  # The ranks that did not make it in time.
    failure: str = ""  # The rank that has failed before it, and its error.


class CollectiveCalls:
    """The calls that all ranks must make together, which they compare before the first exchange of tensors.

    Without it the exchanges of two different calls meet: gloo ends the process, or a rank takes one for the other.
    They compare names over the store of the process group, which can be used as before after an error.
    """

    count = 0
    failed_at = -1  # The count at which this rank has failed: what others have written there is the same failure.

    @classmethod
    def next_store(cls) -> dist.Store | None:
        """Return the part of the store for the next call; None where this process does not know a store."""
        whole = default_store()
        return None if whole is None else dist.PrefixStore(f"zae/calls/{cls.count}", whole)

    @classmethod
    def rendezvous(cls, call: str, timeout: float) -> None:
        """Wait until all ranks make this call; raise DistributedError where one makes another call, or none."""
        if (store := cls.next_store()) is None:
            return
        looks = cls.failed_at < cls.count
        rank = dist.get_rank()
        world = dist.get_world_size()
        who = f"rank {rank} of {world} called {call}"
        remedy = f"Call {call} on every rank, not under `if self.is_main`; only rank 0 writes files"
        try:
            answer = in_time(lambda: cls._exchange(store, call, rank, world, timeout, looks), timeout)
        except RuntimeError as error:
            raise DistributedError(f"{who}, and {describe_store()}; {_AGAIN}") from error
        if answer.failure:
            raise DistributedError(f"{who}, and {answer.failure}")
        if answer.missing:
            names = " and ".join(f"rank {missing_rank}" for missing_rank in answer.missing)
            raise DistributedError(
                f"{who}, and {names} did not within {timeout:g} s. {remedy}. If it is called everywhere, {names} is "
                "stopped or takes longer: write a longer timeout=..."
            )
        cls.count += 1
        if answer.call != call:
            cls.failed_at = cls.count  # All ranks get this error: it is no news in the next call.
            raise DistributedError(f"{who}, and another rank called {answer.call}. {remedy}")

    @classmethod
    def _exchange(cls, store: Any, call: str, rank: int, world: int, timeout: float, looks: bool) -> _Answer:
        """Wait for the others, which may make another call, none in time, or have failed."""
        first_call = store.compare_set("call", "", call).decode()
        if first_call != call:
            store.set("go", call)  # The others end with this error too, and meet again at their next call.
            return _Answer(first_call)
        store.set(f"rank/{rank}", "")
        if store.add("ranks", 1) == world:
            store.set("go", call)
            return _Answer(call)
        began = time.monotonic()
        while (waited := time.monotonic() - began) < timeout:
            if store.check(["go"]):
                return _Answer(store.get("go").decode())
            if looks and store.check(["failure"]):
                return _Answer(call, failure=store.get("failure").decode())
            time.sleep(min(max(0.001, waited / 10), _LONGEST_PAUSE))  # A wait of the store would not see a failure.
        missing = [peer for peer in range(world) if not store.check([f"rank/{peer}"])]
        store.delete_key(f"rank/{rank}")
        if store.add("ranks", -1) <= 0:  # It was alone, and the others may continue.
            store.delete_key("call")
        return _Answer(call, missing)


class DriftCheck:
    """Compares the hashes of tensors over the ranks, and remembers the last step at which all were the same."""

    def __init__(self) -> None:
        self.agreed_at = -1

    def check(self, step: int, hashes: Callable[[], Mapping[str, int]], gather: Callable[[Any], list[Any]]) -> None:
        """Raise DistributedError on all ranks where a tensor differs; all ranks call it, at the same step.

        The hashes are by name. A rank may lack a name that others have: those that have it are compared.
        """
        if step == self.agreed_at:
            return
        ranks: list[dict[str, int]] = gather(dict(hashes()))
        names = list(dict.fromkeys(name for rank in ranks for name in rank))
        differing = [name for name in names if len({rank[name] for rank in ranks if name in rank}) > 1]
        if differing:
            raise DistributedError(_describe(differing, len(names), ranks, self.agreed_at, step))
        self.agreed_at = step


def _describe(differing: Sequence[str], count: int, ranks: Sequence[Mapping[str, int]], agreed: int, step: int) -> str:
    """Name the first tensor that differs, the ranks by what they hold, the steps, and the next thing to do."""
    name = differing[0]
    groups: dict[int, list[int]] = {}
    for rank, calls in enumerate(ranks):
        if name in calls:
            groups.setdefault(calls[name], []).append(rank)
    groups_in_words = [f"{'ranks' if group[1:] else 'rank'} {', '.join(map(str, group))}" for group in groups.values()]
    begun = f"They were the same after step {agreed}, and are not after step {step}"
    if agreed < 0:
        begun = f"They were not compared before step {step}"
    paths = [f"run/ledger-{group[0]}.jsonl" for group in groups.values()][:2]
    more = f" (and {len(differing) - 1} more of {count} tensors)" if differing[1:] else ""
    return (
        f"the weights of the ranks have drifted apart: {name}{more} is one thing on "
        f"{', another on '.join(groups_in_words)}. {begun}. Something changes gradients or weights on one rank in "
        "another way than on the others, after they were averaged: an add-on or a hook that depends on its batch, or "
        "draws from a random stream of its rank, where self.generator(name, per_rank=False) draws the same on all. To "
        "find the step and the stage, train again with LedgerAddon, ledger_path='run/ledger-{rank}.jsonl' and "
        f"ledger_every=1, then: python -m zae diff {' '.join(paths)}"
    )


def find_failed_rank(error: Exception, timeout: float) -> str:
    """Return which rank is the cause of an error, and what to do; "" where it is this one, or its parent says so.

    An exchange fails where a connection was closed, or where nothing came. The rank that does not report the same, or
    reports another error, is the cause.
    """
    if is_spawned() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    if (store := CollectiveCalls.next_store()) is None:
        return ""
    CollectiveCalls.failed_at = CollectiveCalls.count
    rank = dist.get_rank()
    world = dist.get_world_size()
    is_lost = has_lost_peer(error)
    is_timeout = has_timed_out(error)
    seconds = min(max(MIN_WAIT_S, timeout / 20), MAX_WAIT_S) if is_timeout else MIN_WAIT_S

    def collect() -> dict[int, str]:
        store.set(f"failed/{rank}", "" if is_lost else summarize(error))
        answers = dict[int, str]()
        if not is_lost:  # The first one is the cause of the others.
            store.compare_set("failure", "", f"rank {rank} of {world} failed: {summarize(error)}")
            return answers
        deadline = time.monotonic() + seconds
        while len(answers) < world - 1 and not any(answers.values()) and time.monotonic() < deadline:
            for peer in range(world):
                if peer not in (rank, *answers) and store.check([f"failed/{peer}"]):
                    answers[peer] = store.get(f"failed/{peer}").decode()
            time.sleep(_PAUSE)
        return answers

    try:
        answers = in_time(collect, seconds)
    except RuntimeError:
        return f"{describe_store()}; {_AGAIN}" if is_lost else ""
    if not is_lost:
        return ""
    return summarize_ranks(answers, world, rank, f" within timeout={timeout:g} s" if is_timeout else "")


def in_time(function: Callable[[], _T], timeout: float) -> _T:
    """Call a function that uses a store or makes a process group; raise RuntimeError where it has not ended in time.

    Some calls of a store wait without a limit for a process that serves it and is stopped. Over a link that is down,
    gloo tries again without an end.
    """
    answers: list[Any] = []

    def call() -> None:
        try:
            answers.append((function(), None))
        except RuntimeError as error:
            answers.append((None, error))

    thread = threading.Thread(target=call, name="zae-store", daemon=True)
    thread.start()
    thread.join(timeout + _OWN_TIMEOUT)
    result, error = answers[0] if answers else (None, RuntimeError(f"no answer within {timeout:g} s"))
    if error is not None:
        raise error
    return cast(_T, result)


def summarize_ranks(answers: Mapping[int, str], world: int, rank: int, within: str) -> str:
    """Return what the answers of the other ranks show."""
    causes = [f"rank {peer} of {world} failed: {text}" for peer, text in answers.items() if text]
    if causes:
        return "; ".join(causes)
    silent = [peer for peer in range(world) if peer != rank and peer not in answers]
    if not silent:
        return f"all {world} ranks lost a connection, and none reports another error: look at the network; {_AGAIN}"
    who = f"rank {' and rank '.join(map(str, silent))} of {world}"
    if within:
        return (
            f"{who} did not answer{within}. It is stopped, waits for something that the others do not, or its machine "
            f"or the network to it is down. End its process if it is still there, and {_AGAIN}. If its work takes that "
            "long, write a longer timeout=..."
        )
    signals = ". ".join(f"{signal.Signals(number).name} (-{number}): {why}" for number, why in SIGNALS.items())
    return (
        f"{who} ended without an error: it was killed by a signal, which the launcher names. {signals}. If the "
        f"launcher does not start it again, {_AGAIN}"
    )


def describe_store() -> str:
    """Return that the store does not answer, and who may serve it."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    where = f" at {host}:{port}" if host and port else ""
    return (
        f"the store of the process group{where} does not answer: what serves it (rank 0, the agent of torchrun, or the "
        "process that started the ranks) has ended or is stopped, or the network to it is down"
    )
