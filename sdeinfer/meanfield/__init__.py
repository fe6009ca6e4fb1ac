"""Mean-field self-attention: tokens on the sphere that cluster, and β inferred."""

from sdeinfer.meanfield._circle import CircleContinuum as CircleContinuum
from sdeinfer.meanfield._circle import angles as angles
from sdeinfer.meanfield._circle import fourier_modes as fourier_modes
from sdeinfer.meanfield._circle import solve_circle as solve_circle
from sdeinfer.meanfield._clusters import Plateau as Plateau
from sdeinfer.meanfield._clusters import cluster_counts as cluster_counts
from sdeinfer.meanfield._clusters import clusters as clusters
from sdeinfer.meanfield._clusters import mean_correlation as mean_correlation
from sdeinfer.meanfield._clusters import merging_times as merging_times
from sdeinfer.meanfield._clusters import order_parameter as order_parameter
from sdeinfer.meanfield._clusters import plateaus as plateaus
from sdeinfer.meanfield._equiangular import equiangular as equiangular
from sdeinfer.meanfield._equiangular import equiangular_tokens as equiangular_tokens
from sdeinfer.meanfield._flow import SelfAttentionFlow as SelfAttentionFlow
from sdeinfer.meanfield._flow import on_sphere as on_sphere
from sdeinfer.meanfield._flow import tangent as tangent
from sdeinfer.meanfield._modes import fastest_mode as fastest_mode
from sdeinfer.meanfield._modes import growth_rates as growth_rates
from sdeinfer.meanfield._random_values import antipodal_exponent as antipodal_exponent
from sdeinfer.meanfield._random_values import solve_random_values as solve_random_values
from sdeinfer.meanfield._solve import OnSphere as OnSphere
from sdeinfer.meanfield._solve import solve as solve
from sdeinfer.meanfield._tokens import random_tokens as random_tokens
from sdeinfer.meanfield._tokens import tokens_dataset as tokens_dataset
