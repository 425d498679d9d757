"""The report of a run: one HTML page that needs no network, from a run folder that may be anyone's.

    from pathlib import Path
    from greylag.report.run import write_report

    print(write_report(Path("runs/first_flight")))  # runs/first_flight/report.html

It reads `job.json` and `steps.jsonl`, and `predicted.json` and `findings.jsonl` where they exist.
"""

from greylag.report.record import RunRecord, read_record

__all__ = ["RunRecord", "read_record"]
