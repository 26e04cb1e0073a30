"""The exit of a loop after a signal: handlers, the agreement on the last call, and the grace that is left.

Only `training/runs/preemption.py` and the manager call it. Read `exit_agreement.py` first.
It saves nothing by itself.
"""
