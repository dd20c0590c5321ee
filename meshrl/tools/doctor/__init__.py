"""`meshrl doctor`: check whether this machine, and the cluster around it, is fit for a run.

Each check returns findings.
"""
