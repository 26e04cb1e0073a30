"""Frozen values that describe a measured model and its plan: ops, columns, costs.

`runtime/` measures the values, `solve/` chooses by the values, plan files store them. Nothing here imports torch, reads
a file or decides. Read `unit_profile.py` first.
"""
