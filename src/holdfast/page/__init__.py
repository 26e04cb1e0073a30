"""The page: a run or a checkpoint in a browser, and in one file that can be mailed.

`holdfast serve` makes the page. Read `app.py` first; `templates/` holds the pages.
The page imports public names alone, writes to no root, and has no route that changes anything.
"""
