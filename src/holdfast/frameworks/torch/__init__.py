"""PyTorch: modules, optimizers and DTensors taken apart and filled in place; process groups and c10d stores.

The one room of the machine that imports torch. Nothing here knows files, plans or packs.
"""
