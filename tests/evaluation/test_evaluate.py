"""Images against a reference, whatever holds them; unusable input raises an error that names it."""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_pictures import pictures, write_pictures
from torch import nn

from scalelong import progress
from scalelong.data import load
from scalelong.errors import (
    DataError,
    EvaluationError,
    EvaluationWarning,
    InvalidValueError,
    ScaleLongError,
    UnknownNameError,
)
from scalelong.evaluation import (
    METRICS,
    Evaluation,
    Generation,
    Metric,
    MetricValue,
    ModuleExtractor,
    Moments,
    as_reference,
    dataset_reference,
    evaluate_images,
    frechet_distance,
    images_reference,
    kernel_distance,
    read_reference,
    write_reference,
)
from scalelong.evaluation import reference as reference_module

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture
def other():
    return pictures(60, seed=1, high=200)


def by_hand(extractor, array):
    with torch.inference_mode():
        features = extractor(torch.from_numpy(array)).double().numpy()
    return features, Moments(len(array), *map(torch.from_numpy, (features.mean(0), np.cov(features, rowvar=False))))


def test_values_are_those_of_the_features(extractor, other):
    array = pictures(70)
    result = evaluate_images(array, other, extractor)
    (features, moments), (others, target) = by_hand(extractor, array), by_hand(extractor, other)
    assert result.frechet == pytest.approx(frechet_distance(moments, target).value, rel=1e-9)
    expected = kernel_distance(torch.from_numpy(features), torch.from_numpy(others)).value
    assert result.kid == pytest.approx(expected, rel=1e-6)
    assert list(result.values) == ["frechet", "kid"]
    for value in result.values.values():
        assert value.interval.low < value.value < value.interval.high
    trace = float(np.trace(np.cov(others, rowvar=False)))  # the distance of copies of one image at the mean
    assert result.values["frechet"].details == {"rank": 6, "rank_reference": 6, "constant": pytest.approx(trace)}
    assert {"n": 70, "subsets": 10, "subset_size": 6}.items() <= result.values["kid"].details.items()


def test_metrics_are_chosen_by_name(extractor, other):
    result = evaluate_images(pictures(50), other, extractor, metrics=["kid"], interval=False)
    assert list(result.values) == ["kid"]
    assert result.values["kid"].interval is None
    assert result.card.metric == "KID"
    with pytest.raises(UnknownNameError, match="kdi.*kid"):
        evaluate_images(pictures(50), other, extractor, metrics=["kdi"])
    with pytest.raises(EvaluationError, match="fid.*small.*frechet"):
        evaluate_images(pictures(50), other, extractor, metrics=["fid"])
    with pytest.raises(InvalidValueError, match="metrics"):
        evaluate_images(pictures(50), other, extractor, metrics=[])


def test_a_registered_metric_is_computed_stored_and_read(extractor, other, monkeypatch, tmp_path):
    """Adding a metric takes one function and one entry."""

    def mean_shift(samples, reference, interval, seed):
        return MetricValue(float((samples.moments.mean - reference.moments.mean).norm()), details={"width": 6})

    monkeypatch.setitem(METRICS, "shift", Metric("Shift", mean_shift))
    result = evaluate_images(pictures(50), other, extractor)
    assert list(result.values) == ["frechet", "kid", "shift"]
    assert result.values["shift"].value > 0
    result.save(tmp_path / "evaluation.json")
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert stored["metrics"]["shift"]["value"] == result.values["shift"].value
    monkeypatch.delitem(METRICS, "shift")
    assert Evaluation.load(tmp_path / "evaluation.json") == result


def test_every_image_source_gives_the_same_values(extractor, other, tmp_path):
    array = pictures(50)
    folder = write_pictures(tmp_path / "set" / "inner", array).parent
    ways = [
        array,
        torch.from_numpy(array),
        (array[k : k + 7] for k in range(0, 50, 7)),
        [torch.from_numpy(array[:20]), array[20:]],
        folder,
        str(folder),
    ]
    result = [evaluate_images(way, other, extractor, batch_size=16) for way in ways]
    for evaluation in result:
        assert evaluation.frechet == pytest.approx(result[0].frechet, rel=1e-6)
        assert evaluation.kid == pytest.approx(result[0].kid, rel=1e-4)
        assert evaluation.card.content == result[0].card.content
        assert evaluation.card.n == 50
    assert result[4].card.images == "set"


def test_n_takes_the_first_images(extractor, other):
    array = pictures(50)
    first = evaluate_images(array[:30], other, extractor)
    for images in (array, iter([array[:20], array[20:]])):
        assert evaluate_images(images, other, extractor, n=30).card.content == first.card.content


