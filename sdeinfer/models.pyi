# In a checkout the package is the folder models/; type checkers know nothing of that.
from .likelihood._increments import BranchModel
from .likelihood._model import EveryLayer, GroupModel, LatentLayers
from .likelihood._model import each_network as each_network

branches: BranchModel
branches_over_depth: BranchModel
every_branch: BranchModel

full_path: EveryLayer
hierarchical: GroupModel
outputs: LatentLayers
terminal: LatentLayers
thinned_path: LatentLayers
