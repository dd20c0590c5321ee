"""Inference outside training: an OpenAI-compatible HTTP server, and offline generation for a file of prompts."""
