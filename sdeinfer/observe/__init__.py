"""Observed networks: from hidden states or files to one validated Dataset."""

from sdeinfer.observe._dataset import DIMS as DIMS
from sdeinfer.observe._dataset import covariance_dataset as covariance_dataset
from sdeinfer.observe._dataset import observe as observe
from sdeinfer.observe._dataset import truth_of as truth_of
from sdeinfer.observe._dataset import validate as validate
from sdeinfer.observe._files import FileError as FileError
from sdeinfer.observe._files import read as read
from sdeinfer.observe._files import read_tree as read_tree
from sdeinfer.observe._files import readable as readable
from sdeinfer.observe._files import write as write
from sdeinfer.observe._files import written as written
