"""Frozen values that describe a measured model: ops, columns, costs. Nothing here imports torch.

Read `unit_profile.py` first. The measuring itself lives in `runtime/`.
"""
