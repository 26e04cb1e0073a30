"""Events, phases and reports of saves and loads, per rank.

Saving, loading and `offline/` call it; `sinks/` holds the observers that ship. Read `operation.py` first.
An observer can never delay or fail a save.
"""
