"""Implementations of the ports: torch, stores, formats of other systems, codecs.

Only `_face/wiring.py` chooses among the implementations. Read `torch/` first.
An implementation imports `base/`, never `core/`, `stored/` or `training/`.
"""
