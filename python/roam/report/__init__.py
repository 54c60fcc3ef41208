"""What a plan costs and saves, for programs and for people."""

from roam.report.figures import Place, figures, peak_place
from roam.report.progress import Progress
from roam.report.summary import summary
from roam.report.table import format_bytes, plan_table

__all__ = ["Place", "Progress", "figures", "format_bytes", "peak_place", "plan_table", "summary"]
