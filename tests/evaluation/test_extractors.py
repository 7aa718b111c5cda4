"""Extractors: Inception against torch-fidelity on the same weights, and any network of the user's."""

import hashlib
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from fidelity_peer import fidelity
from safetensors.torch import load_file
from torch import nn

from scalelong import ScaleLongError
from scalelong.evaluation import FeatureExtractor, ModuleExtractor, build_extractor
from scalelong.evaluation import weights as weights_module
from scalelong.evaluation.extractors import InceptionExtractor, rgb
from scalelong.evaluation.inception_weights import INCEPTION
from scalelong.evaluation.torchscript import read_torchscript
from scalelong.evaluation.weights import KnownFile, Package, Weights, load_weights, tensor_digest

DIGEST = "d05a7ad4a14ede3d4a24da65729356b12e3f063ea236c3a3078891b152665668"


def images(n=4, size=32, channels=3, seed=0):
    """Smooth random pictures, for noise alone leaves most of a network's features at zero."""
    random = np.random.default_rng(seed)
    small = torch.from_numpy(random.uniform(0, 255, (n, channels, 5, 5)))
    smooth = nn.functional.interpolate(small, (size, size), mode="bicubic").clamp(0, 255)
    return smooth.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def obtainable(weights):
    try:
        return load_weights(weights)
    except ScaleLongError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def inception():
    obtainable(INCEPTION)
    return InceptionExtractor()


@pytest.fixture(scope="module")
def peer(inception, tmp_path_factory):
    """torch-fidelity's Inception on the same numbers: it wants a BatchNorm scale and a classifier as well."""
    state = load_weights(INCEPTION).tensors
    means = [name for name in state if name.endswith("running_mean")]
    scales = {name.replace("running_mean", "weight"): torch.ones_like(state[name]) for name in means}
    counts = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(0) for name in means}
    classifier = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save({**state, **scales, **counts, **classifier}, path)
    peer_class = fidelity("feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    return peer_class("inception-v3-compat", ["2048"], str(path))


@pytest.mark.parametrize("size", [32, 320])
def test_inception_features_are_torch_fidelitys_to_1e_4(inception, peer, size):
    batch = images(3, size)
    with torch.inference_mode():
        (theirs,) = peer(batch.permute(0, 3, 1, 2).contiguous())
        ours = inception(batch)
    assert float(theirs.max()) > 1
    assert float((ours - theirs).abs().max()) < 1e-4


def test_inception_weights_are_the_published_ones(inception):
    assert inception.weights == DIGEST
    assert inception.is_fid
    assert isinstance(inception, FeatureExtractor)
    assert len(load_weights(INCEPTION).tensors) == 94 * 4


def test_features_do_not_depend_on_the_batch(inception):
    batch = images(11, 24)  # more than one part
    with torch.inference_mode():
        together = inception(batch)
        alone = torch.cat([inception(image[None]) for image in batch[[0, 10]]])
    assert float((together[[0, 10]] - alone).abs().max()) < 1e-4


def test_features_are_full_precision_under_autocast(inception):
    batch = images(1, 24)
    with torch.inference_mode():
        plain = inception(batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(inception(batch), plain)


def test_grey_is_three_equal_channels(inception):
    grey = images(2, 16, 1)
    with torch.inference_mode():
        assert torch.equal(inception(grey), inception(grey.repeat(1, 1, 1, 3)))
    with pytest.raises(ScaleLongError, match="4 channels"):
        rgb(torch.zeros(1, 8, 8, 4, dtype=torch.uint8))


def test_any_network_is_an_extractor():
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    extractor = build_extractor(network)
    assert isinstance(extractor, FeatureExtractor)
    assert (extractor.name, extractor.is_fid, extractor.resize) == ("Sequential", False, "none")
    batch = images(2, 8)
    expected = network(batch.permute(0, 3, 1, 2) / 127.5 - 1).mean((2, 3))
    torch.testing.assert_close(extractor(batch), expected)
    assert extractor.weights == tensor_digest(network.state_dict())
    with torch.no_grad():
        network[0].bias += 1
    assert extractor.weights != ModuleExtractor(network).weights


def test_a_transform_leaves_room_for_other_networks():
    """DINOv2 and CLIP want another size and other statistics: that is one function."""

    def transform(batch):
        return nn.functional.interpolate(batch.permute(0, 3, 1, 2).float() / 255, (4, 4), mode="bicubic")

    extractor = ModuleExtractor(nn.Flatten(), "four", transform, resize="bicubic to 4")
    assert extractor(images(2, 16)).shape == (2, 48)
    assert extractor.resize == "bicubic to 4"


def test_what_is_no_extractor_is_refused():
    with pytest.raises(ScaleLongError, match=r"unknown extractor 'inceptoin'; did you mean 'inception'"):
        build_extractor("inceptoin")
    with pytest.raises(ScaleLongError, match="got int"):
        build_extractor(3)
    with pytest.raises(ScaleLongError, match="gave \\(6,\\) for 2 images"):
        build_extractor(nn.Flatten(0))(torch.zeros(2, 1, 1, 3, dtype=torch.uint8))


def test_a_weights_file_with_another_hash_is_not_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the file was unpickled",))

    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps(Bomb()))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ScaleLongError, match=f"has SHA-256 {found}.*it was not opened"):
        InceptionExtractor(path)
    with pytest.raises(ScaleLongError, match="does not exist"):
        InceptionExtractor(tmp_path / "nowhere.pt")


