"""Greylag plans, checks, trains and lands FP8 training runs of large models.

One `Job`, described once by plain facts, is what the simulator predicts, the trainer executes and the
report lays side by side:

    from greylag import load_job, predict

    predict(load_job("jobs/llama-3-8b_h100_pretrain.toml"))

Both names are found when they are first asked for, so that `import greylag` brings nothing else.
"""

from greylag.lazy import __getattr__ as __getattr__

__all__ = ["SpecError", "load_job", "predict"]
__version__ = "0.1.0"
