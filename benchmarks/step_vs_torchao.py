"""Step time: a Llama-like model in FP32, in FP8 by greylag, and in FP8 by torchao, in one process, round by round.

All train the same network from the same weights on the same tokens, AdamW included, on one CPU thread and with FP32
between the linear layers; the head stays out of FP8. A round is one step of each, so that a busy machine slows all
alike. Times are CPU seconds of the process; medians over the rounds.

    python benchmarks/step_vs_torchao.py [rounds]
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model import Transformer
from greylag.numerics import Linear
from greylag.spec.load import load_preset

MODEL, BATCH, SEQUENCE = "llama-3-tiny", 4, 256
WARMUP = 3
TORCHAO = "torchao 0.18 tensorwise, emulated"


@dataclass
class Contestant:
    """A model under training and what its steps cost."""

    name: str
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, tokens: Tensor) -> None:
        start = time.process_time()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.process_time() - start)
        self.loss = loss.item()

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[WARMUP:])


def ours(precision: str) -> Transformer:
    """The network with greylag's linear layers."""
    recipe = msgspec.structs.replace(load_preset("precision", precision), high="fp32")
    model = Transformer(load_preset("model", MODEL), recipe)
    model.initialize(seed=0)
    return model


class Plain(nn.Module):
    """A torch.nn.Linear with the weight of ours where the model expects one of ours."""

    def __init__(self, one: Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(one.in_features, one.out_features, bias=one.bias is not None)
        self.linear.weight = one.weight
        self.quantizer = one.quantizer

    def forward(self, x: Tensor, *_: object) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def plain() -> Transformer:
    """The same network with torch.nn.Linear in the place of each of ours."""
    model = ours("fp32")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, Plain(child))
    return model


def torchao() -> nn.Module | None:
    """The same network under torchao's float8 training; None where torchao is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    config = Float8LinearConfig(emulate=True)
    return convert_to_float8_training(plain(), config=config, module_filter_fn=lambda _, name: name != "head")


def batches() -> Iterator[Tensor]:
    """Tokens (BATCH, SEQUENCE + 1) to learn from: each follows from the last by a fixed map, one in ten by chance."""
    generator = torch.Generator().manual_seed(1)
    after = torch.randperm(256, generator=generator)
    while True:
        tokens = torch.randint(256, (BATCH, SEQUENCE + 1), generator=generator)
        chance = torch.rand(tokens.shape, generator=generator) < 0.1
        for i in range(1, SEQUENCE + 1):
            tokens[:, i] = torch.where(chance[:, i], tokens[:, i], after[tokens[:, i - 1]])
        yield tokens


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.set_num_threads(1)
    peer = torchao()
    if peer is None:
        print("torchao is not installed; pip install torchao==0.18.0 --no-deps")
        return
    fp32, block, tensor, ao = contestants = [
        Contestant("FP32, torch.nn.Linear", plain()),
        Contestant("greylag fp8-block128", ours("fp8-block128")),
        Contestant("greylag fp8-tensor-current", ours("fp8-tensor-current")),
        Contestant(TORCHAO, peer),
    ]
    data = batches()
    for _ in range(rounds + WARMUP):
        tokens = next(data)
        for contestant in contestants:
            contestant.step(tokens)
    print(f"{MODEL}, {BATCH} x {SEQUENCE} tokens, 1 thread, torch {torch.__version__}, {rounds} rounds")
    print(f"{'':34} {'ms/step':>8} {'/ FP32':>7} {'/ torchao':>9} {'loss':>8}")
    for c in contestants:
        print(f"{c.name:34} {c.ms:8.1f} {c.ms / fp32.ms:7.2f} {c.ms / ao.ms:9.2f} {c.loss:8.4f}")
    print(f"ours/torchao: block {block.ms / ao.ms:.2f}, tensor {tensor.ms / ao.ms:.2f}")
    print(f"ours/FP32: block {block.ms / fp32.ms:.2f}, tensor {tensor.ms / fp32.ms:.2f}")


if __name__ == "__main__":
    main()
