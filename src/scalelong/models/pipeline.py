"""A trained network as a diffusers pipeline: any scheduler, PIL images, `save_pretrained` and `from_pretrained`."""

# No `from __future__ import annotations`: diffusers reads the types of __init__'s arguments when it loads a pipeline,
# and versions 0.33 to 0.35 only from classes and typing.Optional.
import warnings
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from scalelong.diffusion.network import Denoiser, guided
from scalelong.diffusion.sampling import to_uint8
from scalelong.errors import require, unknown
from scalelong.process import Process, get_process
from scalelong.skips import load_scaling, save_scaling, unscaled

require("diffusers", extra="train", purpose="a diffusers pipeline")

from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, ImagePipelineOutput  # noqa: E402
from diffusers.utils.torch_utils import randn_tensor  # noqa: E402

GRID = 1000


class ScaleLongPipeline(DiffusionPipeline):
    """`pipe(batch_size=16, num_inference_steps=25).images`; swap `pipe.scheduler` as with any pipeline.

    Args:
        unet: U-ViT or a diffusers U-Net, scaled or not.
        scheduler: A diffusers scheduler with 1000 discrete training steps.
        process: The noise process of training: "vp", "ddpm" or "sd".
        null_label: The label that means "any class", if there is one.
    """

    def __init__(self, unet: nn.Module, scheduler: Any, process: str = "vp", null_label: Optional[int] = None) -> None:  # noqa: UP045
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(process=process, null_label=null_label)

    @classmethod
    def of(cls, net: nn.Module, process: str | Process, null_label: int | None = None) -> "ScaleLongPipeline":
        """Return a pipeline with DPM-Solver++ for this process."""
        chosen = get_process(process)
        scheduler = DPMSolverMultistepScheduler(trained_betas=chosen.betas(GRID).tolist(), timestep_spacing="trailing")
        return cls(net, scheduler, chosen.name, null_label)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        class_labels: Tensor | list[int] | int | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        guidance_scale: float = 1.0,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Sample. `output_type` is "pil", "np" (0 to 1) or "pt" (-1 to 1, also for latents)."""
        if output_type not in ("pil", "np", "pt"):
            raise unknown("output_type", output_type, ("pil", "np", "pt"))
        process = get_process(self.config.process)
        config = self.unet.config
        size = config.get("img_size", config.get("sample_size"))
        shape = (batch_size, config.get("in_chans", config.get("in_channels")), size, size)
        device = self._execution_device
        x = randn_tensor(shape, generator=generator, device=device) if latents is None else latents.to(device)
        y = None if class_labels is None else torch.as_tensor(class_labels, device=device).expand(batch_size)
        context = None if prompt_embeds is None else prompt_embeds.to(device)
        null = {"null_y": self.config.null_label, "null_context": negative_prompt_embeds}
        eps_fn = guided(Denoiser(self.unet), process, guidance_scale, y=y, context=context, **null)
        with warnings.catch_warnings():  # diffusers calls np.array on a tensor, which NumPy 2 deprecates
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
            self.scheduler.set_timesteps(num_inference_steps, device=device)
        times = process.grid(GRID)
        for step in self.progress_bar(self.scheduler.timesteps):
            t = times[step.cpu().long()].float().expand(batch_size).to(device)
            x = self.scheduler.step(eps_fn(self.scheduler.scale_model_input(x, step), t), step, x).prev_sample
        images: Any = x
        if output_type == "pil":
            images = self.numpy_to_pil(to_uint8(x).cpu().numpy() / 255)
        elif output_type == "np":
            images = (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu().numpy()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write a diffusers folder, with the scaling beside a network that does not store it in its config."""
        if "scaling" in self.unet.config:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        with unscaled(self.unet):
            super().save_pretrained(save_directory, *args, **kwargs)
        save_scaling(self.unet, Path(save_directory) / "unet", allow_unscaled=True)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *args: Any, **kwargs: Any) -> "ScaleLongPipeline":
        """Load a folder written by `save_pretrained`, including the scaling."""
        pipe = super().from_pretrained(folder, *args, **kwargs)
        if (Path(folder) / "unet" / "scaling.json").is_file():
            load_scaling(pipe.unet, Path(folder) / "unet")
        return pipe
