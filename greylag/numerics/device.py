"""Device: which implementation of an operator the device of a tensor gets (`kernels.choose` holds the rule)."""

import torch
from torch import Tensor

from greylag.numerics.kernels import What, choose


def implementation(x: Tensor, what: What) -> str:
    """Name of the implementation of `what` on the device of `x`."""
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    return choose(x.device.type, capability, what)


def by_kernel(x: Tensor, what: What) -> bool:
    """Whether a kernel of `numerics.kernels` does it."""
    return implementation(x, what).startswith("triton")
