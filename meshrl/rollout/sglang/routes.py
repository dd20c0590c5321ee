"""Routes as SGLang returns them (see `meshrl.models.routes`)."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig

from meshrl.models.loading import empty_causal_lm
from meshrl.models.routes import find_routers, layers_with_experts, route_dtype


@dataclass(frozen=True)
class RoutedLayers:
    """SGLang writes down where tokens went in all layers, also those without experts."""

    total: int
    with_experts: list[int]
    num_experts: int
    per_token: int

    @staticmethod
    def of(config: PretrainedConfig) -> RoutedLayers:
        """Those of a model."""
        model = empty_causal_lm(config, "eager", torch.float32)
        routers = find_routers(model)
        if not routers:
            raise ValueError(f"a model of type {config.model_type} has no experts: there are no routes to return")
        layers = layers_with_experts(model)
        return RoutedLayers(int(config.num_hidden_layers), layers, len(routers[0].weight), int(routers[0].top_k))

    def read(self, written: str) -> np.ndarray:
        """The routes of all tokens but the last."""
        numbers = np.frombuffer(base64.b64decode(written), np.int32)
        together = numbers.reshape(-1, self.total, self.per_token)
        return together[:, self.with_experts].astype(route_dtype(self.num_experts))
