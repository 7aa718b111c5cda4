"""A trained network as a diffusers pipeline."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from scalelong import ConstantScaling, LearnableScaling, UViT, build_unet
from scalelong.diffusion import get_process, get_sampler, guided
from scalelong.diffusion.network import Denoiser
from scalelong.models.pipeline import ScaleLongPipeline

TINY = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("process", ["vp", "ddpm", "sd"])
def test_the_pipeline_samples_as_our_sampler_does(process):
    net = UViT(**TINY, scaling=ConstantScaling(0.5)).eval()
    x_T = torch.randn(3, 1, 8, 8)
    pipe = quiet(ScaleLongPipeline.of(net, process))
    images = pipe(3, num_inference_steps=10, latents=x_T, output_type="pt").images
    chosen = get_process(process)
    expected = get_sampler("dpm-solver++")(guided(Denoiser(net), chosen), x_T, chosen, 10)
    torch.testing.assert_close(images, expected.detach(), atol=1e-4, rtol=1e-4)


def test_classes_guidance_and_image_types():
    net = UViT(**TINY, num_classes=4).eval()
    pipe = quiet(ScaleLongPipeline.of(net, "vp", null_label=3))
    generator = torch.Generator().manual_seed(0)
    images = pipe(2, 4, generator, class_labels=[0, 2], guidance_scale=3.0, output_type="np").images
    assert images.shape == (2, 8, 8, 1)
    assert (images >= 0).all()
    assert pipe(1, 2, class_labels=1).images[0].size == (8, 8)
    with pytest.raises(ValueError, match="output_type"):
        pipe(1, 2, class_labels=1, output_type="gif")


@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_a_saved_pipeline_gives_the_same_images(tmp_path, kind):
    if kind == "uvit":
        net = UViT(**TINY, scaling=LearnableScaling())
    else:
        net = build_unet("cifar10", LearnableScaling(), sample_size=8, in_channels=1, out_channels=1,
                         block_out_channels=(32, 32, 32, 32), attention_head_dim=8, layers_per_block=1)  # fmt: skip
    pipe = quiet(ScaleLongPipeline.of(net.eval(), "vp"))
    pipe.save_pretrained(tmp_path)
    again = quiet(ScaleLongPipeline.from_pretrained(tmp_path))
    x_T = torch.randn(2, 1, 8, 8)
    a, b = (p(2, 3, latents=x_T, output_type="np").images for p in (pipe, again))
    np.testing.assert_allclose(a, b, atol=1e-5)
    again.scheduler = DDIMScheduler.from_config(again.scheduler.config)
    assert again(2, 3, latents=x_T, output_type="np").images.shape == (2, 8, 8, 1)
