"""Observers: what saves and loads do, as lines of JSON, as metrics of Prometheus, as a bar on a terminal.

Each hears events and knows nothing of who saves or loads, nor of the others. How a user asks for one lives in
`holdfast.observers`; events themselves in `spec/events.py`.
"""
