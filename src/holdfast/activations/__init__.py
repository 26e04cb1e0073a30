"""Fits training into a memory budget: keeps, packs or recomputes each tensor that autograd needs.

`profile/` holds the measured values of a model, `solve/` chooses a treatment for every unit, and `runtime/` runs the
choice. Saves and loads of checkpoints know nothing of this room.
"""
