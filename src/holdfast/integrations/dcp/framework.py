"""The versions of PyTorch whose DCP was tested."""

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
