"""Copies the files of steps from one store to another, each proven by its digest on the way; drains a step.

`offline/copying/`, `offline/repair/` and `training/` call it. Read `file_copies.py` first; `copied_files.py` says which
files a manifest needs, and `step_drain.py` drains a step.
It never stores bytes that a digest refutes, and never publishes a manifest before all files that it names.
"""
