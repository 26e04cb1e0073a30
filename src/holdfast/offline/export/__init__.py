"""Export: a checkpoint written as another system's files.

Read `export.py` first. Files appear under their final name only when all of them are whole.
"""
