"""Weights: sources in the stated order, hashes checked before a file is opened, a cache that repairs itself."""

import hashlib
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scalelong.data.registries import Package
from scalelong.errors import EvaluationError
from scalelong.evaluation import InceptionExtractor
from scalelong.evaluation.weights import Weights, load_weights, read_state_dict, read_torchscript


def test_a_weights_file_with_another_hash_is_not_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the file was unpickled",))

    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps(Bomb()))
    result = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(EvaluationError, match=f"did not open.*got {result}"):
        InceptionExtractor(path)
    with pytest.raises(EvaluationError, match="does not exist"):
        InceptionExtractor(tmp_path / "nowhere.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_torchscript_archive_is_read_in_order(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    torch.jit.save(torch.jit.script(network), tmp_path / "net.pt")
    result = read_torchscript(tmp_path / "net.pt")
    assert list(result) == list(network.state_dict())
    for name, tensor in network.state_dict().items():
        assert torch.equal(result[name], tensor)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_torchscript_archive_with_another_hash_is_not_opened(tmp_path, monkeypatch):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "net.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the archive was opened"))
    with pytest.raises(EvaluationError, match="did not open"):
        InceptionExtractor(tmp_path / "net.pt")


@pytest.fixture
def small_weights(tmp_path, monkeypatch):
    """Weights of one tensor, in a local file that the environment names, and an empty cache."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "one.pth"
    torch.save({"a": torch.arange(3.0)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = {digest: read_state_dict}
    package = Package("pip", "scalelong-no-such-package", "0", "0")
    url = "http://127.0.0.1:9/one.pth"
    return path, Weights("one", "SCALELONG_TEST_ONE", known, package, "x", torch_hub=("one.pth",), url=url)


def test_sources_are_tried_in_the_stated_order(small_weights, tmp_path, monkeypatch):
    path, weights = small_weights
    monkeypatch.setattr(Package, "folder", lambda self: tmp_path / "nothing")
    order = r"torch.hub's folder.*installed.*one.pth: HF_HUB_OFFLINE.*pip scalelong-no-such.*SCALELONG_TEST_ONE"
    with pytest.raises(EvaluationError, match=order):
        load_weights(weights)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(EvaluationError, match=r"one.pth: the download failed"):
        load_weights(weights)
    for source, skipped in (("hub", "pip scalelong"), ("registries", weights.url)):
        monkeypatch.setenv("SCALELONG_SOURCE", source)
        with pytest.raises(EvaluationError) as caught:
            load_weights(weights)
        assert skipped not in str(caught.value)
    monkeypatch.delenv("SCALELONG_SOURCE")
    monkeypatch.setenv("SCALELONG_TEST_ONE", str(path))
    assert torch.equal(load_weights(weights)["a"], torch.arange(3.0))
    monkeypatch.delenv("SCALELONG_TEST_ONE")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    path.rename(tmp_path / "checkpoints" / "one.pth")
    assert not (tmp_path / "cache" / "weights").exists()  # a file that the user names is not cached
    assert torch.equal(load_weights(weights)["a"], torch.arange(3.0))
    (tmp_path / "checkpoints" / "one.pth").unlink()
    assert torch.equal(load_weights(weights)["a"], torch.arange(3.0))  # from the cache


def test_a_damaged_cache_is_made_again(small_weights, tmp_path, monkeypatch):
    path, weights = small_weights
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    path.rename(tmp_path / "checkpoints" / "one.pth")
    load_weights(weights)
    cached = tmp_path / "cache" / "weights" / "one.safetensors"
    good = cached.read_bytes()
    before = torch.load(tmp_path / "checkpoints" / "one.pth", weights_only=True)
    for bad in (b"", good[:-4], good[:-1] + bytes([good[-1] ^ 1])):
        cached.write_bytes(bad)
        assert torch.equal(load_weights(weights)["a"], before["a"])
        assert torch.equal(load_file(cached)["a"], before["a"])
