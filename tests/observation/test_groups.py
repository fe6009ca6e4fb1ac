import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.likelihood import observed_path, path_statistics
from sdeinfer.observation import blocks_of_layers, covariance_dataset, groups_of, read


def test_blocks_hold_every_transition_once(networks):
    blocks = blocks_of_layers(networks, 2)
    assert blocks.sizes["network"] == 48
    np.testing.assert_array_equal(blocks["layer"], np.arange(6))
    assert list(groups_of(blocks).labels) == ["0-5", "5-10"]
    V = networks["covariance"].values
    np.testing.assert_array_equal(blocks["covariance"][:24], V[:, :6])
    np.testing.assert_array_equal(blocks["covariance"][24:], V[:, 5:])
    np.testing.assert_array_equal(blocks["network_of"], np.tile(networks["network"], 2))
    assert blocks.attrs == networks.attrs


def test_blocks_have_the_likelihood_of_their_networks(networks):
    def total(data):
        path = path_statistics(observed_path(data))
        limit = si.ShapedTransformer(gamma=0.5, tau0=0.8, c_plus=0.0, c_minus=-1.0).limit()
        return si.likelihood.FullPath(limit, path).log_prob(path.weights).sum()

    np.testing.assert_allclose(total(blocks_of_layers(networks, 5)), total(networks), rtol=1e-12)


def test_groups_survive_a_file(networks, tmp_path):
    blocks = blocks_of_layers(networks, 2)
    si.write(blocks, tmp_path / "blocks.nc")
    again = groups_of(read(tmp_path / "blocks.nc"))
    assert list(again.labels) == ["0-5", "5-10"]
    np.testing.assert_array_equal(again.group, np.repeat([0, 1], 24))


def test_layers_that_cannot_be_shared_are_refused(networks):
    for blocks in (1, 3):
        with pytest.raises(si.InputError, match=f"at least 2 and divide the 10 transitions, got {blocks}"):
            blocks_of_layers(networks, blocks)
    V = np.asarray(si.equicorrelated(tokens=2, correlation=0.1, norm=1.0))
    uneven = covariance_dataset(np.arange(1, 6)[:, None, None] * V[None, None], width=64, layers=[0, 1, 2, 4, 8])
    with pytest.raises(si.InputError, match="layer: blocks of layers need the same layers of every block"):
        blocks_of_layers(uneven, 2)
