from ._audit import write_audit as write_audit
from ._fit import figures as figures
from ._fit import summary as summary
from ._fit import write_report as write_report
from ._fit import write_summary as write_summary
from ._render import write_figures as write_figures
from ._tuned import write_tuned as write_tuned
