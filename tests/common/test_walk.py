"""Walking over a user's objects: the tensors in the containers of a batch."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from transformers import BatchEncoding

from zae.common.walk import map_tensors


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
