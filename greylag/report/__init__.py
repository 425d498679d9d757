"""The report of a run: one HTML page that needs no network, from a run folder that may be anyone's.

    from pathlib import Path
    from greylag.report.run import write_report

    print(write_report(Path("runs/first_flight")))  # runs/first_flight/report.html

It reads `job.json` and `steps.jsonl`, and where they exist `predicted.json`, `findings.jsonl`, `audit.jsonl` and
`telemetry.jsonl`. `greylag audit` and `greylag advise` (`audit`, `advise`) read the last two and the job alone.
"""

from greylag.report.record import RunRecord, read_record

__all__ = ["RunRecord", "read_record"]
