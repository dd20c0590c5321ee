"""What every worker with a model does first."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from meshrl.config.functions import import_code
from meshrl.config.model import ModelConfig
from meshrl.parallel.mesh import init_process_group, prepare_device


def join_ranks(device: str, local_rank: int, deadline: float) -> torch.device:
    """Prepares this rank's device and joins the other ranks of its group; returns the device."""
    transformers_logging.disable_progress_bar()
    own = prepare_device(device, local_rank)
    init_process_group(own, deadline)
    return own


def import_external_lib(model: ModelConfig) -> None:
    """Imports the user's own module, which may register losses and models, before the model is made."""
    if model.external_lib:
        import_code(model.external_lib)
