"""Import: another system's checkpoint as a step of a run, by reference or copied.

`wiring` calls it for `api.import_checkpoint`. Read `import_step.py` first.
It never writes into the source.
"""
