"""What loading, using and saving any model needs of Transformers, for the process that workers are forked from.

Each worker would take a quarter of a second for it, again at every restart.
"""

from __future__ import annotations

import transformers.modeling_layers
import transformers.processing_utils  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("any")  # at the first question hundreds of patterns are compiled, and kept
