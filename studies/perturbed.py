"""`greylag train` from weights that are each off by a random share of themselves: a study's control.

Usage: perturbed.py SHARE JOB [what `greylag train` takes]
"""

import sys

import torch

from greylag.cli import main
from greylag.model import Transformer

initialize = Transformer.initialize
share = float(sys.argv.pop(1))


@torch.no_grad()
def perturbed(self: Transformer, seed: int, rank: int = 0) -> None:
    initialize(self, seed, rank)
    generator = torch.Generator().manual_seed(seed)
    for weight in self.parameters():
        weight.mul_(1 + share * torch.randn(weight.shape, generator=generator))


if __name__ == "__main__":
    Transformer.initialize = perturbed  # type: ignore[method-assign]
    sys.argv[1:1] = ["train"]
    main()
