"""Hosts and a cluster of SLURM, each test with its own; a server of S3 for each file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from cluster.hosts import Hosts
from cluster.object_store import serve_s3
from cluster.slurm import NODES, Slurm


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts, host1 to host3."""
    with closing(Hosts("host1", "host2", "host3")) as network:
        network.connect()
        yield network


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """SLURM with three nodes. The path of its folder is short, since that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        with closing(Hosts("head", *NODES)) as network:
            network.connect()
            yield Slurm(network, Path(folder))


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    """The port of a server of S3, which clients find by the variables of the environment."""
    with pytest.MonkeyPatch.context() as patch, serve_s3() as port:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
            patch.setenv(f"AWS_{name}", value)
        yield port


@pytest.fixture(scope="module")
def bucket(s3: int) -> str:
    """The URL of a bucket."""
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("runs")
    return "s3://runs"
