"""Notebook: a prediction in one call, and what it takes, which the commands take too: a sound job, a calibration."""

from greylag.sim import predict as predict_with
from greylag.spec import Job, SpecError, Step
from greylag.spec.calibration import load_local
from greylag.spec.cluster import Calibration


def predict(job: Job, calibration: Calibration | None = None) -> Step:
    """The predicted Step of a job; it prints itself as a table.

    A `local` cluster takes this machine's calibration where none is given. Raises SpecError if the job has problems,
    the machine was not calibrated, or the cluster lacks a figure that it needs.
    """
    require_no_problems(job)
    return predict_with(job, calibration or calibration_of(job))


def require_no_problems(job: Job) -> None:
    """Raise SpecError with all problems of a job, if it has any."""
    problems = job.problems()
    if problems:
        raise SpecError(f"{job.name}: " + "\n".join(map(str, problems)))


def calibration_of(job: Job) -> Calibration | None:
    """This machine's calibration for a job on `local`, else None. Raises SpecError if it was not calibrated."""
    return load_local() if job.cluster.is_local else None
