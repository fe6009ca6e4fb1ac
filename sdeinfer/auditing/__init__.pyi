from ._call import audit as audit
from ._initialise import Initialised as Initialised
from ._recipe import Logits as Logits
from ._recipe import Matrix as Matrix
from ._recipe import Recipe as Recipe
from ._result import Audit as Audit
from ._scaling import Scaling as Scaling
from ._tests import Test as Test
