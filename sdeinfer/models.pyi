# In a checkout the package is the folder models/; type checkers know nothing of that.
from .likelihood import EveryLayer, Groups, LatentLayers

full_path: EveryLayer
hierarchical: Groups
outputs: LatentLayers
terminal: LatentLayers
thinned_path: LatentLayers
