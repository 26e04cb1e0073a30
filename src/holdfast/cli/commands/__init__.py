"""The commands of `holdfast`, one file each.

`cli/app.py` registers them. Read `ls.py` first, the simplest one.
A command parses arguments and prints. It calls `holdfast.api` and never a room below it.
"""
