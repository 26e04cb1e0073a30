"""Chooses a column for each unit: a MILP per class of units, then one for the model. Read `solve.py` first.

`fit` and a plan that gets another budget call this room. It is pure: no torch, file, clock or randomness. Only
`mixed_program.py` imports scipy.
"""
