"""A report of runs as one self-contained HTML file without scripts."""

from sgt_ds.report.html.page import MAX_RUNS, html_report

__all__ = ["MAX_RUNS", "html_report"]
