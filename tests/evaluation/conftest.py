"""A small network, so that evaluation can be tested in milliseconds."""

import pytest
import torch
from torch import nn

from scalelong.evaluation import ModuleExtractor


@pytest.fixture
def extractor():
    torch.manual_seed(0)
    return ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small")
