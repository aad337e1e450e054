"""timm and diffusers import torchvision. One that was built for another PyTorch, such as for CUDA beside a PyTorch for
the CPU, cannot load its operators, and stops where it describes two of them. No test calls them."""

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass  # the tests say so themselves
except RuntimeError:
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
