"""Lets FedLab import torchvision where a CUDA wheel of it meets a CPU's PyTorch, whose operators then do not load."""

import torch

operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
