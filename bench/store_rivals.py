"""PyTorch DCP with the two writers and readers for S3 that are in use, each as its own documentation says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.report import version_of

State = dict[str, torch.Tensor]

THREADS = (1, 4)
"""Threads of a writer; the rival of a round is the faster of them."""


class FsspecRival:
    """DCP's writer and reader for any file system of fsspec, with s3fs."""

    packages = ("s3fs",)

    def __init__(self, endpoint: str) -> None:
        # Not `sync_files`: for a stream without a descriptor that would write out all of the machine's files.
        self._options: dict[str, Any] = {"endpoint_url": endpoint}

    def save(self, state: State, url: str, threads: int) -> None:
        """Save; an object is durable once its stream is closed."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp_save(state, storage_writer=FsspecWriter(url, sync_files=False, thread_count=threads, **self._options))

    def load(self, state: State, url: str) -> None:
        """Load in place."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(state, storage_reader=FsspecReader(url, **self._options))


class ConnectorRival:
    """The writer and reader of Amazon's connector for PyTorch. It finds the endpoint in the variables."""

    packages = ("s3torchconnector", "tenacity")

    def __init__(self, endpoint: str) -> None:
        from s3torchconnector import S3ClientConfig

        self._endpoint = endpoint
        self._region = os.environ.get("AWS_REGION", "us-east-1")
        self._config = S3ClientConfig(force_path_style=True)

    def save(self, state: State, url: str, threads: int) -> None:
        """Save; an object is durable once its stream is closed."""
        from s3torchconnector.dcp import S3StorageWriter

        with _endpoint_in_variables(self._endpoint):
            writer = S3StorageWriter(self._region, url, s3client_config=self._config, thread_count=threads)
            dcp_save(state, storage_writer=writer)

    def load(self, state: State, url: str) -> None:
        """Load in place, with the reader that it has for DCP."""
        from s3torchconnector.dcp import S3StorageReader

        with _endpoint_in_variables(self._endpoint):
            dcp.load(state, storage_reader=S3StorageReader(self._region, url, s3client_config=self._config))


@contextmanager
def _endpoint_in_variables(endpoint: str) -> Iterator[None]:
    before = os.environ["AWS_ENDPOINT_URL"]
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    try:
        yield
    finally:
        os.environ["AWS_ENDPOINT_URL"] = before


RIVALS: dict[str, type[FsspecRival] | type[ConnectorRival]] = {
    "dcp_fsspec": FsspecRival,
    "s3torchconnector": ConnectorRival,
}

PROXIED = "s3torchconnector"
"""The rival that needs the tag of a complete upload in a header, which Ceph 16 does not send. A proxy adds it. Holdfast
is measured through the same proxy once more, for this comparison alone."""


def missing(name: str) -> list[str]:
    """Return the packages of a rival that are not installed."""
    return [package for package in RIVALS[name].packages if version_of(package) is None]
