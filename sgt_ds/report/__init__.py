"""What a person reads of a run without Grafana: the terminal view."""

from sgt_ds.report.sources import DirectorySource, ExporterSource, Source, open_source
from sgt_ds.report.terminal import render
from sgt_ds.report.view import LayerView, RunView

__all__ = [
    "DirectorySource",
    "ExporterSource",
    "LayerView",
    "RunView",
    "Source",
    "open_source",
    "render",
]
