"""The tested torchtitan. The package imports this module first: an untested torchtitan is refused before it is used."""

from __future__ import annotations

from holdfast.integrations.host import Host

HOST = Host(
    integration="torchtitan",
    package="torchtitan",
    extra="torchtitan",
    tested_from=(0, 3, 0),
    tested_to=(0, 3, 0),
    model_key="model",
)

HOST.require()
