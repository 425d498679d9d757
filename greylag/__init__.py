"""Greylag plans, checks, trains and lands FP8 training runs of large models.

One `Job`, described once by plain facts, is what the simulator predicts, the trainer executes and the
report lays side by side:

    from greylag.spec import load_job
    from greylag.sim import predict

    print(predict(load_job("jobs/llama-3-8b_h100_pretrain.toml")))
"""

__version__ = "0.1.0"
