"""What a run will need before it starts: memory by rank and phase, traffic by axis, time by phase, and what fits."""
