"""What all servers of the tests have in common. Each file beside this one has one kind, as a context manager."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.settings import ObjectSettings, Settings
from tests.servers.process import ServerProcess

BUCKET = "holdfast-tests"

TLS = Path(__file__).parents[1] / "fixtures" / "tls"
"""Certificates: `server.pem` with its key, and `authority.pem` that signed it."""


class Server(ABC):
    """A server on loopback with one bucket, or folder, for the tests.

    It is looked at with a client that is not Holdfast's, so that what lies there is what anybody would see.
    """

    name: str
    """What it is, for messages and results."""

    version: str
    """Its version, as it says itself."""

    root_url: str
    """URL of the bucket."""

    variables: Mapping[str, str]
    """Variables of a process that uses it: credentials, and what only variables can say."""

    secrets: tuple[str, ...] = ()
    """Texts that no output, file or object may show."""

    processes: Mapping[str, ServerProcess]
    """Its programs by name, for `kill` and `restart`."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that finds it by them alone."""
        return dict(self.variables)

    def settings(self, **changes: object) -> Settings:
        """Return settings that name it; the changes are fields of `ObjectSettings`, or else of `Settings`."""
        ours = {name: value for name, value in changes.items() if name in ObjectSettings.__dataclass_fields__}
        others = {name: value for name, value in changes.items() if name not in ours}
        store = replace(self._object_settings(), **ours)  # type: ignore[arg-type]
        return replace(Settings(object_store=store), **others)  # type: ignore[arg-type]

    def _object_settings(self) -> ObjectSettings:
        return ObjectSettings()

    def new_url(self) -> str:
        """Return the URL of a folder that nobody has used."""
        return f"{self.root_url}/{uuid.uuid4().hex}"

    @abstractmethod
    def keys(self, url: str) -> list[str]:
        """Return all keys under the URL of a folder, sorted, without that folder."""

    @abstractmethod
    def read(self, url: str) -> bytes:
        """Return the content of an object."""

    @abstractmethod
    def write(self, url: str, data: bytes) -> None:
        """Store an object, whatever is there."""

    @abstractmethod
    def remove(self, url: str) -> None:
        """Remove an object."""

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor aborted."""
        return []

    def kill(self, program: str) -> None:
        """Kill one of its programs by SIGKILL, and wait until it is gone."""
        self.processes[program].kill()

    def restart(self, program: str) -> None:
        """Start a program again that was killed, and wait until it answers."""
        self.processes[program].start()

    def name_of(self, url: str) -> str:
        """Return the name in the bucket that a URL stands for."""
        assert url.startswith(f"{self.root_url}/"), f"{url} is not of {self.root_url}"
        return url.removeprefix(f"{self.root_url}/")


class S3Server(Server):
    """A server that speaks S3, looked at with boto3."""

    endpoint: str
    """URL of the server."""

    ca_file: str | None = None
    """Certificates to trust, if it speaks TLS."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str, ca_file: str | None = None) -> None:
        """Remember where it is, and who may use it."""
        self.endpoint, self.ca_file = endpoint, ca_file
        self.root_url = f"s3://{BUCKET}"
        self.secrets = (access_key, secret_key)
        self.variables = {
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_REGION": "us-east-1",
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that finds it by them alone."""
        ca = {} if self.ca_file is None else {"AWS_CA_BUNDLE": self.ca_file}
        return {**self.variables, "AWS_ENDPOINT_URL": self.endpoint, **ca}

    def _object_settings(self) -> ObjectSettings:
        return ObjectSettings(endpoint=self.endpoint, ca_file=self.ca_file)

    def client(self, access_key: str | None = None, secret_key: str | None = None):  # type: ignore[no-untyped-def]
        """Return a client of boto3, for the user of the tests or another one."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key or self.variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=secret_key or self.variables["AWS_SECRET_ACCESS_KEY"],
            region_name=self.variables["AWS_REGION"],
            verify=self.ca_file,
            # Servers older than these checksums refuse them.
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def keys(self, url: str) -> list[str]:
        """Return all keys under the URL of a folder, sorted, without that folder."""
        prefix = "" if url == self.root_url else self.name_of(url) + "/"
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ()))

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        body: bytes = self.client().get_object(Bucket=BUCKET, Key=self.name_of(url))["Body"].read()
        return body

    def write(self, url: str, data: bytes) -> None:
        """Store an object, whatever is there."""
        self.client().put_object(Bucket=BUCKET, Key=self.name_of(url), Body=data)

    def remove(self, url: str) -> None:
        """Remove an object."""
        self.client().delete_object(Bucket=BUCKET, Key=self.name_of(url))

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of uploads that were begun and neither completed nor aborted."""
        pages = self.client().get_paginator("list_multipart_uploads").paginate(Bucket=BUCKET)
        return sorted(each["Key"] for page in pages for each in page.get("Uploads", ()))
