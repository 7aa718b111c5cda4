"""A trained network as a diffusers pipeline: schedulers, conditions, and folders that a new process opens."""

import json
import os
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DConditionModel
from torch import nn

from scalelong import ConstantScaling, LearnableScaling, UViT, build_unet, remove
from scalelong.data.prompts import PromptEncoder
from scalelong.diffusion import get_process, get_sampler, guided
from scalelong.diffusion.network import Denoiser
from scalelong.errors import InvalidValueError, UnknownNameError
from scalelong.models.pipeline import SCHEDULERS, ScaledUNet, ScaleLongPipeline
from scalelong.models.prediction import Prediction
from scalelong.process import VPSDE

TINY = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}
SMALL_UNET = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "block_out_channels": (32, 32, 32, 32),
              "attention_head_dim": 8, "layers_per_block": 1}  # fmt: skip


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize("process", ["vp", "ddpm", "sd"])
def test_the_pipeline_samples_as_our_sampler_does(process):
    net = UViT(**TINY, scaling=ConstantScaling(0.5)).eval()
    x_T = torch.randn(3, 1, 8, 8)
    pipe = quiet(ScaleLongPipeline.of(net, process))
    images = pipe(3, num_inference_steps=10, latents=x_T, output_type="pt").images
    chosen = get_process(process)
    expected = get_sampler("dpm-solver++")(guided(Denoiser(net), chosen), x_T, chosen, 10)
    torch.testing.assert_close(images, expected.detach(), atol=1e-4, rtol=1e-4)


class GaussianNet(nn.Module):
    """The exact noise prediction for pixels x_0 ~ N(mean, std²), as a function of the network's timestep."""

    config = UViT(**TINY).config
    dtype, device = torch.float32, torch.device("cpu")
    mean, std = 0.1, 0.25

    def __init__(self, process):
        super().__init__()
        self.process, self.weight = process, nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, x, t):
        self.seen.append(t[0].item())
        t = t / 999 if self.process.name == "vp" else t + 1 - self.process.first_step
        alpha, sigma = (f(t).float().view(-1, 1, 1, 1) for f in (self.process.alpha, self.process.sigma))
        return sigma * (x - alpha * self.mean) / ((alpha * self.std) ** 2 + sigma**2)


AVAILABLE = [name for name in SCHEDULERS if name != "DPMSolverSDEScheduler"]  # which needs torchsde


@pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")  # diffusers and NumPy 2
@pytest.mark.parametrize("name", AVAILABLE)
def test_a_swapped_scheduler_samples_the_distribution_of_the_data(name):
    process = VPSDE()
    net = GaussianNet(process)
    pipe = quiet(ScaleLongPipeline.of(net, process))
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
    images, again, others = (pipe(64, 40, seeded(s), output_type="pt").images for s in (0, 0, 1))
    assert images.mean().item() == pytest.approx(net.mean, abs=0.02)
    assert images.std().item() == pytest.approx(net.std, abs=0.05)  # steps of order 1 lose a tenth of it
    assert torch.equal(images, again)
    assert (images - others).abs().mean() > 0.5 * net.std
    assert 990 < max(net.seen) <= 999  # timesteps in the network's unit, not the scheduler's
    assert min(net.seen) > 0


def test_a_scheduler_with_another_schedule_meets_the_network_at_its_noise_levels():
    """Stable Diffusion's betas on a network of the VP-SDE: different times, the right distribution."""
    net = GaussianNet(VPSDE())
    pipe = quiet(ScaleLongPipeline.of(net, VPSDE()))
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    pipe.scheduler = diffusers.UniPCMultistepScheduler(**betas)
    images = pipe(64, 40, seeded(), output_type="pt").images
    assert images.std().item() == pytest.approx(net.std, abs=0.05)
    assert max(net.seen) < 800


