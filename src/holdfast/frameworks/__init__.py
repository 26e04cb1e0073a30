"""Tensor frameworks: a framework turns a state into shards, fills it again, and connects the ranks.

`wiring` picks one; saving and loading see it through `ports/framework.py`. Read `torch/framework.py` first.
`alone.py` serves a process without other ranks. No framework imports a room of the machine.
"""
