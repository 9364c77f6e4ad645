"""What ranks compare: the calls that they make together, and the weights that they must hold alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zae.common.torch_private import default_store
from zae.errors import DistributedError

__all__ = ["DriftCheck", "Meetings"]


class Meetings:
    """The calls that all ranks must make together, which they compare before the first exchange of tensors.

    Without it the exchanges of two different calls meet: gloo ends the process, or a rank takes one for the other.
    They compare names over the store of the process group, which can be used as before after an error.
    """

    count = 0

    @classmethod
    def meet(cls, call: str, timeout: float) -> None:
        """Wait until all ranks make this call; raise DistributedError where one makes another call, or none."""
        if (whole := default_store()) is None:
            return
        store, rank, world = dist.PrefixStore(f"zae/calls/{cls.count}", whole), dist.get_rank(), dist.get_world_size()
        who = f"rank {rank} of {world} called {call}"
        remedy = f"Call {call} on every rank, not under `if self.is_main`; only rank 0 writes files"
        if (other := store.compare_set("call", "", call).decode()) != call:
            store.set("go", call)  # The others end with this error too, and meet again at their next call.
        elif store.add("ranks", 1) == world:
            store.set("go", call)
        else:
            try:
                store.wait(["go"], timedelta(seconds=timeout))
                other = store.get("go").decode()
            except RuntimeError as error:
                if store.add("ranks", -1) <= 0:  # It was alone, and the others may continue.
                    store.delete_key("call")
                raise DistributedError(f"{who}, and other ranks did not within {timeout:g} s. {remedy}") from error
        cls.count += 1
        if other != call:
            raise DistributedError(f"{who}, and another rank called {other}. {remedy}")


class DriftCheck:
    """Compares the hashes of tensors over the ranks, and remembers the last step at which all were the same."""

    def __init__(self) -> None:
        self.agreed_at = -1

    def begin(self, step: int) -> None:
        """Note that the ranks begin alike at this step."""
        self.agreed_at = step

    def check(self, step: int, hashes: Callable[[], Mapping[str, int]], gather: Callable[[Any], list[Any]]) -> None:
        """Raise DistributedError on all ranks where a tensor differs; all ranks call it, at the same step.

        The hashes are by name. A rank may lack a name that others have: those that have it are compared.
        """
        if step == self.agreed_at:
            return
        ranks: list[dict[str, int]] = gather(dict(hashes()))
        names = list(dict.fromkeys(name for each in ranks for name in each))
        differing = [name for name in names if len({each[name] for each in ranks if name in each}) > 1]
        if differing:
            raise DistributedError(_describe(differing, len(names), ranks, self.agreed_at, step))
        self.agreed_at = step


def _describe(differing: Sequence[str], count: int, ranks: Sequence[Mapping[str, int]], agreed: int, step: int) -> str:
    """Name the first tensor that differs, the ranks by what they hold, the steps, and the next thing to do."""
    name = differing[0]
    groups: dict[int, list[int]] = {}
    for rank, each in enumerate(ranks):
        if name in each:
            groups.setdefault(each[name], []).append(rank)
    held = [f"{'ranks' if group[1:] else 'rank'} {', '.join(map(str, group))}" for group in groups.values()]
    begun = f"They were the same after step {agreed}, and are not after step {step}"
    if agreed < 0:
        begun = f"They were not compared before step {step}"
    paths = [f"run/ledger-{group[0]}.jsonl" for group in groups.values()][:2]
    more = f" (and {len(differing) - 1} more of {count} tensors)" if differing[1:] else ""
    return (
        f"the weights of the ranks have drifted apart: {name}{more} is one thing on {', another on '.join(held)}. "
        f"{begun}. Something changes gradients or weights on one rank in another way than on the others, after they "
        "were averaged: an add-on or a hook that draws from a random stream of its rank, or depends on its batch. To "
        "find the step and the stage, train again with LedgerAddon, ledger_path='run/ledger-{rank}.jsonl' and "
        f"ledger_every=1, then: python -m zae diff {' '.join(paths)}"
    )
