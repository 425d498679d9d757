"""Strategy: how one job is cut over ranks, and in what portions it is worked off.

The degrees use the field's axes: dp pp cp tp ep. `dp` counts every data-parallel rank; `replicas` of them
groups stand outside the device mesh and exchange gradients over bare process groups, so that one of them can
leave without disturbing the others, and the remaining `dp / replicas` ranks shard the state inside a replica.

A search puts numpy arrays in the place of the integers: what computes with them is arithmetic alone.
"""

from typing import Literal

import msgspec

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"]
RecomputeModule = Literal["attention", "norm", "activation", "mla_up", "mlp", "moe"]
Overlapped = Literal["dp", "tp", "ep", "pp"]


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Degrees of parallelism and the portions of work."""

    dp: int | None = None
    """Data-parallel degree; None takes the ranks that pp, cp and tp leave over."""
    replicas: int = 1
    """How many data-parallel replicas stand outside the mesh; must divide dp."""
    pp: int = 1
    vp: int = 1
    """Virtual stages (model chunks) per rank; `interleaved`, `zb-v` and `dualpipe-v` have more than one."""
    cp: int = 1
    tp: int = 1
    """Tensor-parallel degree."""
    sequence_parallel: bool = True
    """Whether the tp ranks also cut, along the sequence, what lies outside the GEMMs (arXiv 2205.05198, section 4.2).
    Without it each works on all of it, and sums are all-reduced (arXiv 1909.08053, section 3)."""
    ep: int = 1
    """Expert-parallel degree; its groups are taken from the ranks of dp, cp and tp inside a replica."""
    etp: int | None = None
    """Tensor-parallel degree of experts; None takes tp."""
    zero: Literal[0, 1, 2, 3] = 1
    """What the dp ranks of a replica shard within a step (ZeRO, arXiv 1910.02054): 1 the optimizer state, 2 also the
    gradients, 3 also the parameters. Between steps parameters rest as shards at every level but 0."""
    micro_batch: int = 1
    """Sequences per rank in one forward."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each of the pp x vp stages, in the model's order; empty spreads them as evenly as it goes."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it (arXiv 1604.06174): full keeps the input of each layer and
    runs the layer's forward again, selective does so for some modules (arXiv 2205.05198). Losses keep their bits."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """What `selective` computes again."""
    recompute_layers: int | None = None
    """In how many layers of each stage; None in all."""
    schedule: Schedule = "1f1b"
    overlap: tuple[Overlapped, ...] = ("dp",)
    """Communication that runs beside compute on an accelerator."""
    offload: tuple[Literal["optimizer", "activations"], ...] = ()
    """What lies in the host's memory."""

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks, 1 where they are not said."""
        return 1 if self.dp is None else self.dp

    @property
    def shards(self) -> int:
        """Data-parallel ranks inside one replica."""
        return self.data_parallel // self.replicas

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.data_parallel * self.pp * self.cp * self.tp

    @property
    def sequence_cut(self) -> int:
        """Ranks over which what lies outside the GEMMs is cut."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, virtual ones counted."""
        return self.pp * self.vp

    @property
    def brief(self) -> str:
        """What a reader compares of it, in a line."""
        words = [f"{axis}{getattr(self, axis)}" for axis in ("pp", "vp", "tp", "cp", "ep") if getattr(self, axis) > 1]
        words += [f"etp{self.etp}"] * (self.etp is not None)
        words += [f"dp{self.dp}", f"mb{self.micro_batch}", f"zero{self.zero}"]
        words += [self.schedule] * (self.pp > 1)
        words += ["+".join(self.recompute_modules) or self.recompute] * (self.recompute != "none")
        words += [f"ends {self.stage_layers[0]}..{self.stage_layers[-1]} layers"] if self.stage_layers else []
        return " ".join(words)
