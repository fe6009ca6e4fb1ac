"""`si.audit`, with what belongs to it."""

from sdeinfer.auditing import _recipes
from sdeinfer.auditing._audit import audit as _audit
from sdeinfer.auditing._initialise import initialise
from sdeinfer.auditing._scaling import Monitor, scaling


class Auditing:
    __doc__ = _audit.__doc__
    recipes = _recipes
    scaling = staticmethod(scaling)
    initialise = staticmethod(initialise)
    Monitor = Monitor
    __call__ = staticmethod(_audit)


audit = Auditing()