def test_only_fids_inception_gives_fid(extractor, other):
    result = evaluate_images(pictures(50), other, extractor)
    assert result.fid is None
    assert "fid" not in result.values
    assert result.card.metric == "Fréchet distance of small (not FID)"
    assert any("not FID" in note for note in result.card.notes)
    extractor.is_fid = True
    assert (again := evaluate_images(pictures(50), other, extractor)).fid == again.frechet
    assert again.card.metric == "FID"


def test_the_card_says_that_n_biases_the_distance(extractor, other):
    assert any("N = 50" in note for note in evaluate_images(pictures(50), other, extractor).card.notes)


def test_too_few_images_warn_with_the_rank(other):
    wide = ModuleExtractor(nn.Flatten(), "wide")  # 192 features
    with pytest.warns(EvaluationWarning) as caught:
        result = evaluate_images(pictures(40), other, wide)
    assert "40 images are too few for 192 features: their covariance has rank 39" in str(caught[0].message)
    assert "60 reference images" in str(caught[1].message)
    assert result.values["frechet"].details["rank"] == 39
    assert math.isfinite(result.frechet)


def test_evaluation_json_round_trips(extractor, other, tmp_path):
    made = Generation(sampler="ddim", evaluations=50, guidance=1.5, ema=0.999, sample_seed=1, step=10)
    result = evaluate_images(pictures(50), other, extractor, generation=made)
    result.save(tmp_path / "evaluation.json")
    assert Evaluation.load(tmp_path / "evaluation.json") == result
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    keys = {"fid", "frechet", "frechet_interval", "kid", "kid_spread", "kid_interval", "metrics", "card"}
    assert keys <= stored.keys()
    fields = {"metric", "n", "reference", "extractor", "weights", "resize", "generation", "versions", "seconds"}
    assert fields <= stored["card"].keys()


def test_evaluation_json_of_older_versions_is_read(extractor, other, tmp_path):
    """Without `metrics`; ranks and KID's subsets were on the card."""
    result = evaluate_images(pictures(50), other, extractor)
    data = result.to_dict()
    del data["metrics"]
    data["card"] |= {"rank": 6, "kid_n": 50, "kid_subsets": 10, "kid_subset_size": 5}
    (tmp_path / "evaluation.json").write_text(json.dumps(data))
    again = Evaluation.load(tmp_path / "evaluation.json")
    assert again.card == result.card
    assert again.values["kid"] == result.values["kid"]
    assert again.values["frechet"].interval == result.values["frechet"].interval
    recorded = Evaluation.load(RESULTS / "fid-cifar10-train-vs-test.json")
    assert recorded.fid == pytest.approx(5.215, abs=1e-3)


def test_bad_evaluation_files_are_named(tmp_path):
    path = tmp_path / "evaluation.json"
    for text in ("", "{}", "[]", '{"format": 1}', '{"format": 1, "frechet_interval": null, "kid_interval": null}'):
        path.write_text(text)
        with pytest.raises(EvaluationError, match="evaluation.json"):
            Evaluation.load(path)


# ------------------------------------------------------------------------------------------------ bad input


def test_too_few_images_are_refused(extractor, other, tmp_path):
    array = pictures(20)
    for images in (array, write_pictures(tmp_path / "few", array)):
        with pytest.raises(EvaluationError, match=r"expected 30 images, but \w+ has 20"):
            evaluate_images(images, other, extractor, n=30)
    with pytest.raises(EvaluationError, match=r"expected 301 images, but digits \(validation\) has 300"):
        evaluate_images("digits:validation", other, extractor, n=301)
    with pytest.raises(EvaluationError, match="expected 30 images, but sampler has 20"):
        evaluate_images(iter([array]), other, extractor, n=30, name="sampler")


def test_mixed_sizes_name_the_file(extractor, other, tmp_path):
    folder = write_pictures(tmp_path / "mixed", pictures(5))
    Image.fromarray(pictures(1, size=9)[0]).save(folder / "zebra.png")
    with pytest.raises(EvaluationError, match=r"zebra.png.*9×9.*8×8"):
        evaluate_images(folder, other, extractor)
    with pytest.raises(EvaluationError, match="9×9.*8×8"):
        evaluate_images(iter([pictures(5), pictures(5, size=9)]), other, extractor)


