"""Commands around a run: what it will take, whether machine and layout are fit, and verl's scripts as ours."""
