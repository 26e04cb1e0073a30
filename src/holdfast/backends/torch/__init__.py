"""PyTorch: modules, optimizers and DTensors taken apart and filled in place; process groups and c10d stores.

`wiring` builds it. Read `framework.py` first; `state/` and `optimizers/` hold the parts.
Besides `integrations/` and `testing/`, no other room imports torch. Nothing here knows files, plans or packs.
"""
