"""Recipes that come with the package, found by name: `meshrl train grpo ...`."""
