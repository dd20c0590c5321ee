"""Serving a model over OpenAI's HTTP interface, and generating for a file of prompts."""
