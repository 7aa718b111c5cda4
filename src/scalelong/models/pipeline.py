"""A trained network as a diffusers pipeline: schedulers, prompts, images, `save_pretrained`, `from_pretrained`."""

# No `from __future__ import annotations`: diffusers reads the types of __init__'s arguments when it loads a pipeline,
# and versions 0.33 to 0.35 only from classes and typing.Optional.
import importlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from scalelong._modules import aligned
from scalelong.diffusion.network import Denoiser, clip_denoised, guided
from scalelong.diffusion.sampling import to_uint8
from scalelong.diffusion.schedulers import NOISE as SCHEDULERS  # noqa: F401  (serve every objective)
from scalelong.diffusion.schedulers import advance, check_scheduler, scheduler_scale, scheduler_settings, set_timesteps
from scalelong.errors import InvalidValueError, invalid, require, unknown
from scalelong.models.pipeline_folder import INDEX, component, own_modules, pipeline_config, write_code
from scalelong.objective import Objective, get_objective
from scalelong.process import Interpolant
from scalelong.skips import load_scaling, save_scaling, scaling_of, unscaled

require("diffusers", extra="train", purpose="a diffusers pipeline")

import diffusers  # noqa: E402
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, ImagePipelineOutput, ModelMixin  # noqa: E402
from diffusers.utils.torch_utils import randn_tensor  # noqa: E402

import scalelong.models.uvit  # noqa: E402, F401  (diffusers loads networks only from modules that are imported)

SCALING = "scaling.json"


