"""Extractors by name, and any network as an extractor."""

import pytest
import torch
from small_pictures import pictures
from torch import nn

from scalelong.errors import EvaluationError, InvalidValueError, UnknownNameError
from scalelong.evaluation import FeatureExtractor, ModuleExtractor, build_extractor
from scalelong.files import tensors_sha256


def test_any_network_is_an_extractor():
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    extractor = build_extractor(network)
    assert isinstance(extractor, FeatureExtractor)
    assert (extractor.name, extractor.is_fid, extractor.resize) == ("Sequential", False, "none")
    batch = torch.from_numpy(pictures(2))
    expected = network(batch.permute(0, 3, 1, 2) / 127.5 - 1).mean((2, 3))
    torch.testing.assert_close(extractor(batch), expected)
    assert extractor.weights == tensors_sha256(network.state_dict())
    with torch.no_grad():
        network[0].bias += 1
    assert extractor.weights != ModuleExtractor(network).weights


def test_a_transform_leaves_room_for_other_networks():
    """DINOv2 and CLIP want another size and other statistics: that is one function."""

    def transform(batch):
        return nn.functional.interpolate(batch.permute(0, 3, 1, 2).float() / 255, (4, 4), mode="bicubic")

    extractor = ModuleExtractor(nn.Flatten(), "four", transform, resize="bicubic to 4")
    assert extractor(torch.from_numpy(pictures(2, size=16))).shape == (2, 48)
    assert extractor.resize == "bicubic to 4"


def test_pixels_are_the_means_of_an_8x8_grid():
    extractor = build_extractor("pixels")
    batch = torch.from_numpy(pictures(2, size=16))
    expected = batch.double().view(2, 8, 2, 8, 2, 3).mean((2, 4)).permute(0, 3, 1, 2).flatten(1) / 127.5 - 1
    torch.testing.assert_close(extractor(batch), expected.float())
    assert not extractor.is_fid
    assert extractor.weights == "none"  # not the hash of nothing


def test_unusable_extractors_are_refused():
    with pytest.raises(UnknownNameError, match="inceptoin.*inception"):
        build_extractor("inceptoin")
    with pytest.raises(InvalidValueError, match="got 3"):
        build_extractor(3)
    with pytest.raises(InvalidValueError, match="somewhere"):
        build_extractor("pixels", "somewhere")
    with pytest.raises(InvalidValueError, match="somewhere"):
        build_extractor(nn.Flatten(), "somewhere")
    with pytest.raises(EvaluationError, match=r"\(6,\) for 2 images"):
        build_extractor(nn.Flatten(0))(torch.zeros(2, 1, 1, 3, dtype=torch.uint8))
