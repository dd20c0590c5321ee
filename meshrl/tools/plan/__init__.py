"""`meshrl plan`: predict a run before it starts.

A plan has the memory by rank and phase, the traffic by mesh axis, the time by phase, and the layouts that fit.
"""
