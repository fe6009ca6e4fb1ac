from ._audit import write_audit as write_audit
from ._page import figures as figures
from ._page import write_report as write_report
from ._render import write_figures as write_figures
from ._summary import summary as summary
from ._summary import write_summary as write_summary
from ._tuned import tuned_figures as tuned_figures
from ._tuned import write_tuned as write_tuned
