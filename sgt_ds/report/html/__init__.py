"""A report of runs as one HTML file that needs no network and no script."""

from sgt_ds.report.html.page import MAX_RUNS, html_report

__all__ = ["MAX_RUNS", "html_report"]