def test_a_folder_without_images_is_refused(extractor, other, tmp_path):
    (tmp_path / "readme.txt").write_text("no image")
    with pytest.raises(DataError, match=str(tmp_path)):
        evaluate_images(tmp_path, other, extractor)
    with pytest.raises(InvalidValueError, match="nowhere"):
        evaluate_images(tmp_path / "nowhere", other, extractor)


def test_a_broken_file_is_named(extractor, other, tmp_path):
    folder = write_pictures(tmp_path / "broken", pictures(5))
    (folder / "00003.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(ScaleLongError, match=r"00003.png"):
        evaluate_images(folder, other, extractor)


def test_batches_that_are_not_uint8_images_are_refused(extractor, other):
    array = pictures(5)
    wrong = {
        "uint8.*float32.*scalelong.evaluation.to_uint8": torch.rand(5, 8, 8, 3),
        "uint8.*int64": array.astype(np.int64),
        r"\(5, 3, 8, 8\)": array.transpose(0, 3, 1, 2).copy(),
        r"\(8, 8, 3\)": array[0],
        r"\(5, 8, 8, 4\)": pictures(5, channels=4),
        "got str": "text",
    }
    for message, batch in wrong.items():
        with pytest.raises(EvaluationError, match=message):
            evaluate_images(iter([batch]), other, extractor)
    with pytest.raises(InvalidValueError, match="images.*int"):
        evaluate_images(3, other, extractor)
    with pytest.raises(EvaluationError, match="stream has no images"):
        evaluate_images(iter([]), other, extractor)
    with pytest.raises(InvalidValueError, match="batch_size.*0"):
        evaluate_images(array, other, extractor, batch_size=0)
    with pytest.raises(InvalidValueError, match="n must.*1"):
        evaluate_images(array, other, extractor, n=1)


# ------------------------------------------------------------------------------------------------ references


def test_reference_files_round_trip(extractor, other, tmp_path):
    reference = images_reference(other, extractor, name="others")
    write_reference(tmp_path / "others.safetensors", reference)
    again = read_reference(tmp_path / "others.safetensors")
    assert again.card == reference.card
    assert torch.equal(again.features.moments.covariance, reference.features.moments.covariance)
    direct = evaluate_images(pictures(50), other, extractor)
    from_file = evaluate_images(pictures(50), str(tmp_path / "others.safetensors"), extractor)
    assert (from_file.frechet, from_file.kid) == (direct.frechet, direct.kid)


def test_pytorch_fids_moments_serve_as_a_reference_once_their_extractor_is_stated(extractor, other, tmp_path):
    _, moments = by_hand(extractor, other)
    np.savez(tmp_path / "stats.npz", mu=moments.mean.numpy(), sigma=moments.covariance.numpy())
    with pytest.raises(EvaluationError, match="do not record their extractor.*--reference-extractor"):
        evaluate_images(pictures(50), tmp_path / "stats.npz", extractor)
    stated = read_reference(tmp_path / "stats.npz", "small")
    result = evaluate_images(pictures(50), stated, extractor)
    assert result.frechet == pytest.approx(evaluate_images(pictures(50), other, extractor).frechet, rel=1e-9)
    assert result.kid is None
    assert result.card.reference.extractor == "small"
    assert any("small as stated" in note for note in result.card.notes)
    with pytest.raises(EvaluationError, match="kid.*moments"):
        evaluate_images(pictures(50), stated, extractor, metrics=["kid"])
    with pytest.raises(EvaluationError, match="stats does not record"):
        evaluate_images(stated, other, extractor)
    with pytest.raises(EvaluationError, match="have extractor inception-pytorch-fid, expected small"):
        evaluate_images(pictures(50), read_reference(tmp_path / "stats.npz", "inception-pytorch-fid"), extractor)


def test_pickled_moments_are_not_executed(extractor, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the file was unpickled",))

    np.savez(tmp_path / "stats.npz", mu=np.array([Bomb()], dtype=object), sigma=np.eye(3))
    with pytest.raises(DataError, match="stats.npz"):
        as_reference(tmp_path / "stats.npz", extractor)


def test_unusable_references_are_refused(extractor, other, tmp_path):
    with pytest.raises(InvalidValueError, match="cifar01.*did you mean 'cifar10'"):
        as_reference("cifar01", extractor)
    with pytest.raises(InvalidValueError, match="digits:train:many"):
        as_reference("digits:train:many", extractor)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="bad.safetensors"):
        as_reference(tmp_path / "bad.safetensors", extractor)
    reference = images_reference(other, extractor)
    torch.manual_seed(9)
    different = ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small")
    with pytest.raises(EvaluationError, match="have weights"):
        evaluate_images(other, reference, different)


@pytest.fixture
def grey():
    torch.manual_seed(0)
    return ModuleExtractor(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU()), "grey")


