"""What the ranks' traces say together: one file on one clock, and a report in words.

`ndistribute.timeline` writes a trace for each rank. Here they are read, also those of processes
that were killed while writing; what follows is pure functions over their events.
"""

from ndistribute.trace_report.lateness import Lateness, lateness
from ndistribute.trace_report.merging import merge
from ndistribute.trace_report.reading import Event, Trace, read
from ndistribute.trace_report.report import explain, report

__all__ = ["Event", "Lateness", "Trace", "explain", "lateness", "merge", "read", "report"]