def archive(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("net/data.pkl", data)
    return buffer.getvalue()


def test_the_torchscript_reader_executes_nothing(tmp_path):
    path = tmp_path / "net.pt"
    path.write_bytes(archive(b"cos\nsystem\n(S'true'\ntR."))  # os.system('true')
    with pytest.raises(ScaleLongError, match=r"the archive names os.system"):
        read_torchscript(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ScaleLongError, match="is not a TorchScript archive"):
        read_torchscript(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_torchscript_reader_reads_what_torch_wrote(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    torch.jit.save(torch.jit.script(network), tmp_path / "net.pt")
    found = read_torchscript(tmp_path / "net.pt")
    assert found.keys() == network.state_dict().keys()
    for name, tensor in network.state_dict().items():
        assert torch.equal(found[name], tensor)


@pytest.fixture
def small_weights(tmp_path, monkeypatch):
    """Weights of one tensor, in a local file that the environment names, and an empty cache."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "one.pth"
    torch.save({"a": torch.arange(3.0)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    package = Package("scalelong-no-such-package", "0", "0", "x")
    known = (KnownFile(digest, weights_module.read_state_dict),)
    return path, Weights("one", "SCALELONG_TEST_ONE", known, package, hub=("one.pth",))


def test_sources_are_tried_in_the_stated_order(small_weights, tmp_path, monkeypatch):
    path, weights = small_weights
    monkeypatch.setattr(weights_module, "pip_package", lambda *_: tmp_path / "nothing")
    with pytest.raises(ScaleLongError, match=r"torch.hub's folder.*installed.*through pip.*SCALELONG_TEST_ONE"):
        load_weights(weights)
    monkeypatch.setenv("SCALELONG_TEST_ONE", str(path))
    assert load_weights(weights).source == str(path)
    monkeypatch.delenv("SCALELONG_TEST_ONE")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    path.rename(tmp_path / "checkpoints" / "one.pth")
    first = load_weights(weights)
    assert first.source == "torch.hub's folder"
    (tmp_path / "checkpoints" / "one.pth").unlink()
    again = load_weights(weights)  # from the cache
    assert again.digest == first.digest
    assert torch.equal(again.tensors["a"], torch.arange(3.0))


def test_a_damaged_cache_is_made_again(small_weights, tmp_path, monkeypatch):
    path, weights = small_weights
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    path.rename(tmp_path / "checkpoints" / "one.pth")
    digest = load_weights(weights).digest
    cached = tmp_path / "cache" / "weights" / "one.safetensors"
    good = cached.read_bytes()
    before = torch.load(tmp_path / "checkpoints" / "one.pth", weights_only=True)
    for bad in (b"", good[:-4], good[:-1] + bytes([good[-1] ^ 1])):
        cached.write_bytes(bad)
        assert load_weights(weights).digest == digest
        assert torch.equal(load_file(cached)["a"], before["a"])


@pytest.mark.slow
def test_inception_arrives_through_pip_into_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    assert load_weights(INCEPTION).digest == DIGEST
    assert load_weights(INCEPTION).digest == DIGEST
