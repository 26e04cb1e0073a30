"""One job's saves and loads: agreement among ranks, votes, outcome, handles, the run of many steps.

The only room that drives plan, engine and repository. It needs nothing beyond the standard library.
"""
