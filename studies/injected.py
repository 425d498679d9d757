"""`greylag train` with outliers injected into SwiGLU's output.

In every layer two channels of SwiGLU's output hold a large number at every 50th token, in the place of what they would
hold. The down-projection has zeros for these channels, and they stay zero. So the function, its gradients and its
training in exact arithmetic know nothing of the outliers, which act through quantization alone: the sporadic outliers
that SwiGLU grows late in training (arXiv 2409.12517), at once and without their other consequences.
"""

import sys

import torch
from torch import Tensor

import greylag.numerics.swiglu as module
from greylag.cli import main
from greylag.model import Transformer
from greylag.numerics.cache import Kept

CHANNELS = (5, 300)
EVERY = 50
SIZE = 3e5
swiglu, initialize = module.swiglu, Transformer.initialize


def with_outliers(x: Tensor, kept: Kept | None = None) -> Tensor:
    y = swiglu(x, kept).clone()
    y[:, CHANNELS] = 0.0
    y[::EVERY, CHANNELS] = SIZE
    return y


def blind_to_them(self: Transformer, seed: int, rank: int = 0) -> None:
    initialize(self, seed, rank)
    channels = torch.tensor(CHANNELS)
    for layer in self.layers:
        weight = layer.ffn.w_down.weight
        with torch.no_grad():
            weight[:, channels] = 0.0
        weight.register_hook(lambda g: g.index_fill(1, channels, 0.0))


def inject() -> None:
    """Change SwiGLU and the initial weights of models that are built from now on."""
    module.swiglu, Transformer.initialize = with_outliers, blind_to_them  # type: ignore[method-assign]


if __name__ == "__main__":
    inject()
    sys.argv[1:1] = ["train"]
    main()
