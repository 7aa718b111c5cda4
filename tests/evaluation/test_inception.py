"""FID's Inception: resize against TensorFlow 1's definition, features against torch-fidelity on the same weights."""

import copy
import math

import numpy as np
import pytest
import torch
from fidelity_peer import fidelity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peers import pytorch_fid
from scalelong.errors import EvaluationError
from scalelong.evaluation import FeatureExtractor, InceptionExtractor, evaluate_images
from scalelong.evaluation import extractors as extractors_module
from scalelong.evaluation import inception as inception_module
from scalelong.evaluation.extractors import PytorchFidExtractor
from scalelong.evaluation.inception import INCEPTION, resize_tf1
from scalelong.evaluation.weights import load_weights
from scalelong.files import sha256, tensors_sha256

DIGEST = "d05a7ad4a14ede3d4a24da65729356b12e3f063ea236c3a3078891b152665668"


# ------------------------------------------------------------------------------------------------ resize


def transcription(image: np.ndarray, size: int) -> np.ndarray:
    """tf.image.resize_bilinear(align_corners=False), pixel by pixel, in float32 as TensorFlow 1 computes it."""
    height, width, channels = image.shape
    f = np.float32
    scale_y, scale_x = f(height) / f(size), f(width) / f(size)
    out = np.empty((size, size, channels), np.float32)
    for y in range(size):
        in_y = f(y) * scale_y
        top, dy = math.floor(in_y), f(in_y - f(math.floor(in_y)))
        bottom = min(top + 1, height - 1)
        for x in range(size):
            in_x = f(x) * scale_x
            left, dx = math.floor(in_x), f(in_x - f(math.floor(in_x)))
            right = min(left + 1, width - 1)
            for c in range(channels):
                tl, tr = f(image[top, left, c]), f(image[top, right, c])
                bl, br = f(image[bottom, left, c]), f(image[bottom, right, c])
                upper = tl + (tr - tl) * dx
                lower = bl + (br - bl) * dx
                out[y, x, c] = upper + (lower - upper) * dy
    return out


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_resize_is_the_definition_bit_for_bit(height, width, channels, size, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    resized = resize_tf1(torch.from_numpy(image)[None], size)
    assert resized.shape == (1, channels, size, size)
    np.testing.assert_array_equal(resized[0].permute(1, 2, 0).numpy(), transcription(image, size))


def test_cifar_to_299_is_the_definition_bit_for_bit():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 1), dtype=np.uint8)
    resized = resize_tf1(torch.from_numpy(image)[None], 299)[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(resized, transcription(image, 299))


def test_an_image_of_the_target_size_is_unchanged():
    image = torch.randint(0, 256, (2, 299, 299, 3), dtype=torch.uint8)
    assert torch.equal(resize_tf1(image, 299).permute(0, 2, 3, 1), image.float())


def test_resize_is_not_torchs_bilinear():
    """Half-pixel centres, torch's only convention, are another function: FIDs made with them do not compare."""
    image = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    torch_bilinear = torch.nn.functional.interpolate(image.permute(0, 3, 1, 2).float(), (299, 299), mode="bilinear")
    assert (resize_tf1(image, 299) - torch_bilinear).abs().max() > 10


def test_resized_images_are_channels_last_in_memory():
    resized = resize_tf1(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), 16)
    assert resized.is_contiguous(memory_format=torch.channels_last)


def test_resize_agrees_with_torch_fidelity():
    peer = fidelity("interpolate_compat_tensorflow").interpolate_bilinear_2d_like_tensorflow1x
    image = torch.randint(0, 256, (2, 33, 47, 3), dtype=torch.uint8)
    theirs = peer(image.permute(0, 3, 1, 2).float(), size=(299, 299), align_corners=False)
    assert torch.equal(resize_tf1(image, 299), theirs)


# ------------------------------------------------------------------------------------------------ network


def images(n=4, size=32, channels=3, seed=0):
    """Smooth random pictures; pure noise leaves most features at zero."""
    random = np.random.default_rng(seed)
    small = torch.from_numpy(random.uniform(0, 255, (n, channels, 5, 5)))
    smooth = nn.functional.interpolate(small, (size, size), mode="bicubic").clamp(0, 255)
    return smooth.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


@pytest.fixture(scope="module")
def peer():
    """torch-fidelity's Inception with random weights and BatchNorm statistics."""
    module = fidelity("feature_extractor_inceptionv3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(module.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        network = module.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    torch.manual_seed(0)
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight)
        elif isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.7, 1.4)
            nn.init.normal_(part.bias, 0.0, 0.2)
    return network


@pytest.fixture(scope="module")
def inception(peer, tmp_path_factory):
    """Our extractor on the peer's weights, read from a file in pytorch-fid's format."""
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(peer.state_dict(), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INCEPTION.files, sha256(path), inception_module._from_state_dict)
        return InceptionExtractor(path)


