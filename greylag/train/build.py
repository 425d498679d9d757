"""Build: from a job and a world to a model, an optimizer and data, ready to step."""

from dataclasses import dataclass

import torch

from greylag.model import Transformer
from greylag.numerics.gemm import device_refusal
from greylag.parallel import World, shard
from greylag.spec import Job, SpecError
from greylag.train.data import Corpus, find_files, require_text
from greylag.train.optim import adamw


@dataclass
class Flight:
    """What one rank trains with."""

    job: Job
    world: World
    model: Transformer
    optimizer: torch.optim.Optimizer
    corpus: Corpus


def refuse(job: Job) -> None:
    """Raise SpecError with every reason why this job cannot be trained, or if its data is not there."""
    faults = [str(f) for f in job.problems() if f.level == "error"]
    s = job.strategy
    for axis in ("pp", "cp", "tp", "ep"):
        if getattr(s, axis) > 1:
            faults.append(f"strategy.{axis}: {getattr(s, axis)}: training knows only dp so far; set {axis} = 1")
    if job.model.vocab_size < 256:
        faults.append(f"model.vocab_size: {job.model.vocab_size}: byte tokens need 256")
    if job.cluster.device.kind == "cuda" and not torch.cuda.is_available():
        faults.append(
            f"cluster: '{job.cluster.name}' is made of CUDA devices, and torch finds none here; use local-NxM"
        )
    elif job.cluster.device.kind == "cuda" and job.precision.is_fp8:
        blocks = job.precision.input.granularity != "tensor"
        reason = device_refusal(blocks, torch.cuda.get_device_capability())
        if reason:
            faults.append(f"precision: {reason}; choose another precision")
    if job.cluster.device.kind == "musa":
        faults.append(
            f"cluster: '{job.cluster.name}': training on MUSA devices has not been built yet; simulate takes it"
        )
    if faults:
        raise SpecError(f"{job.name}: " + "\n".join(faults))
    require_text(job.run.data, job.sequence)


def build(job: Job, world: World) -> Flight:
    """The rank's share of the job. Raises SpecError if the data cannot be read."""
    corpus = Corpus(find_files(job.run.data), job.sequence, job.run.seed)
    model = Transformer(job.model, job.precision)
    model.initialize(job.run.seed)
    model.to(world.device)
    shard(model, list(model.layers), job.strategy.zero, world)
    return Flight(job, world, model, adamw(model, job.run), corpus)
