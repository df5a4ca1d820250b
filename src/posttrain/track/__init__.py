"""What a person sees of a run: local metrics, events and samples, the console, outside trackers, and the report."""

from posttrain.track.reference import METRICS, MetricDoc, describe
from posttrain.track.report import write_report
from posttrain.track.sinks import RunHeader, TrackError
from posttrain.track.tracker import Tracker

__all__ = ["METRICS", "MetricDoc", "RunHeader", "TrackError", "Tracker", "describe", "write_report"]
