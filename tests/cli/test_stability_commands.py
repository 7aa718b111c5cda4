"""`scalelong theory` and `scalelong kappa` as they are used."""

import json

import numpy as np
import pytest
from matplotlib import image

from scalelong.cli import main
from scalelong.kappa import estimate_kappa
from scalelong.report.figures import draw_kappa


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    return left.value.code, captured.out, captured.err


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels)
    return tmp_path / "images.npz", pixels


def test_kappa_prints_the_estimate_of_the_data(capsys, images):
    path, pixels = images
    code, out, _ = run(capsys, "kappa", "--data", str(path), "--skips", "8", "--samples", "2000", "--json")
    assert code == 0
    found, expected = json.loads(out), estimate_kappa(pixels, num_skips=8, samples=2000)
    for name in ("low", "high", "recommended", "mean_ratio", "share_below_5"):
        assert found[name] == pytest.approx(getattr(expected, name))
    assert found["num_images"] == 40


def test_kappa_explains_itself_and_draws(capsys, images, tmp_path):
    path, pixels = images
    figure = tmp_path / "kappa.png"
    code, out, _ = run(
        capsys, "kappa", "--data", str(path), "--skips", "8", "--samples", "2000", "--figure", str(figure)
    )
    assert code == 0
    estimate = estimate_kappa(pixels, num_skips=8, samples=2000)
    for words in (
        f"recommended {estimate.recommended:.2f}",
        estimate.reason,
        "Lemma 3.2",
        "the paper's choice for CIFAR-10",
    ):
        assert words in " ".join(out.split())
    assert image.imread(figure).shape[2] == 4


def test_kappa_of_the_embedded_digits(capsys, tmp_path, monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    code, out, _ = run(capsys, "kappa", "--data", "digits", "--skips", "6", "--json")
    assert code == 0
    found = json.loads(out)
    x = load_digits().images / 8 - 1
    assert found["pixel_second_moment"] == pytest.approx((x**2).mean(), rel=0.05)
    assert found["low"] < found["recommended"] < found["high"] < 1


def test_kappa_s_figure_shows_the_estimate():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    found = estimate_kappa(pixels, num_skips=8, samples=2000)
    _, inputs, ratios, sums = draw_kappa(found, "noise").axes
    heights = [bar.get_height() for bar in ratios.patches]
    width = found.histogram.edges[1] - found.histogram.edges[0]
    assert sum(heights) * width == pytest.approx(sum(found.histogram.counts) / 2000)
    assert heights[12] == pytest.approx(found.histogram.counts[12] / 2000 / width)
    assert ratios.get_lines()[0].get_xdata()[0] == pytest.approx(found.mean_ratio)
    assert inputs.get_lines()[1].get_xdata()[0] == pytest.approx(found.lemma_input_norm)
    curve = sums.get_lines()[0]
    kappas, totals = curve.get_xdata(), curve.get_ydata()
    assert totals[100] == pytest.approx(sum(kappas[100] ** (2 * i) for i in range(8)))
    (mark,) = [line for line in sums.get_lines() if line.get_marker() == "o"]
    assert mark.get_xdata()[0] == found.recommended


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "cifar11", "--skips", "6"), "cifar10"),
        (("--data", "digits", "--skips", "6", "--process", "dppm"), "ddpm"),
    ],
)
def test_kappa_s_errors_are_one_sentence(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    code, _, err = run(capsys, "kappa", *arguments)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_theory_prints_tables_and_verdicts(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    figure = tmp_path / "theory.png"
    small = ("--seeds", "2", "--width", "32", "--skips", "2", "--depth", "1")
    code, out, _ = run(capsys, "theory", *small, "--kappa", "0.8", "--out", str(figure))
    assert code == 0
    for words in ("The paper's predictions", "Theorem 3.1", "Theorem 3.3", "Theorem 3.4", "CS 0.8", "Does it hold"):
        assert words in out
    assert "…" not in out  # nothing is cut off at 80 columns
    assert image.imread(figure).shape[2] == 4


def test_theory_speaks_json(capsys):
    code, out, _ = run(capsys, "theory", "--seeds", "2", "--width", "32", "--skips", "2", "--depth", "1", "--json")
    assert code == 0
    found = json.loads(out)
    assert {verdict["statement"] for verdict in found["verdicts"]} >= {"Theorem 3.1", "Lemma 3.2", "Theorem 3.4"}
    assert found["inputs"][1]["mean_alpha_bar"] == pytest.approx(0.2755, abs=1e-4)


@pytest.mark.parametrize("command", ["theory", "kappa"])
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: scalelong {command}" in out
