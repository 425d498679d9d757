"""Training: a job becomes measured Steps, on one process or many.

from greylag.spec import load_job
from greylag.train.launch import launch

launch(["train", "jobs/first_flight.toml"], num_ranks=2)   # what `greylag train` does
"""
