"""Third-party networks: how their skips are found, and the scaled network against a reference."""

import networks_page
import pytest
import torch
from third_party import THIRD_PARTY, ThirdParty

import scalelong
from scalelong import ExplicitScaling, LearnableScaling
from scalelong.errors import UnsupportedNetworkError

EVERY = [
    pytest.param(network, id=name, marks=[pytest.mark.slow] * network.slow) for name, network in THIRD_PARTY.items()
]


@pytest.mark.parametrize("network", EVERY)
def test_the_scaled_network_equals_the_reference_bit_for_bit(network: ThirdParty):
    """Powers of two are exact in whatever order they are multiplied."""
    result = networks_page.measure(network)
    assert result["found"] == network.found
    assert result["equal"] is True
    assert result["N"] > 0


@pytest.mark.parametrize("network", [p for p in EVERY if p.values[0].found == "structure"])
@torch.no_grad()
def test_ls_has_its_widths_from_the_structure(network: ThirdParty):
    net = scalelong.apply(network.make(), LearnableScaling())
    plain = network.run(network.make())
    assert not torch.equal(network.run(net), plain)
    assert torch.equal(network.run(scalelong.remove(net)), plain)


@pytest.mark.parametrize("network", [p for p in EVERY if p.values[0].found == "example"])
def test_a_network_of_no_known_structure_needs_the_example(network: ThirdParty):
    with pytest.raises(UnsupportedNetworkError):
        scalelong.apply(network.make(), ExplicitScaling([1.0]))


def test_the_page_is_what_was_recorded():
    rows = networks_page.recorded()
    assert networks_page.PAGE.read_text() == networks_page.render(rows)
    tested = {row["network"]: row for row in rows if row["by"] == "tests"}
    assert set(THIRD_PARTY) <= set(tested)
    for name, network in THIRD_PARTY.items():
        assert (tested[name]["found"], tested[name]["equal"]) == (network.found, True)
    assert sum(row["equal"] is True and row["found"] != "sites" for row in rows) >= 60