REFUSED = {
    "LCMScheduler": {}, "TCDScheduler": {}, "EDMEulerScheduler": {}, "FlowMatchEulerDiscreteScheduler": {},
    "DDIMInverseScheduler": {}, "IPNDMScheduler": {}, "UnCLIPScheduler": {},
    "DDIMScheduler": {"prediction_type": "v_prediction"}, "DDPMScheduler": {"variance_type": "learned_range"},
    "DPMSolverMultistepScheduler": {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_scheduler_that_does_not_fit_is_refused(name):
    pipe = quiet(ScaleLongPipeline.of(GaussianNet(VPSDE()), "vp"))
    pipe.scheduler = getattr(diffusers, name)(**REFUSED[name])
    with pytest.raises(InvalidValueError):
        pipe(1, 2)


@pytest.mark.parametrize("cls", [DDIMPipeline, DDPMPipeline])
def test_pipelines_of_diffusers_accept_a_uvit(cls):
    net = UViT(**TINY, scaling=ConstantScaling(0.5)).eval()
    scheduler = DDIMScheduler() if cls is DDIMPipeline else DDPMScheduler()
    images = quiet(cls(net, scheduler))(2, seeded(), num_inference_steps=3, output_type="np").images
    assert images.shape == (2, 8, 8, 1)


def test_a_prediction_is_a_tensor_that_does_not_spread(tmp_path):
    net, x = UViT(**TINY), torch.randn(2, 1, 8, 8)
    eps = net(x, 5.0)
    assert isinstance(eps, torch.Tensor)
    assert type(eps) is Prediction
    assert torch.equal(eps, eps.sample)
    for plain in (eps + 1, eps.sample, eps[0], torch.cat([eps, eps]), eps.detach().clone()):
        assert type(plain) is torch.Tensor
    eps.sample.square().mean().backward()
    assert net.patch_embed.proj.weight.grad.abs().sum() > 0
    torch.save(eps.detach(), tmp_path / "eps.pt")
    assert type(torch.load(tmp_path / "eps.pt")) is torch.Tensor


# ----------------------------------------------------------------------------------------- conditions


def test_classes_by_number_or_name_and_image_types():
    net = UViT(**TINY, num_classes=4).eval()
    pipe = quiet(ScaleLongPipeline.of(net, "vp", null_label=3, class_names=["cat", "dog", "owl"]))
    images = pipe(2, 4, seeded(), class_labels=[0, 2], guidance_scale=3.0, output_type="np").images
    assert images.shape == (2, 8, 8, 1)
    assert (images >= 0).all()
    named = pipe(None, 4, seeded(), class_labels=["cat", "owl"], guidance_scale=3.0, output_type="np").images
    np.testing.assert_array_equal(images, named)
    assert pipe(1, 2, class_labels=1).images[0].size == (8, 8)
    with pytest.raises(UnknownNameError, match="gif"):
        pipe(1, 2, class_labels=1, output_type="gif")
    with pytest.raises(UnknownNameError, match="dgo.*dog"):
        pipe(1, 2, class_labels="dgo")
    for wrong in (None, 7, [0, 1, 2]):
        with pytest.raises(InvalidValueError):
            pipe(2, 2, class_labels=wrong)


def text_pipeline():
    encoder = PromptEncoder("words", 4)
    net = UViT(**TINY, clip_dim=encoder.loaded.width, num_clip_token=4).eval()
    return quiet(ScaleLongPipeline.of(net, "vp", text_encoder=encoder))


def test_prompts_as_diffusers_users_write_them():
    pipe = text_pipeline()

    def images(*args, **options):
        return pipe(*args, num_inference_steps=3, generator=seeded(), output_type="pt", **options).images.numpy()

    one = images("a red circle")
    np.testing.assert_array_equal(one, images(prompt=["a red circle"]))
    assert images(["a red circle", "two squares"]).shape[0] == 2
    four = images(prompt=["a red circle", "two squares"], num_images_per_prompt=2)
    assert four.shape[0] == 4
    assert images(4, prompt="a red circle").shape[0] == 4
    latents = torch.randn(4, 1, 8, 8, generator=seeded())  # one per image, as in diffusers
    pair = {"prompt": ["a red circle", "two squares"], "num_images_per_prompt": 2}
    np.testing.assert_array_equal(images(**pair, latents=latents), four)
    with pytest.raises(InvalidValueError, match="latents.*6 images, got 4"):
        images(**pair | {"num_images_per_prompt": 3}, latents=latents)
    with pytest.raises(InvalidValueError, match="num_images_per_prompt must be 1 together with batch_size 4"):
        images(4, **pair)
    guided_by = images("a red circle", guidance_scale=3.0)
    assert not np.array_equal(one, guided_by)
    assert not np.array_equal(guided_by, images("a red circle", guidance_scale=3.0, negative_prompt="squares"))
    tokens = pipe.text_encoder.encode(["a red circle"])
    np.testing.assert_array_equal(one, images(prompt_embeds=tokens))
    with pytest.raises(InvalidValueError):
        images()
    with pytest.raises(InvalidValueError, match="class_labels"):
        images("a red circle", class_labels=1)
    with pytest.raises(InvalidValueError, match="no text"):
        quiet(ScaleLongPipeline.of(UViT(**TINY), "vp"))("a red circle")


# -------------------------------------------------------------------------------------- a new process

CHILD = """
import sys
import numpy as np, torch
from diffusers import DiffusionPipeline

def sample(pipe, folder, name):
    pipe.set_progress_bar_config(disable=True)
    condition = eval(open(folder + "/condition.txt").read())
    images = pipe(2, 3, torch.Generator().manual_seed(3), output_type="pt", **condition).images
    np.save(f"{folder}/{name}.npy", images.numpy())

for folder in sys.argv[1:]:  # first, so that nothing of ours is imported
    pipe = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    sample(pipe, folder, "diffusers")

from scalelong.models.pipeline import ScaleLongPipeline
for folder in sys.argv[1:]:
    sample(ScaleLongPipeline.from_pretrained(folder), folder, "own")
"""


def text_unet(width):
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
    return UNet2DConditionModel(sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16, 16),
                                layers_per_block=1, cross_attention_dim=width, attention_head_dim=4,
                                norm_num_groups=4, **blocks)  # fmt: skip


def pipelines():
    """Name → (pipeline, condition): U-ViT and U-Net, with classes and text, CS and LS."""
    import scalelong

    encoder = PromptEncoder("words", 4)
    text = {"prompt": ["a red circle", "two blue squares"], "guidance_scale": 2.0}
    classes = {"class_labels": [0, 2], "guidance_scale": 2.0}
    width = encoder.loaded.width
    return {
        "uvit-ls": (ScaleLongPipeline.of(UViT(**TINY, num_classes=4, scaling=LearnableScaling()), "vp", 3), classes),
        "uvit-cs-text": (
            ScaleLongPipeline.of(UViT(**TINY, clip_dim=width, num_clip_token=4, scaling=ConstantScaling(0.3)), "sd",
                                 text_encoder=encoder), text),
        "unet-cs": (ScaleLongPipeline.of(build_unet("cifar10", ConstantScaling(0.6), num_class_embeds=4, **SMALL_UNET),
                                         VPSDE(beta_max=15), 3), classes),
        "unet-ls-text": (
            ScaleLongPipeline.of(scalelong.apply(text_unet(width), LearnableScaling()), "ddpm", text_encoder=encoder),
            text),
    }  # fmt: skip


def in_new_process(folders, cache):
    env = {**os.environ, "HF_HOME": str(cache), "HF_MODULES_CACHE": str(cache / "modules")}
    done = subprocess.run([sys.executable, "-c", CHILD, *folders], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_new_process_opens_what_save_pretrained_wrote(tmp_path):
    folders = []
    for name, (pipe, condition) in pipelines().items():
        folder = tmp_path / name
        quiet(pipe).unet.eval()
        pipe.save_pretrained(folder)
        images = pipe(2, 3, seeded(3), output_type="pt", **condition).images
        np.save(folder / "expected.npy", images.numpy())
        (folder / "condition.txt").write_text(repr(condition))
        folders.append(str(folder))
        json.loads((folder / "model_index.json").read_text())
    in_new_process(folders, tmp_path / "hf")
    for folder in folders:
        expected, own, theirs = (np.load(f"{folder}/{name}.npy") for name in ("expected", "own", "diffusers"))
        np.testing.assert_array_equal(own, expected, err_msg=folder)
        np.testing.assert_array_equal(theirs, expected, err_msg=folder)


def test_a_folder_of_an_earlier_version_keeps_its_scaling(tmp_path):
    pipe, condition = pipelines()["unet-cs"]
    quiet(pipe).unet.eval()
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["unet"] = ["diffusers", "UNet2DModel"]
    for name in ("class_names", "guidance_scale", "latent_scale", "text_encoder", "vae"):
        index.pop(name, None)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    again = quiet(ScaleLongPipeline.from_pretrained(tmp_path))
    a, b = (p(2, 3, seeded(), output_type="pt", **condition).images for p in (pipe, again))
    assert torch.equal(a, b)
    remove(again.unet)
    assert not torch.allclose(a, again(2, 3, seeded(), output_type="pt", **condition).images)


@pytest.mark.parametrize("name", ["uvit-ls", "unet-cs"])
def test_a_pipeline_with_a_compiled_network_is_saved_as_the_network_inside(tmp_path, name):
    pipe, condition = pipelines()[name]
    quiet(pipe).unet.eval()
    expected = pipe(2, 2, seeded(), output_type="pt", **condition).images
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    pipe.save_pretrained(tmp_path)
    again = quiet(ScaleLongPipeline.from_pretrained(tmp_path))
    assert torch.equal(again(2, 2, seeded(), output_type="pt", **condition).images, expected)


@pytest.mark.parametrize("name", ["uvit-ls", "unet-cs"])
@pytest.mark.filterwarnings("ignore")
def test_pickled_weights_are_not_opened(tmp_path, name):
    pipe, _ = pipelines()[name]
    pipe.save_pretrained(tmp_path, safe_serialization=False)
    assert list((tmp_path / "unet").glob("*.bin"))
    for load in (lambda: ScaleLongPipeline.from_pretrained(tmp_path),
                 lambda: (UViT if "uvit" in name else ScaledUNet).from_pretrained(tmp_path / "unet")):  # fmt: skip
        with pytest.raises(OSError, match="safetensors"):
            load()


def test_tied_weights_are_saved_and_loaded(tmp_path):
    from scalelong.models.registry import load_network, save_network

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.two.weight = self.one.weight

    net = Tied()
    save_network(net, tmp_path)
    again = load_network(tmp_path, Tied)
    assert torch.equal(again.one.weight, net.one.weight)
    assert again.two.weight is again.one.weight


@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_the_network_of_a_run_is_a_pipeline_folder(tmp_path, kind):
    """`model/` opens as a pipeline, and U-ViT and U-Net runs both return a tensor with `.sample`."""
    from scalelong import load_run
    from scalelong.training.loop import train
    from tiny_runs import tiny_config

    unet = {"model__kind": "unet", "model__unet": "cifar10", "model__channels": "32,32,32,32", "model__layers": 1}
    config = tiny_config("digits-uvit-class", ConstantScaling(0.8), train__steps=1, **(unet if kind == "unet" else {}))
    train(config, tmp_path / "run", quiet=True)
    run, again = load_run(tmp_path / "run"), quiet(ScaleLongPipeline.from_pretrained(tmp_path / "run" / "model"))
    a, b = (
        p(None, 2, seeded(), class_labels=["3", "8"], output_type="pt").images for p in (quiet(run.pipeline()), again)
    )
    assert torch.equal(a, b)
    labels = torch.tensor([1, 2])
    condition = {"y": labels} if kind == "uvit" else {"class_labels": labels}
    eps = run.net(torch.randn(2, 1, 8, 8), run.process.network_time(torch.tensor([0.2, 0.9])), **condition)
    assert type(eps) is Prediction
    assert torch.equal(eps, eps.sample)
    assert run.net(torch.randn(2, 1, 8, 8), 5, **condition).shape == (2, 1, 8, 8)
