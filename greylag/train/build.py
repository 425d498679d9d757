"""Build: from a job and a world to a model, an optimizer and data, ready to step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from greylag.model import Transformer
from greylag.numerics import Quantizer
from greylag.parallel import AllToAll, World, shard, spread
from greylag.spec import Job, SpecError
from greylag.spec.own import unknown_settings
from greylag.spec.parts import parts
from greylag.train.data import Corpus, find_files, require_text
from greylag.train.device import device_faults
from greylag.train.observers import quantizers
from greylag.train.optim import adamw


@dataclass
class Flight:
    """What one rank trains with."""

    job: Job
    world: World
    model: Transformer
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    validation: Corpus | None = None
    """The text of the validation loss, if the job asks for one."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of each text, by its name in `run`: what a resumed run must find again."""
        texts = {"data": self.corpus, "validation": self.validation}
        return {name: text.fingerprint for name, text in texts.items() if text}

    def tokens(self, text: Corpus, batch: int, micro_batch: int) -> Tensor:
        """This rank's micro-batch of a global batch of `text`, both counted from 0: (B, S + 1)."""
        job, world = self.job, self.world
        place = world.grid.data_rank(world.rank) * job.num_micro_batches + micro_batch
        size = job.strategy.micro_batch
        return text.windows(batch * job.global_batch + place * size, size).to(world.device)


def refuse(job: Job) -> None:
    """Raise SpecError with every reason why this job cannot be trained, or if its data is not there."""
    faults = [str(f) for f in job.problems() if f.level == "error"]
    s = job.strategy
    for axis in ("pp", "cp", "tp"):
        if getattr(s, axis) > 1:
            faults.append(f"strategy.{axis}: {getattr(s, axis)}: training knows only dp and ep so far; set {axis} = 1")
    if job.software.name != "greylag":
        faults.append(f"software.name: {job.software.name!r} is simulated alone; leave it 'greylag' to train")
    faults += map(str, unknown_settings(job))
    if s.ep not in (1, s.shards):
        faults.append(
            f"strategy.ep: {s.ep}: training spreads experts over all {s.shards} dp ranks of a replica or over none; "
            f"set ep = {s.shards} or 1, or as many replicas as make dp / replicas = {s.ep}"
        )
    elif s.ep > 1 and s.zero == 0:
        faults.append("strategy.zero: 0 leaves every weight whole on every rank, but ep spreads experts; set zero = 1")
    if job.model.vocab_size < 256:
        faults.append(f"model.vocab_size: {job.model.vocab_size}: byte tokens need 256")
    faults += device_faults(job)
    if faults:
        raise SpecError(f"{job.name}: " + "\n".join(faults))
    held_out = 0 if job.run.validation else job.validation_sequences
    require_text(job.run.data, job.sequence, held_out + 1)
    if job.run.validation:
        require_text(job.run.validation, job.sequence, job.validation_sequences, "run.validation")


def build(job: Job, world: World) -> Flight:
    """The rank's share of the job. Raises SpecError if the data cannot be read."""
    corpus, validation = _texts(job)
    exchange = None
    if job.strategy.ep > 1:
        assert job.model.moe
        exchange = AllToAll(world, job.model.moe.num_experts, job.precision.dispatch)
    model = Transformer(job.model, job.precision, exchange, job.strategy.recompute == "full")
    model.initialize(job.run.seed, world.grid.data_rank(world.rank))
    model.to(world.device)
    if exchange:
        spread(model, parts(job.model), world)
    shard(model, list(model.layers), job.strategy.zero, world, _gathered_as_operands(job, model))
    return Flight(job, world, model, adamw(model, job.run, job.precision), corpus, validation)


def _texts(job: Job) -> tuple[Corpus, Corpus | None]:
    """What to train on, and what to validate on: a text of its own, whatever the seed, or the end of the first."""
    run, count = job.run, job.validation_sequences
    corpus = Corpus(find_files(run.data), job.sequence, run.seed)
    if not count:
        return corpus, None
    if not run.validation:
        return corpus.split(count)
    files = find_files(run.validation, "run.validation")
    return corpus, Corpus(files, job.sequence, seed=0, at_least=count, key="run.validation")


def _gathered_as_operands(job: Job, model: Transformer) -> dict[str, Quantizer]:
    """By name, the weights that are gathered in the form that their quantizer makes of them, not in FP32."""
    found = quantizers(model)
    names = {part.name: part.name.removesuffix(".weight") for part in parts(job.model) if part.is_gemm}
    return {
        name: found[layer]
        for name, layer in names.items()
        if job.precision.gathered(layer, job.model.num_layers) != "fp32"
    }
