"""For tests only: torchvision's PyPI wheels need CUDA libraries; its Python part wants two of their names to exist.

They are made when torchvision is first imported: many processes never do.
"""

import sys
from typing import Any

kept: list[Any] = []


class Declaring:
    """Finds nothing; it is asked before torchvision is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            kept.append(library)


sys.meta_path.insert(0, Declaring())
