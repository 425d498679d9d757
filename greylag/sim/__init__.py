"""The simulator: a job becomes a predicted Step. Works without torch.

from greylag.spec import load_job
from greylag.sim import predict

step = predict(load_job("jobs/first_flight.toml", ["cluster=h100-2x1"]))
print(step.total_seconds, step.utilization, step.bytes)
"""

from greylag.sim.memory import predict_memory
from greylag.sim.predict import peak_flops, predict

__all__ = ["peak_flops", "predict", "predict_memory"]
