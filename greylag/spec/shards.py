"""Shards: what of the weights, and of the optimizer's state, one rank holds, and in what portions it is gathered."""

from collections.abc import Callable

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.parts import Part, parts
from greylag.spec.precision import BLOCK, BYTES
from greylag.spec.strategy import Strategy


def units(model: Model) -> list[list[Part]]:
    """What is gathered and scattered together: each layer, and last the embedding, final norm and head."""
    every = [p for p in parts(model) if not p.is_buffer]
    groups = [[p for p in every if p.layer == layer] for layer in range(model.num_layers)]
    return [*groups, [p for p in every if p.layer is None]]


def held(part: Part, strategy: Strategy) -> float:
    """Elements of a weight that a rank works with: its tensor-parallel slice, its experts; of an average stage."""
    cut = strategy.tp if part.tp is not None else 1
    return part.size / cut / (strategy.ep if part.is_experts else 1) / strategy.pp


def shards_of(part: Part, strategy: Strategy) -> int:
    """Over how many ranks the state of a weight is sharded: those that hold the same elements, inside a replica."""
    s = strategy
    return max(1, s.shards * s.cp * s.tp // s.ep) if part.is_experts and s.ep > 1 else s.shards * s.cp


def unit_bytes(unit: list[Part], strategy: Strategy, width: Callable[[Part], float] | None = None) -> dict[int, float]:
    """Bytes of a unit, by number of ranks: dim 0 of every weight is padded to a multiple of them.

    `width` is bytes per element of a weight, 4 (gradients) if not given; `gathered_width` of what is gathered.
    """
    total: dict[int, float] = {}
    for part in unit:
        n = shards_of(part, strategy)
        padded = -(-part.shape[0] // n) * n / part.shape[0] if part.shape[0] >= n else 1.0
        total[n] = total.get(n, 0.0) + (width(part) if width else 4) * held(part, strategy) * padded
    return total


def gathered_width(job: Job) -> Callable[[Part], float]:
    """Bytes per element in which a weight travels when it is gathered."""
    bytes_of = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}

    def width(part: Part) -> float:
        layer = part.name.removesuffix(".weight")
        return bytes_of[job.precision.gathered(layer, job.model.num_layers)] if part.is_gemm else 4.0

    return width


def gathered_scales(job: Job) -> int:
    """Number of scales that the ranks agree on before weights are gathered as codes; of an average stage."""
    total = 0
    for part in parts(job.model):
        name, num_layers = part.name.removesuffix(".weight"), job.model.num_layers
        if not part.is_gemm or shards_of(part, job.strategy) == 1 or job.precision.gathered(name, num_layers) != "fp8":
            continue
        weight = job.precision.gemms(name, num_layers).forward.weight
        experts = part.shape[0] if len(part.shape) == 3 else 1
        blocks = experts * -(-part.shape[-2] // BLOCK) * -(-part.shape[-1] // BLOCK)
        total += 1 if weight.granularity == "tensor" else blocks
    return total // job.strategy.pp


def rank_parameters(job: Job, sharded: bool = True) -> float:
    """Parameters of an average stage that one rank holds; `sharded` also over the ranks that hold the same."""
    every = [p for p in parts(job.model) if not p.is_buffer]
    return sum(held(p, job.strategy) / (shards_of(p, job.strategy) if sharded else 1) for p in every)


def moment_bytes(job: Job, sharded: bool = True) -> float:
    """Bytes of AdamW's two moments on one rank of an average stage; `sharded` as in `rank_parameters`.

    In 8 bits a matrix has an FP32 scale per 128 elements of its last dim; vectors are FP32 then.
    """

    def width(moment: str, part: Part) -> float:
        stored = BYTES[moment.removesuffix("-root")]
        if stored > 1 or len(part.shape) == 1:
            return stored if stored > 1 else 4.0
        return stored + 4 * -(-part.shape[-1] // BLOCK) / part.shape[-1]

    p, total = job.precision, 0.0
    for part in parts(job.model):
        if not part.is_buffer:
            elements = held(part, job.strategy) / (shards_of(part, job.strategy) if sharded else 1)
            total += elements * (width(p.first_moment, part) + width(p.second_moment, part))
    return total
