"""What stands behind the public functions: arguments are checked, backends are chosen, verbs are called.

`holdfast.api`, `holdfast.pieces` and the command import it. Read `wiring.py` first.
No code of a user imports this folder: its names are private.
"""
