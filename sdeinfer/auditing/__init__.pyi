from ._audit import audit as audit
from ._estimates import Estimate as Estimate
from ._figure import plot_audit as plot_audit
from ._over_depth import over_depth as over_depth
from ._recipe import Matrix as Matrix
from ._recipe import Recipe as Recipe
from ._recipe import declared as declared
from ._result import Audit as Audit
