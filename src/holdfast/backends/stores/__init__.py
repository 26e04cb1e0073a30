"""Stores: implementations of `base/ports/store.py`, and the key rules, system calls and error translation they need.

`wiring` builds them; every other room sees only the port. Read `local.py` first.
A store never knows what the bytes mean, and no store imports another.
"""
