from ._call import audit as audit
from ._recipe import Recipe as Recipe
from ._result import Audit as Audit
from ._roles import Matrix as Matrix
