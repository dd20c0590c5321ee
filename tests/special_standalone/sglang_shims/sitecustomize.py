"""For tests only: torchvision's PyPI wheels need CUDA libraries; its Python part wants these two names to exist."""

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if torch.version.cuda is None:
    # To record routes it wants host memory that a GPU can read, whether there is one or not.
    class _NoGpu:
        @staticmethod
        def cudaHostRegister(*arguments: int) -> int:  # noqa: N802
            return 0

    torch.cuda.cudart = _NoGpu
