"""Without the private names of torch that zae looks up, it imports and trains as with them, bit by bit."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from kit import other_torch, source_names
from zae import torch_private

# Names in C that torch itself reads, of the compiler, or of a wrapper: without one of them, a run is the same.
ELSEWHERE = {
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_indices", "_values", "_dynamo"),
    *("_rebuild_buckets", "_push_all_rebuilt_params", "_check_reducer_finalized", "_get_default_store"),
    *("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_view"),
    # What a function of torch reads, which is only compared.
    *("_profile_name", "_sampler_iter", "_reset", "_num_yielded", "_dataset_kind", "_DatasetKind", "_dataset"),
    *("_IterableDataset_len_called", "_num_workers"),
    "_popen",  # Of multiprocessing.
    "_has_compatible_shallow_copy_type",  # Of a model that is moved to an accelerator without a name.
    "_forward_cache",  # Of torchmetrics.
    # Of an optimizer: torch's own load reads them.
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    "_orig_mod",  # Of what torch.compile returns, which is only told from other modules by it.
    "_fingerprint",  # Of a dataset of Hugging Face; one without it is compared by its length.
    *("_assert", "_version"),  # Of a forward that is divided into stages.
    *("_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks"),  # Of a module whose forward is divided.
}


SOURCE = source_names.ROOT / "zae" / "torch_private.py"
OWNERS = {"_C", "_autograd"}


def names_read():
    """List the private names that the module looks up."""
    tree = ast.parse(SOURCE.read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {t for t in texts if t.isidentifier()}
    return {name for name in read - OWNERS if source_names.is_private(name)}


@pytest.fixture(scope="module")
def expected():
    torch.manual_seed(0)
    return other_torch.train(wrapped=False)


@pytest.mark.exhaustive
def test_the_weights_are_the_same_without_the_names():
    """A later torch may have none of them; a name that it lacks cannot stop `import zae` either."""
    kit = source_names.ROOT / "tests"
    command = [sys.executable, str(kit / "kit" / "other_torch.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(kit), str(source_names.ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    assert done.stdout.strip() == other_torch.train()


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("name", sorted(names_read() - ELSEWHERE))  # Those of ELSEWHERE do not matter in training.
def test_the_weights_are_the_same_without_one_name(name, expected, monkeypatch):
    """The functions look up a name that torch does not have instead; torch itself keeps the name."""
    without = ModuleType(torch_private.__name__)
    exec(re.sub(rf"\b{name}\b", f"{name}_absent", SOURCE.read_text()), vars(without))
    for key in torch_private.__all__:
        function = inspect.unwrap(getattr(torch_private, key))
        monkeypatch.setattr(function, "__code__", inspect.unwrap(getattr(without, key)).__code__)
    torch.manual_seed(0)
    assert other_torch.train(num_workers=int(name == "_shutdown_workers"), wrapped=False) == expected


def test_only_one_module_reads_private_names():
    """Of torch and Python; those of DeepSpeed, Accelerate and torchmetrics are read in one module each."""
    sources = source_names.read_sources()
    own = source_names.own_private_names(sources)
    found = {each.name for each in sources if source_names.foreign_private_names(each, own)[0]}
    libraries = {
        "zae.addons.accelerate.accelerator",
        "zae.addons.deepspeed.zero",
        "zae.addons.torch_metrics.torchmetrics",
    }
    assert found == {"zae.torch_private"} | libraries


def test_a_name_of_torch_is_found_that_is_spelled_like_one_of_ours():
    tree = ast.parse(
        "import torch\nfrom torch import nn\n\ndef f(x):\n    return torch.cuda._own, nn.Module._own, x._own\n"
    )
    source = source_names.Source(SOURCE)
    source.tree = tree
    assert source_names.foreign_private_names(source, {"_own"}) == (2, 0)


def test_every_name_is_taken_away():
    taken = {*other_torch.IN_PYTHON, *(name for names in other_torch.IN_C.values() for name in names)}
    assert names_read() <= taken | ELSEWHERE


def test_hooks_are_expected_where_torch_does_not_tell():
    assert torch_private.has_gradient_hooks(object())
    parameter = nn.Parameter(torch.ones(1))
    assert not torch_private.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda each: None)
    assert torch_private.has_gradient_hooks(parameter)


def test_an_overflow_is_found_by_the_gradients():
    class Scaler:
        """One of another torch."""

    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    weights[0].grad = torch.ones(2)
    weights[1].grad = torch.ones(2).to_sparse()
    optimizer = torch.optim.SGD(weights)
    assert not torch_private.found_overflow(Scaler(), optimizer)
    weights[1].grad = torch.tensor([1.0, torch.inf]).to_sparse()
    assert torch_private.found_overflow(Scaler(), optimizer)


def test_every_call_may_have_made_a_graph_where_torch_does_not_count(monkeypatch):
    from torch._dynamo import utils

    first = torch_private.compiled_graphs()
    assert torch_private.compiled_graphs() == first
    monkeypatch.delattr(utils, "counters")
    assert torch_private.compiled_graphs() < torch_private.compiled_graphs()
