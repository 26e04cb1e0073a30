"""Trainer of Transformers saves and resumes through Holdfast: `class MyTrainer(HoldfastMixin, Trainer)`.

Training scripts import `HoldfastMixin`. Read `mixin.py` first. It replaces the methods of Trainer that save, rotate and
load checkpoints. It never decides when to save or where the data goes on: Trainer does.
"""

from holdfast.integrations.transformers.layout_rules import layout_of
from holdfast.integrations.transformers.mixin import HoldfastMixin

__all__ = ["HoldfastMixin", "layout_of"]
