"""The wire between the agents of nodes and the ranks: HTTP/1.1 framed by h11, with a proof in every header.

The agent that serves a folder calls this room, and so does its client in `backends/stores/peers/`.
Read `framing.py` first.
The room needs the extra `agent`, and never decodes anything but headers and pages of names: no pickle, no pack.
"""
