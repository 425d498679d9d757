"""Notebook: a prediction in one call, with what a command would look up beside it."""

from greylag.sim import predict as predict_with
from greylag.spec import Job, SpecError, Step
from greylag.spec.calibration import load_local
from greylag.spec.cluster import Calibration


def predict(job: Job, calibration: Calibration | None = None) -> Step:
    """The predicted Step of a job; it prints itself as a table.

    A `local` cluster takes this machine's calibration where none is given. Raises SpecError if the job has problems,
    the machine was not calibrated, or the cluster lacks a figure that it needs.
    """
    problems = job.problems()
    if problems:
        raise SpecError(f"{job.name}: " + "\n".join(map(str, problems)))
    if job.cluster.is_local and calibration is None:
        calibration = load_local()
    return predict_with(job, calibration)