class ScaledUNet(ModelMixin):
    """A U-Net of diffusers with its scaling, in model_index.json. `from_pretrained` returns diffusers' own class."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Any:
        name = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["_class_name"]
        net = getattr(diffusers, name).from_pretrained(folder, **{**kwargs, "use_safetensors": True})
        scaled = load_scaling(aligned(net), folder)
        return scaled if net.dtype == torch.float32 else scaled.to(net.dtype)  # diffusers warns of any cast


class ScaleLongPipeline(DiffusionPipeline):
    """`pipe(batch_size=16).images`, `pipe(class_labels=[3, 8]).images` or `pipe(prompt="a red circle").images`.

    Swap `pipe.scheduler` as with any pipeline: `EulerDiscreteScheduler.from_config(pipe.scheduler.config)`. Whatever
    the network predicts, schedulers for noise prediction serve it; those for flow matching and EDM serve networks that
    were trained on these processes. Any other raises an error.

    Args:
        unet: U-ViT or a diffusers U-Net, scaled or not.
        scheduler: One of diffusers' schedulers with prediction_type "epsilon". The network is called at the time at
            which its noise process has the scheduler's signal-to-noise ratio.
        process: The noise process of training: "vp", "ddpm", "sd", "cosine", "linear", "edm", or a dict with its
            parameters.
        objective: What the network predicts: a dict of `Objective.to_dict()`. None means noise on `process`.
        null_label: The label that means "any class", if there is one.
        class_names: Names that `class_labels` accepts beside numbers.
        guidance_scale: The default of the call's argument.
        text_encoder: Encodes prompts: `text_encoder.encode(prompts)` returns tokens (B, L, D).
        latent_scale: The factor on the latents of such a network.
        vae: The autoencoder of a network of latents.
        clip_denoised: Clamp the predicted image to [-1, 1] at every step. For pixels, not for latents.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2, scaling="cs:0.5")
        >>> pipe = scalelong.ScaleLongPipeline.of(net.eval(), "v")
        >>> pipe.set_progress_bar_config(disable=True)
        >>> pipe(batch_size=2, num_inference_steps=2).images[0].size
        (8, 8)
        >>> pipe.save_pretrained("pipeline")
        >>> scalelong.ScaleLongPipeline.from_pretrained("pipeline").trained_objective.name
        'v'
    """

    _optional_components = ["text_encoder", "vae"]  # noqa: RUF012  (diffusers reads a list)
    model_cpu_offload_seq = "text_encoder->unet->vae"

    def __init__(
        self,
        unet: nn.Module,
        scheduler: Any,
        process: Any = "vp",
        null_label: Optional[int] = None,  # noqa: UP045
        class_names: Any = None,
        guidance_scale: float = 1.0,
        latent_scale: Optional[float] = None,  # noqa: UP045
        text_encoder: Optional[nn.Module] = None,  # noqa: UP045
        vae: Optional[nn.Module] = None,  # noqa: UP045
        clip_denoised: bool = False,
        objective: Any = None,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, text_encoder=text_encoder, vae=vae)
        settings = {"process": process, "null_label": null_label, "class_names": class_names}
        settings |= {"clip_denoised": clip_denoised, "objective": objective}
        self.register_to_config(**settings, guidance_scale=guidance_scale, latent_scale=latent_scale)

    @classmethod
    def of(
        cls, net: nn.Module, objective: str | Interpolant | Objective, null_label: int | None = None, **settings: Any
    ) -> "ScaleLongPipeline":
        """Return a pipeline with DPM-Solver++ for this objective.

        Args:
            net: U-ViT or a diffusers U-Net, scaled or not.
            objective: What the network predicts; a process means noise prediction on it.
            null_label: The label that means "any class", if there is one.
            **settings: Further arguments of the class.

        Returns:
            The pipeline.
        """
        chosen = get_objective(objective)
        scheduler = DPMSolverMultistepScheduler(**scheduler_settings(chosen.process))
        if settings.get("latent_scale"):  # schedulers made from this one's config must not clip latents
            scheduler.register_to_config(clip_sample=False)
        return cls(net, scheduler, **pipeline_config(chosen), null_label=null_label, **settings)

    @property
    def trained_objective(self) -> Objective:
        """What the network was trained to predict."""
        return get_objective(self.config.objective or self.config.process)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int | str | Sequence[str] | None = None,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        class_labels: Tensor | Sequence[int | str] | int | str | None = None,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        guidance_scale: float | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Sample images.

        Args:
            batch_size: Number of images. Default: `num_images_per_prompt` per label or prompt, or one per row of
                `latents`. A text counts as `prompt`.
            class_labels: One label or name for all images, or one per image.
            prompt, negative_prompt: Text for all images, or one per image; the negative one replaces the empty prompt.
            prompt_embeds, negative_prompt_embeds: Their tokens (B, L, D) instead.
            guidance_scale: g of uncond + g·(cond − uncond). Default: the pipeline's, which a run sets.
            latents: x_T ~ N(0, I), (B, C, H, W).
            output_type: "pil", "np" (0 to 1), "pt" (-1 to 1) or "latent" (what the network made, not decoded).
        """
        if output_type not in ("pil", "np", "pt", "latent"):
            raise unknown("output_type", output_type, ("pil", "np", "pt", "latent"))
        if batch_size is not None and not isinstance(batch_size, int):  # pipe("a red circle")
            batch_size, prompt = None, batch_size
        if self.vae is None and self.config.latent_scale and output_type != "latent":
            raise invalid("vae", "an autoencoder for a network of latents", None, "pass vae=, or output_type='latent'")
        objective, device = self.trained_objective, self._execution_device
        process = objective.process
        guidance = self.config.guidance_scale if guidance_scale is None else guidance_scale
        context = self._tokens("prompt", prompt, prompt_embeds)
        labels = self._labels(class_labels)
        if batch_size is not None and num_images_per_prompt != 1:
            raise invalid("num_images_per_prompt", f"1 together with batch_size {batch_size}", num_images_per_prompt)
        given = [len(value) for value in (context, labels) if value is not None and value.ndim]
        rows = 1 if latents is None else len(latents)
        n = batch_size or max(max(given, default=1) * num_images_per_prompt, rows)
        if rows not in (1, n):
            raise invalid("latents", f"one row for all or one for each of the {n} images", rows)
        y = None if labels is None else _rows("class_labels", labels.to(device), n)
        null_context = self._tokens("negative_prompt", negative_prompt, negative_prompt_embeds)
        if context is not None:
            context = _rows("prompt", context.to(device), n)
            if null_context is None and guidance != 1.0 and self.text_encoder is not None:
                null_context = self._tokens("negative_prompt", "", None)
        self._check_conditions(y, context)
        predict = guided(
            self._denoise, objective, guidance, y=y, context=context, null_y=self.config.null_label,
            null_context=None if null_context is None else _rows("negative_prompt", null_context.to(device), n),
        )  # fmt: skip
        if self.config.clip_denoised:
            predict = clip_denoised(predict, process)
        x = self._noise(n, generator, device) if latents is None else latents.to(device).expand(n, -1, -1, -1)
        check_scheduler(self.scheduler, process, latents=bool(self.config.latent_scale))
        times = set_timesteps(self.scheduler, process, num_inference_steps, device)
        x = x * scheduler_scale(self.scheduler)
        for step, t in zip(self.progress_bar(self.scheduler.timesteps), times, strict=True):
            x = advance(self.scheduler, predict, process, x, step, t, generator)
        images = self._images(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    # --------------------------------------------------------------------------------------- conditions

    def _tokens(self, name: str, prompt: Any, embeds: Tensor | None) -> Tensor | None:
        """Return (k, L, D) for a prompt or its tokens, None without either."""
        if embeds is not None or prompt is None:
            return embeds
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not self._needs("text"):
            raise InvalidValueError(f"this network has no text, got {name} {prompts}; leave it out")
        if self.text_encoder is None:
            raise invalid("text_encoder", f"an encoder for {name} {prompts}", None, f"or pass {name}_embeds")
        return self.text_encoder.encode(prompts)

    def _labels(self, labels: Any) -> Tensor | None:
        """Return labels (k,), or one label without dimensions, from numbers and names."""
        if labels is None or isinstance(labels, Tensor):
            return labels
        names = list(self.config.class_names or ())

        def number(label: Any) -> int:
            if isinstance(label, str) and label not in names:
                raise unknown("class", label, names)
            return names.index(label) if isinstance(label, str) else int(label)

        single = isinstance(labels, (str, int))
        return torch.tensor(number(labels) if single else [number(label) for label in labels])

    def _needs(self, condition: str) -> bool:
        keys = {"class": ("num_classes", "num_class_embeds"), "text": ("clip_dim", "cross_attention_dim")}
        return any(self.unet.config.get(key) for key in keys[condition])

    def _check_conditions(self, y: Tensor | None, context: Tensor | None) -> None:
        for name, value, condition in (("class_labels", y, "class"), ("prompt", context, "text")):
            if value is None and self._needs(condition):
                raise invalid(name, f"given for a network trained with a {condition} condition", None)
            if value is not None and not self._needs(condition):
                raise invalid(name, f"None for a network without a {condition} condition", tuple(value.shape))
        rows = self.unet.config.get("num_classes", self.unet.config.get("num_class_embeds"))
        if y is not None and rows and not (int(y.min()) >= 0 and int(y.max()) < rows):
            raise invalid("class_labels", f"in 0 … {rows - 1}", y.tolist())

    # ----------------------------------------------------------------------------------------- sampling

    def _denoise(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        dtype = self.unet.dtype
        cast = {name: c.to(dtype) if c.is_floating_point() else c for name, c in conditions.items()}
        return Denoiser(self.unet)(x.to(dtype), t, **cast)

    def _noise(self, n: int, generator: Any, device: torch.device) -> Tensor:
        config = self.unet.config
        return randn_tensor((n, config.in_channels, config.sample_size, config.sample_size), generator, device)

    def _images(self, x: Tensor, output_type: str) -> Any:
        if self.vae is not None and output_type != "latent":
            scale = self.config.latent_scale or self.vae.config.scaling_factor
            x = self.vae.decode((x / scale + (self.vae.config.shift_factor or 0.0)).to(self.vae.dtype)).sample
        if output_type == "pil":
            return self.numpy_to_pil(to_uint8(x).cpu().numpy() / 255)
        if output_type == "np":
            return (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu().numpy()
        return x

    # ------------------------------------------------------------------------------------------ folders

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write a diffusers folder that a new process opens, the scaling included.

        Args:
            save_directory: The folder.
            **kwargs: Options of diffusers' `save_pretrained`.
        """
        if kwargs.get("push_to_hub"):
            raise invalid("push_to_hub", "False", True, "call pipe.push_to_hub(repo_id), which uploads the scaling too")
        folder, stored = Path(save_directory), "scaling" in self.unet.config  # U-ViT stores its scaling in its config
        with nullcontext() if stored else unscaled(self.unet):
            super().save_pretrained(save_directory, **kwargs)
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not stored:
            save_scaling(self.unet, folder / "unet", allow_unscaled=True)
            index["unet"] = component(self.unet)
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_code(folder, index)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None,
        commit_message: str = "Upload ScaleLongPipeline", create_pr: bool = False, licence: str = "apache-2.0",
    ) -> str:  # fmt: skip
        """Upload the pipeline with its scaling and a short card. `run.push_to_hub` uploads logs and a full card too.

        Args:
            repo_id: owner/name; created if it does not exist.
            private: Whether a new repository is private. Default: the account's.
            token: An access token with the right to write. Default: that of `hf auth login` or $HF_TOKEN.
            commit_message: The message of the commit.
            create_pr: Open a pull request instead of committing.
            licence: The licence of the network, as the hub spells it.

        Returns:
            The address of the commit.

        Examples:
            >>> pipe = scalelong.load_run("digits").pipeline()
            >>> pipe.push_to_hub("somebody/digits-cs", private=True)  # doctest: +SKIP
        """
        from scalelong.models.hub import check_repo_id, pipeline_card, upload

        check_repo_id(repo_id)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            (Path(folder) / "README.md").write_text(pipeline_card(self.unet, repo_id, licence), encoding="utf-8")
            options = {"private": private, "token": token, "message": commit_message, "create_pr": create_pr}
            return upload(folder, repo_id, **options)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> "ScaleLongPipeline":
        """Load what `save_pretrained` or `push_to_hub` wrote, a run or its folder `model/`, including the scaling.

        Args:
            folder: A local folder, or owner/name of a repository on the Hugging Face hub.
            **kwargs: As of diffusers' `DiffusionPipeline.from_pretrained`. Weights are read from safetensors only.

        Returns:
            The pipeline.
        """
        if not Path(folder).exists():
            from scalelong.models.hub import download

            options = {name: kwargs.pop(name) for name in ("revision", "token", "cache_dir") if name in kwargs}
            folder = download(str(folder), **options, ignore=("checkpoints/*", "samples/*"))
        if not (Path(folder) / INDEX).is_file() and (Path(folder) / "model" / INDEX).is_file():
            folder = Path(folder) / "model"  # a run
        for module in own_modules(cls.load_config(folder)):
            importlib.import_module(module)
        pipe = super().from_pretrained(folder, **{**kwargs, "use_safetensors": True})  # never a pickle
        if (Path(folder) / "unet" / SCALING).is_file() and scaling_of(pipe.unet) is None:
            load_scaling(aligned(pipe.unet), Path(folder) / "unet")  # of a version that did not write `ScaledUNet`
        return pipe


def _rows(name: str, value: Tensor, n: int) -> Tensor:
    """Return one row per image: all the same, the rows in order, or each repeated n / k times."""
    k = len(value) if value.ndim else 1
    if n % k:
        raise invalid(name, f"one for all, or a divisor of batch_size {n}", k)
    return value.expand(n) if not value.ndim else value.repeat_interleave(n // k, dim=0)
