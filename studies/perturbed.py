"""`greylag train` from weights of which one matrix differs by one part in a million: a study's control."""

import sys

import torch

from greylag.cli import main
from greylag.model import Transformer

initialize = Transformer.initialize


def perturbed(self: Transformer, seed: int, rank: int = 0) -> None:
    initialize(self, seed, rank)
    with torch.no_grad():
        self.layers[0].attention.wqkv.weight.mul_(1 + 1e-6)


if __name__ == "__main__":
    Transformer.initialize = perturbed  # type: ignore[method-assign]
    sys.argv[1:1] = ["train"]
    main()
