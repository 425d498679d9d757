"""The language of a run: plain facts that the simulator, the trainer, the guard and the report all read.

from greylag.spec import load_job, num_parameters

job = load_job("jobs/first_flight.toml", ["run.steps=50"])
print(job, num_parameters(job.model), job.problems())
"""

from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.load import load_job
from greylag.spec.parts import num_active_parameters, num_parameters, parts
from greylag.spec.step import Step

__all__ = ["Finding", "Job", "SpecError", "Step", "load_job", "num_active_parameters", "num_parameters", "parts"]