class Interrupted(Exception):  # noqa: N818
    pass


def test_dataset_statistics_are_computed_once_and_resumed(grey, monkeypatch, tmp_path):
    data = load("digits", "train")
    images = np.asarray(data.images)
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    monkeypatch.setattr(reference_module, "CHECKPOINT_SECONDS", 0.0)
    calls = []
    network = grey.network.forward

    def counting(x):
        calls.append(len(x))
        if sum(calls) == 250:
            raise Interrupted
        return network(x)

    monkeypatch.setattr(grey.network, "forward", counting)
    with pytest.raises(Interrupted):
        dataset_reference("digits", "train", grey, 400)
    assert sum(calls) == 250
    result = dataset_reference("digits", "train", grey, 400)  # resumes after the 200 that were saved
    assert sum(calls) == 250 + 200
    whole = images_reference(images[:400], grey)
    assert result.card.content == whole.card.content
    assert (result.card.name, result.card.split, result.card.n) == ("digits", "train", 400)
    torch.testing.assert_close(result.features.moments.covariance, whole.features.moments.covariance)
    assert torch.equal(result.features.kept, whole.features.kept)
    before = sum(calls)
    assert dataset_reference("digits", "train", grey, 400).card == result.card  # from the cache
    assert sum(calls) == before
    longer = dataset_reference("digits", "train", grey, 500)  # from the shorter one's end
    assert sum(calls) == before + 100
    assert longer.card.content == images_reference(images[:500], grey).card.content
    between = dataset_reference("digits", "train", grey, 450)  # a longer one is no beginning of it
    assert between.card.content == images_reference(images[:450], grey).card.content
    assert not list(tmp_path.rglob("partial*"))
    with pytest.raises(EvaluationError, match="1,000,000.*digits"):
        dataset_reference("digits", "train", grey, 10**6)


def test_progress_counts_images_whatever_the_size_of_batches(grey, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    images = np.asarray(load("digits", "train").images)[:40]
    images_reference(iter([images[:30], images[30:]]), grey, n=40, batch_size=8, name="samples")
    assert capsys.readouterr().err.splitlines() == [
        "features of samples: 30 of 40, 0:00 left", "features of samples: 40 of 40, 0:00 left"
    ]  # fmt: skip


def test_two_callers_at_once_compute_dataset_statistics_once(grey, monkeypatch, tmp_path):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    calls, network, started = [], grey.network.forward, threading.Event()

    def counting(x):
        calls.append(len(x))
        started.set()
        time.sleep(0.02)
        return network(x)

    monkeypatch.setattr(grey.network, "forward", counting)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(dataset_reference, "digits", "train", grey, 400)
        assert started.wait(60)
        second = pool.submit(dataset_reference, "digits", "train", grey, 400)
        assert first.result().card == second.result().card
    assert sum(calls) == 400


def test_datasets_by_name_work_on_both_sides(grey, monkeypatch, tmp_path):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    result = evaluate_images("digits:validation", "digits:train:300", grey, n=200)
    assert (result.card.n, result.card.reference.n) == (200, 300)
    assert result.card.images == "digits (validation)"
    same = evaluate_images("digits:train:300", "digits:train:300", grey)
    assert same.frechet < 1e-9
    assert "the images are the reference itself" in same.card.notes
    with pytest.raises(EvaluationError, match="expected 200 images.*300"):
        evaluate_images(as_reference("digits:train:300", grey), "digits:train:300", grey, n=200)


class Unused:
    """An extractor that must not be called."""

    name = weights = resize = "unused"
    is_fid = False

    def __call__(self, images):
        raise AssertionError("computed features")


@pytest.mark.parametrize(
    ("n", "count", "reference", "metrics", "error"),
    [
        (30, 20, 40, None, EvaluationError),  # more than there are
        (3, 20, 40, None, InvalidValueError),  # KID needs 4
        (None, 3, 40, None, EvaluationError),
        (None, 20, 3, None, EvaluationError),
        (None, 20, "digits:train:99999", None, EvaluationError),
        (None, 20, 40, ["fidd"], InvalidValueError),
        (None, 20, 40, [], InvalidValueError),
    ],
)
def test_counts_and_names_are_checked_before_any_features(n, count, reference, metrics, error):
    reference = pictures(reference) if isinstance(reference, int) else reference
    with pytest.raises(error):
        evaluate_images(pictures(count), reference, Unused(), n=n, metrics=metrics)
