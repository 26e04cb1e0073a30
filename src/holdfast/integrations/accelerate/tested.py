"""The versions of Accelerate under which this integration works."""

from __future__ import annotations

from holdfast.integrations.host import Host

HOST = Host(
    integration="accelerate",
    package="accelerate",
    extra="accelerate",
    tested_from=(1, 15, 0),
    tested_to=(1, 15, 0),
    model_key="model",
)
"""Accelerate, as this integration knows it."""
