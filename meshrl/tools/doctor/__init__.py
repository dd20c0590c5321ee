"""`meshrl doctor`: is this machine, and the cluster around it, fit for a run? Each check answers with findings."""
