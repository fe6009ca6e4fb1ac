# In a checkout the package is the folder models/; type checkers know nothing of that.
from .likelihood import BranchModel, EveryLayer, Groups, LatentLayers

branches: BranchModel
branches_over_depth: BranchModel
every_branch: BranchModel

full_path: EveryLayer
hierarchical: Groups
outputs: LatentLayers
terminal: LatentLayers
thinned_path: LatentLayers