@pytest.mark.parametrize("size", [32, 320])
def test_features_on_random_weights_are_torch_fidelitys(inception, peer, size):
    batch = images(2, size)
    with torch.inference_mode():
        (theirs,) = peer(batch.permute(0, 3, 1, 2).contiguous())
        ours = inception(batch)
    assert ours.shape == (2, 2048)
    assert float((ours - theirs).abs().max()) < 2e-5 * float(theirs.abs().max())


def test_the_classifier_is_read_where_the_file_has_it_and_is_not_part_of_the_hash(inception, peer):
    batch = images(2)
    assert torch.equal(inception.head, peer.fc.weight)
    with torch.inference_mode():
        features = inception(batch)
        peer.features_list = ["logits_unbiased"]
        try:
            (theirs,) = peer(batch.permute(0, 3, 1, 2).contiguous())
        finally:
            peer.features_list = ["2048"]
    torch.testing.assert_close(features @ inception.head.T, theirs, rtol=1e-4, atol=1e-3)
    tensors = {name: peer.state_dict()[name] for name in inception_module._NAMES}
    assert inception.weights == tensors_sha256(tensors)


def test_without_a_classifier_the_inception_score_says_which_file_has_it(inception):
    extractor = copy.copy(inception)
    extractor.head = None
    with pytest.raises(EvaluationError, match="weights of inception-2015-12-05 have no classifier.*pytorch-fid's .pth"):
        evaluate_images(images(12, 8).numpy(), images(12, 8, seed=1).numpy(), extractor, metrics=["is"])


@pytest.mark.slow
def test_the_pytorch_fid_extractor_is_pytorch_fids(inception, peer):
    module = pytorch_fid()
    with pytest.MonkeyPatch.context() as patch:
        state = {name: value for name, value in peer.state_dict().items() if "feature_extractor" not in name}
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: state)
        theirs = module.InceptionV3([module.InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).eval()
    ours = copy.copy(inception)
    ours.prepare, ours.name = PytorchFidExtractor.prepare, PytorchFidExtractor.name
    for size in (32, 64, 300):
        batch = images(2, size)
        with torch.inference_mode():
            expected = theirs(batch.permute(0, 3, 1, 2).float() / 255)[0][:, :, 0, 0]
            found, other = ours(batch), inception(batch)
        assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())
        assert float((other - expected).abs().max()) > 1e-3 * float(expected.abs().max())  # the TF1 resize is another


def test_features_do_not_depend_on_the_batch(inception, monkeypatch):
    monkeypatch.setattr(extractors_module, "_CPU_BATCH", 2)
    batch = images(3, 24)  # more than one part
    with torch.inference_mode():
        together = inception(batch)
        alone = torch.cat([inception(image[None]) for image in batch[[0, 2]]])
    assert float((together[[0, 2]] - alone).abs().max()) < 2e-5 * float(alone.abs().max())


def test_features_are_full_precision_under_autocast(inception):
    batch = images(1, 24)
    with torch.inference_mode():
        plain = inception(batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(inception(batch), plain)


def test_grey_is_three_equal_channels(inception):
    grey = images(1, 16, 1)
    with torch.inference_mode():
        assert torch.equal(inception(grey), inception(grey.repeat(1, 1, 1, 3)))


def test_a_file_with_other_batch_norm_scales_or_missing_tensors_is_refused(peer, tmp_path):
    path = tmp_path / "weights.pth"
    state = peer.state_dict()
    torch.save({**state, "Mixed_5b.branch1x1.bn.weight": torch.full((64,), 2.0)}, path)
    with pytest.raises(EvaluationError, match="Mixed_5b.branch1x1.bn.weight"):
        inception_module._from_state_dict(path)
    del state["Mixed_7c.branch_pool.conv.weight"]
    torch.save(state, path)
    with pytest.raises(EvaluationError, match="lacks 1 tensors.*Mixed_7c.branch_pool.conv.weight"):
        inception_module._from_state_dict(path)


# ------------------------------------------------------------------------------------------------ published weights


@pytest.fixture(scope="module")
def published():
    return InceptionExtractor()


@pytest.mark.slow
def test_published_weights_have_the_known_hash(published):
    assert published.weights == DIGEST
    assert published.is_fid
    assert isinstance(published, FeatureExtractor)
    assert len(load_weights(INCEPTION)) == 94 * 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 320])
def test_features_on_published_weights_are_torch_fidelitys_to_1e_4(published, peer, size):
    peer = copy.deepcopy(peer)
    peer.load_state_dict(load_weights(INCEPTION), strict=False)  # BatchNorm's scale, which is one, is missing
    batch = images(3, size)
    with torch.inference_mode():
        (theirs,) = peer(batch.permute(0, 3, 1, 2).contiguous())
        ours = published(batch)
    assert float(theirs.max()) > 1
    assert float((ours - theirs).abs().max()) < 1e-4


@pytest.mark.slow
def test_published_weights_arrive_in_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    assert tensors_sha256(load_weights(INCEPTION)) == DIGEST
    assert list((tmp_path / "weights").iterdir())
    assert tensors_sha256(load_weights(INCEPTION)) == DIGEST
