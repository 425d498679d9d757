"""Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241), tables 4 and 5: pipeline only, four schedules.

Rules of the paper: first and last stage hold one layer less (section 5.1; 22 layers on 8 stages are 2, 3 x 6, 2),
GPT-3's kind of model, Megatron-LM with its mixed precision (FP16 or BF16 is not said; they cost the same). The
vocabulary is not printed: GPT-2's of 50257, padded to 128. ZB-1p is ZB-H1 by another name for the same memory (ZB-1p
orders automatically within 1F1B's memory), ZB-2p the same for ZB-H2. The interleaved schedule's chunks are one layer
each: the paper's computed bubble rates are those of as many chunks as a stage has layers. No recompute, no overlap of
pipeline messages. The table prints samples per GPU and second: GBS / (GPUs x step).
"""

from greylag.spec.job import Job
from truth_rows.dims import GPT2_VOCAB, gpt
from truth_rows.row import Dialect, Raw, balanced_stages, make_job, peak, printed

_SCHEDULES = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}


def _job(raw: Raw, models: Raw) -> Job:
    p, b, layers = raw["parallel"], raw["batch"], raw["model"]["layers"]
    schedule = _SCHEDULES[raw["options"]["schedule"]]
    each = (layers + 2) // p["pp"]
    vp = each if schedule == "interleaved" else 1
    return make_job(
        raw,
        model=gpt(raw["model"], models, GPT2_VOCAB, 128),
        precision="bf16",
        software="zero-bubble",
        strategy={
            "dp": p["dp"],
            "pp": p["pp"],
            "micro_batch": b["mbs"],
            "zero": 0,
            "schedule": schedule,
            "overlap": (),
            "vp": vp,
            "stage_layers": balanced_stages(layers, p["pp"] * vp),
        },
    )


DIALECT = Dialect(
    "zero_bubble",
    _job,
    printed("step_time_s_derived"),
    lambda raw: "zero-bubble",
    peak("peak_memory_gb", unit=2**30),
)
