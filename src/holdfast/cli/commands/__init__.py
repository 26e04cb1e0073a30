"""The commands of `holdfast`, one file each.

`app.py` registers them. A command parses arguments and prints; it calls `holdfast.api` and never a room below it.
"""
