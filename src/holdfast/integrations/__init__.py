"""Holdfast under the verbs of other frameworks: one module or folder each, in the framework's own shape.

Users import it: `from holdfast.integrations.accelerate import Accelerator`. It uses Holdfast's public names only. Read
`host.py` first. It never imports a framework before its module is imported, and no framework imports another's.
"""
