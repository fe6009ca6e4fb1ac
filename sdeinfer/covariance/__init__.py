"""The state of the SDE: covariances, and the diffusion that acts on them."""

from sdeinfer.covariance._batched import diagonal as diagonal
from sdeinfer.covariance._batched import identity_like as identity_like
from sdeinfer.covariance._batched import is_positive_definite as is_positive_definite
from sdeinfer.covariance._batched import matmul as matmul
from sdeinfer.covariance._batched import semidefinite_cholesky as semidefinite_cholesky
from sdeinfer.covariance._batched import total as total
from sdeinfer.covariance._batched import transpose as transpose
from sdeinfer.covariance._diffusion import Diffusion as Diffusion
from sdeinfer.covariance._diffusion import Spectrum as Spectrum
from sdeinfer.covariance._diffusion import centred_gram as centred_gram
from sdeinfer.covariance._diffusion import factor_noise as factor_noise
from sdeinfer.covariance._diffusion import smooth_noise as smooth_noise
from sdeinfer.covariance._diffusion import spectrum as spectrum
from sdeinfer.covariance._matrix import centre as centre
from sdeinfer.covariance._matrix import correlation as correlation
from sdeinfer.covariance._matrix import covariance_fault as covariance_fault
from sdeinfer.covariance._matrix import equicorrelated as equicorrelated
from sdeinfer.covariance._matrix import factor as factor
from sdeinfer.covariance._matrix import is_concrete as is_concrete
from sdeinfer.covariance._matrix import pairs as pairs
from sdeinfer.covariance._matrix import safe_sqrt as safe_sqrt
from sdeinfer.covariance._matrix import singular as singular
from sdeinfer.covariance._matrix import tokens_of as tokens_of
from sdeinfer.covariance._matrix import unvech as unvech
from sdeinfer.covariance._matrix import validate_covariance as validate_covariance
from sdeinfer.covariance._matrix import vech as vech
