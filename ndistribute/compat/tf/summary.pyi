# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.summaries import SummaryFile as _SummaryWriter
SummaryWriter = _SummaryWriter
from ndistribute.summaries import SummaryFile as _create_file_writer
create_file_writer = _create_file_writer
flush: Any
histogram: Any
image: Any
record_if: Any
scalar: Any
should_record_summaries: Any
text: Any
