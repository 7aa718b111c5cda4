"""`tune-skips` finds the setting with the lowest KID on shared noise, and leaves the network as it was."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

import scalelong
from scalelong import ConstantScaling, LearnableScaling, SkipTuning, UViT
from scalelong.cli import main
from scalelong.cli.skips import _is_worse, _verdicts
from scalelong.errors import ScaleLongError
from scalelong.evaluation.extractors import build_extractor
from scalelong.evaluation.sources import as_reference
from scalelong.experiments.skip_search import PipelineSource, candidates_of, search_skips, sheet
from scalelong.experiments.statistics import Estimate
from scalelong.skips import scaling_of
from scalelong.training import train
from tiny_runs import tiny_config


class Simulated:
    """Images whose mean is off by |ρ − 0.8|, from the same noise for every ρ."""

    name, placement = "simulated", "join"

    def __init__(self, scaling=None):
        net = UViT(img_size=8, in_chans=1, embed_dim=32, depth=4, num_heads=2)
        self.net = net if scaling is None else scalelong.apply(net, scaling)
        self.drawn = 0

    def images(self, first, count):
        self.drawn += count
        scaler = scaling_of(self.net)
        kappas = (1.0, 1.0) if scaler is None else scaler.spec.coefficients(2)
        rho = kappas[1] / (kappas[0] if isinstance(scaler, type(None)) else 1)
        noise = np.stack([np.random.default_rng(k).normal(size=(8, 8, 1)) for k in range(first, first + count)])
        return (128 + 200 * abs(rho - 0.8) + 30 * noise).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def extractor():
    return build_extractor("pixels")


@pytest.fixture(scope="module")
def reference(extractor):
    noise = np.random.default_rng(10**6).normal(size=(500, 8, 8, 1))
    return as_reference((128 + 30 * noise).clip(0, 255).astype(np.uint8), extractor)


def test_the_best_rho_is_found_with_fewer_images_than_the_full_grid(extractor, reference):
    source, listed = Simulated(), candidates_of("skip-tuning")
    choice = search_skips(source, listed, reference, extractor, samples=256)
    assert choice.result.best == "skip-tuning-0.8"
    assert choice.scaling == SkipTuning(0.8)
    assert choice.change.high < 0
    assert choice.after < choice.before
    assert source.drawn < 256 * len(listed)
    assert scaling_of(source.net) is None
    images, columns = sheet(choice)
    assert len(images) % columns == 0
    assert columns == 2 * 5 + 1  # of 32 images at the first rung


def test_the_scaling_of_the_network_stays_part_of_the_choice(extractor, reference):
    source = Simulated(ConstantScaling(0.9))
    choice = search_skips(source, candidates_of("skip-tuning", "skip-tuning:0.9,skip-tuning:0.6"), reference, extractor,
                          samples=128)  # fmt: skip
    assert choice.scaling.coefficients(2) == pytest.approx((1.0, 0.81))
    assert scaling_of(source.net).spec == ConstantScaling(0.9)


def test_freeu_has_candidates_of_its_own():
    names = candidates_of("freeu")
    assert next(iter(names)) == "none"
    assert len(names) > 9


def test_a_pipeline_of_diffusers_draws_the_same_image_in_any_batch():
    torch.manual_seed(0)
    unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16), layers_per_block=1,
                       norm_num_groups=4, down_block_types=("DownBlock2D",) * 2,
                       up_block_types=("UpBlock2D",) * 2).eval()  # fmt: skip
    pipe = DDIMPipeline(unet, DDIMScheduler())
    whole = PipelineSource(pipe, "ddim", 2, batch_size=4).images(0, 4)
    part = PipelineSource(pipe, "ddim", 2, batch_size=1).images(2, 1)
    assert whole.shape == (4, 8, 8, 1)
    assert np.abs(whole[2:3].astype(int) - part).max() <= 1
    assert not np.array_equal(PipelineSource(pipe, "ddim", 2, seed=1, batch_size=4).images(0, 4), whole)


def test_a_setting_that_is_worse_on_new_noise_is_not_advised(extractor, reference):
    choice = search_skips(Simulated(), candidates_of("skip-tuning"), reference, extractor, samples=256)
    assert not _is_worse(choice)
    worse = replace(choice, change=Estimate(0.002, 0.001, 0.003, 4))
    assert _verdicts(worse)[1] == "worse on new noise: keep the network as it is"
    unclear = replace(choice, change=Estimate(0.002, -0.001, 0.005, 4))
    assert _verdicts(unclear)[1] == "no difference worth choosing: the interval includes zero"


def test_the_command_writes_sheet_figure_and_page(tmp_path, capsys):
    train(tiny_config("digits-uvit", ConstantScaling(0.7), train__steps=1), tmp_path / "run", quiet=True)
    with pytest.raises(SystemExit) as stopped:
        main(["tune-skips", str(tmp_path / "run"), "--extractor", "pixels", "--samples", "128", "--evaluations", "2",
              "--candidates", "skip-tuning:0.5", "--json"])  # fmt: skip
    assert stopped.value.code in (0, None)
    printed = json.loads(capsys.readouterr().out)
    assert {s["name"] for s in printed["standings"]} == {"none", "skip-tuning-0.5"}
    folder = tmp_path / "run" / "tune-skips"
    assert {path.name for path in folder.iterdir()} == {"sheet.png", "kid.png", "report.html", "tune-skips.json"}
    assert (folder / "report.html").read_text().count("data:image/png") == 2


def test_the_folder_of_a_network_is_a_pipeline(tmp_path, capsys):
    train(tiny_config("digits-uvit", ConstantScaling(0.7), train__steps=1), tmp_path / "run", quiet=True)
    with pytest.raises(SystemExit) as stopped:
        main(["tune-skips", str(tmp_path / "run" / "model"), "--reference", "digits", "--extractor", "pixels", "--json",
              "--samples", "128", "--evaluations", "1", "--candidates", "skip-tuning:0.5",
              "--out", str(tmp_path / "out")])  # fmt: skip
    assert stopped.value.code in (0, None)
    assert len(json.loads(capsys.readouterr().out)["standings"]) == 2


@pytest.mark.parametrize(("scaling", "options"), [
    (LearnableScaling(), {}),
    (None, {"samples": 64}),
])  # fmt: skip
def test_what_cannot_be_searched_says_so(scaling, options, extractor, reference):
    with pytest.raises(ScaleLongError, match="freeze|--samples"):
        search_skips(Simulated(scaling), candidates_of("skip-tuning"), reference, extractor, **options)


@pytest.mark.parametrize("call", [("gan",), ("skip-tuning", "cs:0.5"), ("skip-tuning", "none")])
def test_candidates_are_settings_of_inference(call):
    with pytest.raises(ScaleLongError):
        candidates_of(*call)
