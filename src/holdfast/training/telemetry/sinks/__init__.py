"""The observers that ship: JSON lines, Prometheus metrics, a progress bar.

Only `wiring` builds them. Read `jsonl.py` first, the shortest one.
A sink never raises into a save: the dispatcher isolates it.
"""
