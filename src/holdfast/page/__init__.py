"""The page: a run or a checkpoint in a browser, and in one file that can be mailed.

`holdfast serve` calls it. Read `app.py` first; `templates/` holds the pages.
It imports public names alone, writes to no root, and has no route that changes anything.
"""
