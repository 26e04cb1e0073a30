"""The files of a run directory, and which of them count: catalog, publish, epochs, leases, quarantine, tags, removal.

`checkpoint/`, saving, loading, `runs/`, `leases/` and `offline/` call it. Read `catalog.py` first.
It never moves tensor bytes (`engine/` does) and never decides what to keep (`runs/` does).
"""
