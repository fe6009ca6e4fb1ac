"""`si.audit`, with what belongs to it. Tests: `tests/auditing/test_audit.py`."""

from typing import Any

from sdeinfer.auditing import _recipes
from sdeinfer.auditing._audit import audit as _audit
from sdeinfer.auditing._facts import FAILS
from sdeinfer.auditing._initialise import initialise
from sdeinfer.auditing._monitor import Monitor
from sdeinfer.auditing._scaling import scaling


def assert_initialised(model: Any, inputs: Any = None, *, recipe: Any = "auto", **settings: Any) -> None:
    """Raise an AssertionError with the verdict and the tensors that failed unless a model passes; see `audit`.

    What is declared and not tested fails, unless `allow` names it.
    """
    found = _audit(model, inputs, recipe=recipe, **settings)
    if found.passed:
        return
    rows = [row for row in found.table() if row["failed"]]
    table = [
        f"  {row['name']}  {row['role']}  σ {row['sd']:.4g}  declared {row['declared']}  {row['failed']}"
        for row in rows
    ]
    raise AssertionError("\n".join([found.verdict, *table[:40], *found.untested]))


class Auditing:
    __doc__ = _audit.__doc__
    recipes = _recipes
    FAILS = FAILS
    assert_initialised = staticmethod(assert_initialised)
    initialise = staticmethod(initialise)
    scaling = staticmethod(scaling)
    Monitor = Monitor
    __call__ = staticmethod(_audit)


audit = Auditing()
