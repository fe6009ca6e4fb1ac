"""Residual blocks of Transformers in use: Pre-LN and Post-LN, RMSNorm, GELU, SwiGLU, softmax with masks, GQA and RoPE.

A branch ends in a Gaussian linear map, so that its law at width n needs expectations over a few Gaussian vectors and no
limit. `Block` is a layer; `law_of_increment` is its law.
"""

from sdeinfer.blocks._attention import SelfAttention as SelfAttention
from sdeinfer.blocks._block import Block as Block
from sdeinfer.blocks._branch import AbstractBranch as AbstractBranch
from sdeinfer.blocks._coefficients import law_of_increment as law_of_increment
from sdeinfer.blocks._experts import Experts as Experts
from sdeinfer.blocks._latent import LatentAttention as LatentAttention
from sdeinfer.blocks._law import LogMatrixNormal as LogMatrixNormal
from sdeinfer.blocks._law import LogMoments as LogMoments
from sdeinfer.blocks._law import MatrixMoments as MatrixMoments
from sdeinfer.blocks._law import increment_law as increment_law
from sdeinfer.blocks._law import log_moments as log_moments
from sdeinfer.blocks._law import sampled_log_moments as sampled_log_moments
from sdeinfer.blocks._mlp import ACTIVATIONS as ACTIVATIONS
from sdeinfer.blocks._mlp import MLP as MLP
from sdeinfer.blocks._parallel import Parallel as Parallel
from sdeinfer.blocks.reading._of import of as of
