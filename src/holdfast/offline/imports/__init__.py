"""Import: another system's checkpoint as a step of a run, by reference or copied.

Read `import_step.py` first. It never writes into the source.
"""
