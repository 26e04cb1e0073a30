"""The suites that every implementation of a port must pass, and wrappers that inject faults.

The author of a store or codec subclasses the suite in their own tests. Read `store.py` first, then `faults.py`;
`calls.py` counts what a store is asked.
No module outside this room imports it.
"""
