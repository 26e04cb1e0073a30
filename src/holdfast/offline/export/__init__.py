"""Export: a checkpoint written as another system's files.

`wiring` calls it for `api.export` and `holdfast export`. Read `export.py` first.
Files never appear under their final name before all of them are complete.
"""
