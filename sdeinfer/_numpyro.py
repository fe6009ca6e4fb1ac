"""NumPyro as a whole, whoever imported it first.

Where arviz-stats was imported before NumPyro, NumPyro is loaded when a name of it is looked up; where a subpackage was
imported then, `numpyro.distributions` lacks its modules as attributes, and `numpyro.factor` fails.
Tests: `tests/test_package.py`.
"""

import sys

import numpyro as numpyro

for _name, _module in list(sys.modules.items()):
    if _name.startswith("numpyro.distributions."):
        setattr(sys.modules[_name.rpartition(".")[0]], _name.rpartition(".")[2], _module)
