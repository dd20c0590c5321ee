"""Imports of Transformers for the process that workers are forked from.

They cover loading, using and saving any model. Without them, each worker would spend a quarter of a second on them, and
again at every restart.
"""

from __future__ import annotations

import transformers.modeling_layers
import transformers.processing_utils  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("any")  # the first call compiles hundreds of patterns and caches them
