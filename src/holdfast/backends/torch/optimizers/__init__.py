"""Optimizer state by FQN: taken apart, and filled again.

`state/` calls it. Read `state.py` first.
It never calls `optimizer.step()`.
"""
