"""Views of a run without Grafana: the terminal view, and the HTML report."""

from sgt_ds.report.access import Access
from sgt_ds.report.growth_time import GrowthPause, growth_pauses
from sgt_ds.report.history import RunHistory, read_histories, read_history
from sgt_ds.report.html import MAX_RUNS, html_report
from sgt_ds.report.sources import DirectorySource, ExporterSource, Source, open_source
from sgt_ds.report.terminal import render
from sgt_ds.report.view import LayerView, RankView, RunView

__all__ = [
    "MAX_RUNS",
    "Access",
    "DirectorySource",
    "ExporterSource",
    "GrowthPause",
    "LayerView",
    "RankView",
    "RunHistory",
    "RunView",
    "Source",
    "growth_pauses",
    "html_report",
    "open_source",
    "read_histories",
    "read_history",
    "render",
]
