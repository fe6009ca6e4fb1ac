"""Settings of a fit that the command line names as well; imports nothing."""

from typing import Literal, get_args

Law = Literal["finite-width", "limit", "both"]
LAWS = get_args(Law)

LIMIT_POSTERIOR = "limit_posterior"
"""The group of a fit by both laws that holds the posterior by the limit's."""

LARGEST_LOGIT = 0.6
"""Far beyond its range the law mistakes the spread for one of 0.6 to 1.6, not for a small one."""
