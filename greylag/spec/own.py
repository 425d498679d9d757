"""Own: settings of a job that Greylag's own trainer does not know yet, though other frameworks do.

The trainer refuses a job for it. So does the simulator where it predicts that trainer, since the setting would have no
effect on the prediction.
"""

from collections.abc import Iterator

from greylag.spec.fault import error
from greylag.spec.finding import Finding
from greylag.spec.job import Job


def unknown_settings(job: Job) -> Iterator[Finding]:
    """Settings that Greylag's own trainer does not know, as errors. Degrees of pp, cp and tp are not among them."""
    s, model = job.strategy, job.model
    gated = not (model.activation == "gelu" and not model.moe)
    settings: dict[str, tuple[object, object]] = {
        "strategy.sequence_parallel": (s.sequence_parallel, True),
        "strategy.vp": (s.vp, 1),
        "strategy.etp": (s.etp, None),
        "strategy.schedule": (s.schedule, "1f1b"),
        "strategy.stage_layers": (s.stage_layers, ()),
        "strategy.overlap": (s.overlap, ("dp",)),
        "strategy.offload": (s.offload, ()),
        "strategy.recompute": (s.recompute, "none" if s.recompute == "none" else "full"),
        "strategy.recompute_layers": (s.recompute_layers, None),
        "model.window": (model.window, None),
        "model.bias": (model.bias, False if model.moe else model.bias),
        "model.parallel_block": (model.parallel_block, False),
        "model.num_mtp_layers": (model.num_mtp_layers, 0),
        "model.activation": (model.activation, "swiglu" if gated else "gelu"),
    }
    for key, (value, known) in settings.items():
        if value != known:
            yield error(key, f"{value!r}: Greylag's own trainer does not know it yet", f"leave it {known!r}")
