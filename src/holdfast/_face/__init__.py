"""Code behind the public functions: checks arguments, chooses backends, calls verbs.

`holdfast.api`, `holdfast.pieces` and the command import it. Read `wiring.py` first.
No code of a user imports this folder: its names are private.
"""
