"""Walking over a user's objects: the tensors in the containers of a batch."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from zae.values.walk import map_tensors, sample


class Sentence(NamedTuple):
    ids: Any
    name: str


def test_containers_keep_their_types():
    value = {"first": [torch.ones(1)], "second": Sentence((torch.ones(2), None), "name"), "third": 3}
    made = map_tensors(torch.Tensor.double, value)
    assert type(made["second"]) is Sentence
    assert (made["second"].name, made["third"]) == ("name", 3)
    assert [made["first"][0].dtype, made["second"].ids[0].dtype] == [torch.float64] * 2
    assert made["second"].ids[1] is None


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = 0


def test_mappings_and_dataclasses_keep_their_types():
    encoding = BatchEncoding({"ids": torch.ones(2), "name": "a"})
    made = map_tensors(torch.Tensor.double, Pair(encoding, collections.OrderedDict(mask=torch.ones(1))))
    assert type(made) is Pair
    assert type(made.first) is BatchEncoding
    assert type(made.second) is collections.OrderedDict
    assert [made.first["ids"].dtype, made.second["mask"].dtype] == [torch.float64] * 2
    assert (made.first["name"], encoding["ids"].dtype) == ("a", torch.float32)


def test_what_stays_the_same_is_not_copied():
    value = {"first": [torch.ones(1)], "second": Sentence((torch.ones(2), None), "name")}
    assert map_tensors(lambda tensor: tensor, value) is value


WIDE = (1 << 20, 1 << 20)


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_a_sample_is_some_of_the_elements(make):
    """Of any memory layout, and of what an expansion repeats without memory of its own."""
    values = make(10_000)
    one = values[:1]
    repeated = one.expand(WIDE) if isinstance(one, torch.Tensor) else np.broadcast_to(one, WIDE)
    for each in (values, values.reshape(100, 100), values.reshape(100, 100).T, values[::2], repeated):
        found = sample(each, 64)
        assert found.ndim == 1
        assert 64 <= len(found) < 128
    assert sample(values[7].reshape(()), 64).tolist() == [7]
    assert sample(values[:0], 64).tolist() == []
