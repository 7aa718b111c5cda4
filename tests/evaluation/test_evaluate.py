"""Images against a reference, from whatever holds them; what is wrong is said in a sentence."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from small_pictures import pictures, write_pictures
from torch import nn

from scalelong import ScaleLongError
from scalelong.data import load
from scalelong.errors import EvaluationWarning
from scalelong.evaluation import (
    Evaluation,
    Generation,
    ModuleExtractor,
    as_reference,
    compare,
    dataset_reference,
    evaluate_images,
    frechet_distance,
    images_reference,
    kernel_distance,
    read_reference,
    write_reference,
)
from scalelong.evaluation import reference as reference_module
from scalelong.evaluation.statistics import Moments


@pytest.fixture
def other():
    return pictures(60, seed=1, high=200)


def by_hand(extractor, array):
    with torch.inference_mode():
        features = extractor(torch.from_numpy(array)).double().numpy()
    return features, Moments(len(array), *map(torch.from_numpy, (features.mean(0), np.cov(features, rowvar=False))))


def test_figures_are_those_of_the_features(extractor, other):
    array = pictures(70)
    found = evaluate_images(array, other, extractor)
    (features, moments), (others, target) = by_hand(extractor, array), by_hand(extractor, other)
    assert found.frechet == pytest.approx(frechet_distance(moments, target).value, rel=1e-9)
    expected = kernel_distance(torch.from_numpy(features), torch.from_numpy(others)).value
    assert found.kid == pytest.approx(expected, rel=1e-6)
    assert found.frechet_interval.low < found.frechet < found.frechet_interval.high
    assert found.kid_interval.low < found.kid < found.kid_interval.high


def test_every_way_to_give_images_gives_the_same_figures(extractor, other, tmp_path):
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
    found = [evaluate_images(way, other, extractor, batch_size=16) for way in ways]
    for evaluation in found:
        assert evaluation.frechet == pytest.approx(found[0].frechet, rel=1e-6)
        assert evaluation.kid == pytest.approx(found[0].kid, rel=1e-4)
        assert evaluation.card.content == found[0].card.content
        assert evaluation.card.n == 50
    assert found[4].card.images == "set"


def test_n_takes_the_first_images(extractor, other):
    array = pictures(50)
    first = evaluate_images(array[:30], other, extractor)
    for images in (array, iter([array[:20], array[20:]])):
        assert evaluate_images(images, other, extractor, n=30).card.content == first.card.content


def test_fid_is_only_what_fids_inception_gives(extractor, other):
    found = evaluate_images(pictures(50), other, extractor)
    assert found.fid is None
    assert found.card.metric == "Fréchet distance of small (not FID)"
    assert any("not FID" in note for note in found.card.notes)
    extractor.is_fid = True
    assert (again := evaluate_images(pictures(50), other, extractor)).fid == again.frechet
    assert again.card.metric == "FID"


def test_the_card_says_that_n_biases_the_distance(extractor, other):
    assert any("N = 50" in note for note in evaluate_images(pictures(50), other, extractor).card.notes)


def test_too_few_images_warn_with_the_rank(other):
    wide = ModuleExtractor(nn.Flatten(), "wide")  # 192 features
    with pytest.warns(EvaluationWarning) as caught:
        found = evaluate_images(pictures(40), other, wide)
    assert "40 images are too few for 192 features: their covariance has rank 39" in str(caught[0].message)
    assert "60 images of the reference" in str(caught[1].message)
    assert found.card.rank == 39
    assert math.isfinite(found.frechet)


def test_evaluation_json_comes_back_as_it_was(extractor, other, tmp_path):
    made = Generation(sampler="ddim", evaluations=50, guidance=1.5, ema=0.999, sample_seed=1, step=10)
    found = evaluate_images(pictures(50), other, extractor, generation=made)
    found.save(tmp_path / "evaluation.json")
    assert Evaluation.load(tmp_path / "evaluation.json") == found
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert {"fid", "frechet", "kid", "kid_spread", "card"} <= stored.keys()
    fields = {"metric", "n", "reference", "extractor", "weights", "resize", "generation", "versions", "seconds"}
    assert fields <= stored["card"].keys()


def test_bad_evaluation_files_are_named(tmp_path):
    path = tmp_path / "evaluation.json"
    for text in ("", "{}", "[]", '{"format": 1}', '{"format": 1, "frechet_interval": null, "kid_interval": null}'):
        path.write_text(text)
        with pytest.raises(ScaleLongError, match="evaluation"):
            Evaluation.load(path)


# ------------------------------------------------------------------------------------------------ bad input


def test_fewer_images_than_asked_for(extractor, other, tmp_path):
    array = pictures(20)
    for images in (array, write_pictures(tmp_path / "few", array)):
        with pytest.raises(ScaleLongError, match=r"30 images were asked for and \w+ has 20"):
            evaluate_images(images, other, extractor, n=30)
    with pytest.raises(ScaleLongError, match="30 images were asked for and sampler gave 20"):
        evaluate_images(iter([array]), other, extractor, n=30, name="sampler")


def test_mixed_sizes_name_the_file(extractor, other, tmp_path):
    folder = write_pictures(tmp_path / "mixed", pictures(5))
    Image.fromarray(pictures(1, size=9)[0]).save(folder / "zebra.png")
    with pytest.raises(ScaleLongError, match=r"zebra.png is 9×9 after images of 8×8"):
        evaluate_images(folder, other, extractor)
    with pytest.raises(ScaleLongError, match="9×9 after images of 8×8"):
        evaluate_images(iter([pictures(5), pictures(5, size=9)]), other, extractor)


def test_a_folder_without_images(extractor, other, tmp_path):
    (tmp_path / "readme.txt").write_text("no image")
    with pytest.raises(ScaleLongError, match="holds no images"):
        evaluate_images(tmp_path, other, extractor)
    with pytest.raises(ScaleLongError, match="is not a folder"):
        evaluate_images(tmp_path / "nowhere", other, extractor)


def test_a_broken_file_is_named(extractor, other, tmp_path):
    folder = write_pictures(tmp_path / "broken", pictures(5))
    (folder / "00003.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(ScaleLongError, match=r"00003.png is not an image"):
        evaluate_images(folder, other, extractor)


def test_batches_that_are_no_uint8_images(extractor, other):
    array = pictures(5)
    wrong = {
        "float32 images where uint8 was expected; scalelong.evaluation.to_uint8": torch.rand(5, 8, 8, 3),
        "int64 images where uint8": array.astype(np.int64),
        r"shape \(5, 3, 8, 8\) where": array.transpose(0, 3, 1, 2).copy(),
        r"shape \(8, 8, 3\)": array[0],
        "gave str": "text",
    }
    for message, batch in wrong.items():
        with pytest.raises(ScaleLongError, match=message):
            evaluate_images(iter([batch]), other, extractor)
    with pytest.raises(ScaleLongError, match="not int"):
        evaluate_images(3, other, extractor)
    with pytest.raises(ScaleLongError, match="gave no images"):
        evaluate_images(iter([]), other, extractor)
    with pytest.raises(ScaleLongError, match="batch_size is 0"):
        evaluate_images(array, other, extractor, batch_size=0)
    with pytest.raises(ScaleLongError, match="n is 1"):
        evaluate_images(array, other, extractor, n=1)


# ------------------------------------------------------------------------------------------------ references


def test_reference_files_come_back_as_they_were(extractor, other, tmp_path):
    reference = images_reference(other, extractor, name="others")
    write_reference(tmp_path / "others.safetensors", reference)
    again = read_reference(tmp_path / "others.safetensors")
    assert again.card == reference.card
    assert torch.equal(again.features.moments.covariance, reference.features.moments.covariance)
    direct = evaluate_images(pictures(50), other, extractor)
    from_file = evaluate_images(pictures(50), str(tmp_path / "others.safetensors"), extractor)
    assert (from_file.frechet, from_file.kid) == (direct.frechet, direct.kid)


def test_pytorch_fids_moments_serve_as_a_reference(extractor, other, tmp_path):
    _, moments = by_hand(extractor, other)
    np.savez(tmp_path / "stats.npz", mu=moments.mean.numpy(), sigma=moments.covariance.numpy())
    found = evaluate_images(pictures(50), tmp_path / "stats.npz", extractor)
    assert found.frechet == pytest.approx(evaluate_images(pictures(50), other, extractor).frechet, rel=1e-9)
    assert found.kid is None
    assert any("does not tell" in note for note in found.card.notes)


def test_pickled_moments_are_not_executed(extractor, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the file was unpickled",))

    np.savez(tmp_path / "stats.npz", mu=np.array([Bomb()], dtype=object), sigma=np.eye(3))
    with pytest.raises(ScaleLongError, match="is not a file of moments"):
        as_reference(tmp_path / "stats.npz", extractor)


def test_references_that_cannot_be(extractor, other, tmp_path):
    with pytest.raises(ScaleLongError, match=r"'cifar01' is neither.*did you mean 'cifar10'"):
        as_reference("cifar01", extractor)
    with pytest.raises(ScaleLongError, match=r"NAME\[:SPLIT\[:N\]\]"):
        as_reference("digits:train:many", extractor)
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(ScaleLongError, match="is not a file of reference statistics"):
        as_reference(tmp_path / "bad.safetensors", extractor)
    reference = images_reference(other, extractor)
    torch.manual_seed(9)
    stranger = ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small")
    with pytest.raises(ScaleLongError, match="were made with weights"):
        evaluate_images(other, reference, stranger)


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
    found = dataset_reference("digits", "train", grey, 400)  # goes on after the 200 that were saved
    assert sum(calls) == 250 + 200
    whole = images_reference(images[:400], grey)
    assert found.card.content == whole.card.content
    assert (found.card.name, found.card.split, found.card.n) == ("digits", "train", 400)
    torch.testing.assert_close(found.features.moments.covariance, whole.features.moments.covariance)
    assert torch.equal(found.features.kept, whole.features.kept)
    before = sum(calls)
    assert dataset_reference("digits", "train", grey, 400).card == found.card  # from the cache
    assert sum(calls) == before
    longer = dataset_reference("digits", "train", grey, 500)  # from the shorter one's end
    assert sum(calls) == before + 100
    assert longer.card.content == images_reference(images[:500], grey).card.content
    between = dataset_reference("digits", "train", grey, 450)  # a longer one is no beginning of it
    assert between.card.content == images_reference(images[:450], grey).card.content
    assert not list(tmp_path.rglob("partial*"))
    with pytest.raises(ScaleLongError, match="images were asked for and digits"):
        dataset_reference("digits", "train", grey, 10**6)


def test_datasets_stand_on_both_sides(grey, monkeypatch, tmp_path):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    found = evaluate_images("digits:validation", "digits:train:300", grey, n=200)
    assert (found.card.n, found.card.reference.n) == (200, 300)
    assert found.card.images == "digits (validation)"
    same = evaluate_images("digits:train:300", "digits:train:300", grey)
    assert same.frechet < 1e-9
    assert "the images are the reference itself" in same.card.notes
    with pytest.raises(ScaleLongError, match="asked for and the statistics of digits are of 300"):
        evaluate_images(as_reference("digits:train:300", grey), "digits:train:300", grey, n=200)


# ------------------------------------------------------------------------------------------------ comparisons


@pytest.fixture
def evaluations(extractor, other):
    target = images_reference(other, extractor, name="others")
    made = {"sampler": "ddim", "evaluations": 50, "guidance": 1.0, "ema": 0.999}

    def evaluation(seed=0, n=50, low=0, reference=target, network=extractor, **changes):
        generation = Generation(**{**made, **changes})
        return evaluate_images(pictures(n, seed=seed, low=low), reference, network, generation=generation)

    return evaluation


def test_like_is_ranked_with_like(evaluations):
    comparison = compare({"near": evaluations(), "far": evaluations(low=120, step=7)})
    assert comparison.ranking == ("near", "far")
    assert [remark.field for remark in comparison.remarks] == ["step"]
    assert comparison.overlapping == ()
    comparison.require()
    assert compare({"a": evaluations(0), "b": evaluations(5)}).overlapping


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 49}, "n"),
        ({"sampler": "ddpm"}, "sampler"),
        ({"evaluations": 49}, "evaluations"),
        ({"guidance": 2.0}, "guidance"),
        ({"ema": 0.0}, "ema"),
    ],
)
def test_what_differs_is_named_and_not_ranked(evaluations, change, field):
    comparison = compare({"a": evaluations(), "b": evaluations(**change)})
    assert [difference.field for difference in comparison.differences] == [field]
    assert not comparison.comparable
    assert comparison.ranking == ()
    with pytest.raises(
        ScaleLongError, match=rf"cannot be ranked, for their cards differ in {field} \(.* in a, .* in b"
    ):
        comparison.require()


def test_another_reference_extractor_or_resize_is_not_ranked(evaluations, extractor, other):
    shorter = images_reference(other[:50], extractor, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=shorter)}).differences
    assert [difference.field for difference in differences] == ["reference", "n of the reference"]
    torch.manual_seed(3)
    stranger = ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small", resize="another")
    against = images_reference(other, stranger, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=against, network=stranger)}).differences
    assert [difference.field for difference in differences] == ["weights", "resize"]


def test_a_reference_by_another_name_is_the_same_reference(evaluations, extractor, other):
    renamed = images_reference(other[::-1].copy(), extractor, name="the same in another order")
    assert compare({"a": evaluations(), "b": evaluations(reference=renamed)}).comparable


def test_what_the_comparison_is_about_may_vary(evaluations):
    pair = {"a": evaluations(), "b": evaluations(sampler="ddpm")}
    comparison = compare(pair, vary=["sampler"])
    assert comparison.comparable
    assert [remark.field for remark in comparison.remarks] == ["sampler"]
    with pytest.raises(ScaleLongError, match="n is what makes figures comparable"):
        compare(pair, vary=["n"])
    with pytest.raises(ScaleLongError, match="unknown field 'samplr'; did you mean 'sampler'"):
        compare(pair, vary=["samplr"])
    with pytest.raises(ScaleLongError, match="at least 2 evaluations"):
        compare({"a": pair["a"]})
