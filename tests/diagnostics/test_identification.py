"""What data say next to priors."""

import numpy as np
import pytest
from diagnostics.one_token import by_hand, one_token
from helpers.budget import assert_estimate

from sdeinfer.diagnostics import identification


@pytest.fixture(scope="module")
def table(fitted):
    return identification(fitted)


@pytest.mark.long
def test_priors_are_those_of_the_models(table, fitted):
    """Logit of a uniform, log of a log-normal, log of a half-normal, from draws; of kurtosis 4.2, 3 and 7."""
    expected = np.array([np.pi / np.sqrt(3), 1.0, np.pi / np.sqrt(8)])
    error = expected * np.sqrt((np.array([4.2, 3.0, 7.0]) - 1) / (4 * fitted["prior"]["gamma"].size))
    assert_estimate(table["prior"], expected, error)


def test_posteriors_are_near_the_inverse_information_and_prior(table):
    together = 1 / np.sqrt(1 / table["prior"] ** 2 + 1 / table["information"] ** 2)
    np.testing.assert_allclose(table.loc["gamma", "posterior"], together["gamma"], rtol=0.3)
    assert (table["contraction"] < 1).all()
    assert table.loc["gamma", "contraction"] > 0.99
    np.testing.assert_allclose(table["networks"], (table["information"] / 0.1) ** 2)


def test_one_token_by_hand():
    _, information, prior, sd = by_hand()
    row = identification(*one_token()).loc["gamma"]
    expected = [prior, sd, 1 - sd**2 / prior**2, information**-0.5, information / (information + 1 / prior**2)]
    found = row[["prior", "posterior", "contraction", "information", "expected"]].to_numpy(float)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_power_scaling_moves_what_the_prior_holds(table):
    """τ0, of which these networks say little, moves more with its prior than γ does."""
    assert table.loc["tau0", "to_prior"] > table.loc["gamma", "to_prior"]
    assert table.loc["gamma", "to_likelihood"] > 0.05


def test_without_a_likelihood_in_closed_form_there_is_the_contraction(fitted):
    tree = fitted.copy()
    tree.attrs["model"] = "thinned_path"
    assert list(identification(tree).columns) == ["prior", "posterior", "contraction"]
