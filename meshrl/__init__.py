"""meshrl: RL post-training for language models on any device mesh."""

__version__ = "0.1.0"
