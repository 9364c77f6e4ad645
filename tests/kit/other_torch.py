"""Import torch as a release without the private names that zae uses, train, and print a hash of the weights."""

from __future__ import annotations

import importlib.machinery
import re
import tempfile
from operator import attrgetter
from typing import Any

# Written in C: taken away when torch is imported.
IN_C = {
    "": ("_foreach_add_", "_foreach_copy_", "_foreach_mul_"),
    "_C._autograd": ("_profiler_enabled",),
    "_C": ("_len_torch_dispatch_stack", "_len_torch_function_stack"),
    "distributed.Reducer": ("_push_all_rebuilt_params",),
}
# Written in Python: torch itself uses what they stand for by another name.
IN_PYTHON = (
    *("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks", "profile_hook_step", "_get_iterator"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_BaseDataLoaderIter", "_check_reducer_finalized"),
    *("collate_tensor_fn", "default_collate_fn_map", "_load_from_state_dict", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_milestones", "_schedulers", "_call_impl"),
    *("_compiled_call_impl", "_found_inf_per_device", "_shutdown_workers", "_build_params_for_reducer"),
    *("_iterator", "_worker_info", "_workers_done_event", "_next_data", "_SingleProcessDataLoaderIter"),
    *("_pre_forward", "_post_forward", "_run_ddp_forward", "_delay_all_reduce_all_params"),
)


def rename() -> None:
    """Load modules of torch from now on with other names in them."""
    load = importlib.machinery.SourceFileLoader.get_code
    pattern = re.compile(rf"\b(?:{'|'.join(IN_PYTHON)})\b")

    def get_code(loader: Any, name: str) -> Any:
        text = loader.get_data(loader.path).decode() if name.split(".")[0] == "torch" else ""
        if not pattern.search(text):
            return load(loader, name)
        return compile(pattern.sub(r"\g<0>_renamed", text), loader.path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def remove() -> None:
    """Take the names in C away."""
    import torch._dynamo  # It imports some of them by name.
    import torch.distributed

    for owner, names in IN_C.items():
        for name in names:
            delattr(attrgetter(owner)(torch) if owner else torch, name)


def train(num_workers: int = 1, wrapped: bool = True) -> str:
    """Train, save, resume and train on, then a step in the wrapper of several ranks; return a hash of the weights."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from kit.hand import digest, loader
    from zae import Trainer
    from zae.addons import EMAAddon, StateManagerAddon
    from zae.addons.ddp import Replica

    class Task(Trainer.add_on(EMAAddon, StateManagerAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

        test_step = train_step

    def make(folder: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2))
        model.register_buffer("calls", torch.zeros(1), persistent=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kinds = torch.optim.lr_scheduler
        parts = [kinds.ConstantLR(optimizer), kinds.StepLR(optimizer, 2)]
        scheduler = kinds.SequentialLR(optimizer, parts, milestones=[2])
        options = {"save_path": folder, "resume": "auto", "save_every": 1, "log_bar": False}
        return Task(model, "cpu", optimizer=optimizer, scheduler=scheduler, **options)

    with tempfile.TemporaryDirectory() as folder:
        make(folder).run(2, loader(), valid_loader=loader())
        trainer = make(folder)
        trainer.plan(4, loader())
        trainer.run(4, loader(num_workers=num_workers))
    averages = trainer.average.values()
    if not wrapped:
        return digest(trainer.model, *averages)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    replica = Replica(trainer.model, find_unused_parameters=False)
    for inputs, _ in loader(shuffle=False):
        replica(inputs).square().mean().backward()
    del replica  # Before its group.
    dist.destroy_process_group()
    return digest(trainer.model, *averages, *(p.grad for p in trainer.model.parameters()))


if __name__ == "__main__":
    rename()
    remove()
    print(train())
