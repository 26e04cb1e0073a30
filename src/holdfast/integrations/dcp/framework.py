"""The versions of PyTorch whose DCP was tested."""

from __future__ import annotations

from functools import cache

from holdfast.integrations.host import Host

HOST = Host(
    integration="dcp",
    package="torch",
    extra="torch",
    tested_from=(2, 10, 0),
    tested_to=(2, 15, 0),
    model_key="model",
)
"""PyTorch, as this integration knows it: `docs/torch-versions.md`."""


@cache
def require_tested() -> None:
    """Require a tested version of torch; asked once, since a script may make a writer for each step.

    Raises:
        InvalidError: It was not tested.
    """
    HOST.require()
