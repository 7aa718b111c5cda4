"""What a network's features know: linear probes of its blocks."""

from scalelong.representation.linear import probe_features
from scalelong.representation.probe import Cell, Labelled, LinearProbe, linear_probe

__all__ = ["Cell", "Labelled", "LinearProbe", "linear_probe", "probe_features"]
