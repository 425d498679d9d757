"""Small jobs for tests, on the tiny presets."""

from typing import Any

from greylag.spec import Job
from greylag.spec.load import job_from


def tiny_job(model: str | dict = "deepseek-v3-tiny", precision: str = "fp32", dp: int = 1, **changes: Any) -> Job:
    """A job of a few steps; `changes` are keys of the job, `strategy`, `run` and `precision` tables among them."""
    table = {
        "model": model,
        "precision": {"preset": precision, "high": "fp32", **changes.pop("precision_table", {})},
        "cluster": f"local-{dp}x1",
        "sequence": 64,
        "global_batch": 4,
        "strategy": {"dp": dp, **changes.pop("strategy", {})},
        "run": {"steps": 4, "warmup_steps": 2, "learning_rate": 1e-3, "checkpoint_every": 0, "tensorboard": False,
                **changes.pop("run", {})},
        **changes,
    }  # fmt: skip
    job = job_from(table, name="tiny")
    assert not job.problems(), job.problems()
    return job


SMALL_MOE = {
    "preset": "deepseek-v3-tiny",
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "moe": {"ffn_hidden_size": 128},
}
"""A smaller sibling of the first flight's model: one dense layer, one with experts."""
