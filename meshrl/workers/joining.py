"""What every worker with a model does first."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from meshrl.parallel.mesh import init_process_group, prepare_device


def join_ranks(device: str, local_rank: int, deadline: float) -> torch.device:
    """Prepares this rank's device and joins the other ranks of its group; returns the device."""
    transformers_logging.disable_progress_bar()
    own = prepare_device(device, local_rank)
    init_process_group(own, deadline)
    return own
