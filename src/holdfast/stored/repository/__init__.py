"""The files of a run directory, and which of them count: catalog, publish, epochs, leases, quarantine, tags, removal.

`stored/checkpoint/`, `stored/leases/`, `training/` and `offline/` call it. Read `catalog.py` first.
It never moves tensor bytes (`core/engine/` does) and never decides what to keep (`training/runs/` does).
"""
