"""What a fit leaves for people and machines: a page, its figures, and a summary in numbers."""

from sdeinfer.report._page import figures as figures
from sdeinfer.report._page import write_figures as write_figures
from sdeinfer.report._page import write_report as write_report
from sdeinfer.report._summary import summary as summary
from sdeinfer.report._summary import write_summary as write_summary
