"""A worker whose module asks for a GPU when it is imported, as many do."""

import torch

from meshrl.controller import Worker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Asking(Worker):
    preload = (__name__,)

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(DEVICE) ** 2
