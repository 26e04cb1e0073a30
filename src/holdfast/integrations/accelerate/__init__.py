"""Accelerate's verbs over Holdfast: `from holdfast.integrations.accelerate import Accelerator`, and the script stays.

Training scripts use it in place of `accelerate.Accelerator`. Read `accelerator.py` first. It never writes or reads a
pickle: what Accelerate itself wrote is loaded by Accelerate.
"""

from holdfast.integrations.accelerate.tested import HOST

HOST.require()  # Before the import of Accelerate, which would fail without saying what to do.

from holdfast.integrations.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
