"""A run folder. Everything in this package opens, locks, writes and reads runs through `Run`.

    run = scalelong.load_run("runs/digits-cs-0.7-seed0")
    run.config, run.step, run.metrics["loss"].last
    images = run.generate(Request(n=16))

Reading follows one rule. What a run *is* must be right: `config`, `facts`, `net` and `step` raise `RunError` for a file
that is absent or damaged. What was *measured* may be incomplete: `record`, `settings`, `metrics`, `stability`,
`evaluations`, `robustness` and `resources` leave such a file out. Properties read their file once, on first use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import RunError, invalid, one_line
from scalelong.files import atomic_folder, check_target, read_json, sweep, write_text
from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import Config, Facts, flatten
from scalelong.runs.locate import locate, no_run
from scalelong.runs.logs import EMPTY, Series, StabilityArrays, read_columns, read_stability_arrays

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from scalelong.evaluation import Evaluation
    from scalelong.evaluation.extractors import FeatureExtractor
    from scalelong.evaluation.memorisation import Memorisation
    from scalelong.evaluation.reference import Reference
    from scalelong.evaluation.sources import DatasetImages
    from scalelong.models.pipeline import ScaleLongPipeline
    from scalelong.objective import Objective
    from scalelong.process import Interpolant
    from scalelong.runs.generate import Request

CONFIG = "config.json"
STEP = "step.json"  # in model/: the step of the network
REAL = "real.png"  # in samples/: images of the data beside which samples can be judged
RESOURCES = "resources.json"
COMPARISON = "comparison.json"  # in the folder of a comparison: its runs
# Evaluations by their origin: `scalelong evaluate`, `scalelong compare`, and the newest one that training made.
EVALUATIONS = {"evaluate": "evaluation.json", "compare": "distance.json", "train": "evaluations/step-*.json"}


@dataclass(frozen=True)
class Selection:
    """Which step's network was evaluated, and why if it is not the last one."""

    step: int
    reason: str | None = None
    minimum_over: int | None = None  # evaluations that it is the best of


class Run:
    """One run folder. `Run(folder)` opens any folder, also one that does not exist yet."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.config_path = self.folder / CONFIG
        self.metrics_path = self.folder / "metrics.jsonl"
        self.stability_path = self.folder / "stability.jsonl"
        self.checkpoints_path = self.folder / "checkpoints"
        self.samples_path = self.folder / "samples"
        self.model_path = self.folder / "model"
        self.best_path = self.folder / "best"  # the network of the lowest distance (evaluate.keep_best)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def exists(self) -> bool:
        return self.config_path.exists()

    # ------------------------------------------------------------------------- what the run is (strict)

    @cached_property
    def config(self) -> Config:
        values = self._checked_record()["config"]
        sampling = values.get("sample")
        if isinstance(sampling, dict):
            sampling.setdefault("clip_denoised", False)  # a run from before this setting samples as it did then
        return Config.from_dict(values)

    @cached_property
    def facts(self) -> Facts:
        """Shapes and class names: what sampling needs beside the network."""
        record = self._checked_record()
        try:
            names = record.get("class_names")
            return Facts(Shapes(**record["shapes"]), tuple(names) if names else None)
        except (KeyError, TypeError) as error:
            raise RunError(f"{self.config_path} has no valid shapes and class_names: {error}") from error

    @cached_property
    def net(self) -> nn.Module:
        """The trained EMA network, scaled as it was trained, in eval mode: `eps = run.net(x, t)` for objective eps.

        For other objectives `x, t = run.objective.network_inputs(x_t, t)` before the call, and
        `x_0, eps = run.objective.denoised(x_t, output, t)` after it.

        x is (B, C, H, W), t a number or (B,). t is the timestep the network was trained on, about 0 (clean) to 999 or
        1000 (noise): `run.process.network_time(…)`, which is 999·t for process "vp" with t in [0, 1], n − 1 for "ddpm"
        and n for "sd" with n in 1 … 1000. A network with a condition also needs `y=` or `context=`; a U-Net calls
        them `class_labels=` and `encoder_hidden_states=`. U-ViT and U-Nets return a tensor, which is also its own
        `.sample`, as diffusers' pipelines expect.
        """
        if not self.model_path.is_dir():
            raise RunError(f"{self.folder} has no trained network (model/); train it to its first checkpoint")
        model = get_model(self.config.model.kind)
        net = model.load(self.model_path, lambda: build_network(self.config, self.facts.shapes)).eval()
        if type(net).__module__.startswith("diffusers."):
            from scalelong.models.prediction import prediction_hook

            net.register_forward_hook(prediction_hook)
        return net

    @property
    def objective(self) -> Objective:
        """What the network was trained to predict."""
        from scalelong.objective import get_objective

        return get_objective(self.config.diffusion.spec())

    @property
    def process(self) -> Interpolant:
        """The noise process of training."""
        return self.objective.process

    @property
    def step(self) -> int:
        """The training step of the network in model/."""
        try:
            return int(json.loads((self.model_path / STEP).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise RunError(f"could not read {self.model_path / STEP}: {one_line(error)}") from error

    def _checked_record(self) -> dict[str, Any]:
        if not self.exists:
            raise no_run(self.folder, CONFIG)
        try:
            record = json.loads(self.config_path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise RunError(f"could not read {self.config_path}: {one_line(error)}") from error
        if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
            raise RunError(f"{self.config_path} is not the config of a run: 'config' must be an object")
        if not isinstance(record.get("data", {}), dict):
            raise RunError(f"{self.config_path} is not the config of a run: 'data' must be an object")
        return record

    # ---------------------------------------------------------------------- what was measured (tolerant)

    @cached_property
    def record(self) -> dict[str, Any]:
        """config.json as it is: config, data, shapes, versions, parameters, device…"""
        return read_json(self.config_path) or {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config by dotted keys, as it is stored."""
        config = self.record.get("config")
        return flatten(config) if isinstance(config, dict) else {}

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """The columns of metrics.jsonl."""
        return read_columns(self.metrics_path)

    def column(self, name: str) -> Series:
        """One column of metrics.jsonl, empty if it was never logged."""
        return self.metrics.get(name, EMPTY)

    @property
    def logged_step(self) -> int:
        """The last step in metrics.jsonl, 0 before the first."""
        return int(max((series.steps[-1] for series in self.metrics.values() if len(series)), default=0))

    @cached_property
    def stability(self) -> StabilityArrays | None:
        """The stability monitor's log."""
        return read_stability_arrays(self.stability_path)

    @cached_property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Stored evaluations by origin: "evaluate", "compare", "train" (the newest). Each has a "card"."""
        stored = {}
        for origin, pattern in EVALUATIONS.items():
            paths = sorted(self.folder.glob(pattern))
            values = read_json(paths[-1]) if paths else None
            if values is not None and isinstance(values.get("card"), dict):
                stored[origin] = values
        return stored

    @cached_property
    def robustness(self) -> dict[str, Any] | None:
        """robustness.json, written by `scalelong robustness`."""
        return read_json(self.folder / "robustness.json")

    @cached_property
    def resources(self) -> dict[str, float]:
        """resources.json, what training cost: times in seconds, memory in bytes."""
        values = read_json(self.folder / RESOURCES) or {}
        return {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}

    @property
    def failure(self) -> str | None:
        """The error that ended training, if the run was not resumed since."""
        failure = (read_json(self.folder / RESOURCES) or {}).get("failure")
        return failure if isinstance(failure, str) else None

    @property
    def became_nonfinite(self) -> bool:
        """Whether a loss, gradient or weight that is not finite ended training, if the run was not resumed since."""
        return (read_json(self.folder / RESOURCES) or {}).get("nonfinite") is True

    # ------------------------------------------------------------------------------- using the network

    def generate(
        self, request: Request, net: nn.Module | None = None, check: Callable[[Any], None] | None = None
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield batches of images, uint8 (B, H, W, C), of the EMA network or of `net`. `check`: see `generate`."""
        from scalelong.runs.generate import generate

        return generate(self.net if net is None else net, self.config, self.facts, request, check)

    def evaluate(
        self,
        request: Request,
        reference: Any = None,
        extractor: Any = "inception",
        *,
        metrics: Collection[str] | None = None,
        extractors: Mapping[str, Any] | None = None,
        net: nn.Module | None = None,
        step: int | str | None = None,
        save_as: str | None = None,
    ) -> Evaluation:
        """Evaluate `request.n` images of the network of `step`, or of `net` at `step`. Each process samples its share.

        reference: see `as_reference`; None means `evaluate.reference` of the config, by default the training data. The
            run's own dataset by name is read at the run's image size and with its other options.
        metrics, extractors: see `evaluate_images`.
        step: a step or "best" (see `network_at`); default: the last.
        save_as: an origin of `EVALUATIONS` to store the result under, for example "evaluate".
        """
        from scalelong.diffusion import RangeCheck
        from scalelong.diffusion.samplers import get_sampler
        from scalelong.evaluation.card import Generation
        from scalelong.evaluation.evaluate import evaluate_images
        from scalelong.evaluation.images import rank_and_world
        from scalelong.evaluation.sources import DatasetImages, check_counts, match_channels
        from scalelong.runs.generate import captions_of, drawn_from

        config, selection = self.config, Selection(self.step if step is None else 0)
        if net is None and step is not None:
            net, selection = self.network_at(step)
        elif isinstance(step, int):
            selection = Selection(step)
        target = save_as and self.folder / EVALUATIONS[save_as].replace("*", f"{selection.step:08d}")
        if target:
            check_target(target)
        if reference is None:
            reference = reference_images(config)
        elif (named := DatasetImages.parse(reference)) is not None and named.name == config.data.name:
            reference = replace(named, options={**config.data.options(), **named.options})
        else:
            reference = match_channels(None, reference, 3 if config.data.vae else self.facts.shapes.channels)[1]
        check_counts(None, reference, request.n, metrics)
        rank, world = rank_and_world()
        shares = [len(range(other, request.n, world)) for other in range(world)]
        own = replace(request, n=shares[rank], first=request.first + sum(shares[:rank]))
        generation = Generation(
            sampler=request.sampler,
            evaluations=get_sampler(request.sampler).evaluations(request.steps),
            guidance=request.guidance,
            ema=config.ema.decay,
            sample_seed=request.seed,
            train_seed=config.seed,
            effective_batch=config.train.batch_size,
            step=selection.step,
            run=self.name,
            clip_denoised=request.clips(config),
            labels=drawn_from(config, self.facts, request),
            autoencoder=config.data.vae
            and f"{config.data.vae}, latents × {config.data.latent_scale or 'its own factor'}",
            selection=selection.reason,
            minimum_over=selection.minimum_over,
            objective=config.diffusion.objective,
        )
        check = RangeCheck()
        images, title = self.generate(own, net, check), f"samples of {self.name}"
        captions = captions_of(config, self.facts, request) if config.data.text is not None else None
        if captions is not None:  # image k of process r counts as number k·world + r, see StreamImages
            captions = [captions[sum(shares[: k % world]) + k // world] for k in range(request.n)]
        result = evaluate_images(
            images, reference, extractor, metrics=metrics, n=request.n, name=title, generation=generation,
            extractors=extractors, captions=captions,
        )  # fmt: skip
        if check.n:
            generation = replace(generation, far_share=check.share)
            result = replace(result, card=replace(result.card, generation=generation))
        if target and rank == 0:
            result.save(target)
            self.__dict__.pop("evaluations", None)
        return result

    def memorisation(
        self, request: Request, extractor: Any = "inception", step: int | str | None = None
    ) -> Memorisation:
        """Compare samples with their nearest training images, and write memorisation.json and memorisation.png."""
        import numpy as np

        from scalelong.data import load
        from scalelong.evaluation.extractors import build_extractor
        from scalelong.evaluation.memorisation import measure_memorisation, save_sheet

        data = self.config.data
        training, held_out = (load(data.name, split, **data.options()) for split in (data.split, data.validation))
        net = None if step is None else self.network_at(step)[0]
        samples = np.concatenate(list(self.generate(request, net)))
        result = measure_memorisation(samples, training, held_out, build_extractor(extractor))
        save_sheet(result, samples, training.images, self.folder / "memorisation.png")
        write_text(self.folder / "memorisation.json", json.dumps(result.to_dict(), indent=1) + "\n")
        return result

    def network_at(self, step: int | str) -> tuple[nn.Module, Selection]:
        """Return the EMA network of a step: the last, a checkpoint's, or "best", which evaluate.keep_best stored."""
        from safetensors.torch import load_file

        best = read_json(self.best_path / STEP) or {}
        checkpoints = {int(p.name[5:]): p for p in self.checkpoints_path.glob("step-*") if p.name[5:].isdecimal()}
        model = get_model(self.config.model.kind)
        if step in ("best", best.get("step")) and best:
            reason = f"lowest {best['metric']} of {best['n']:,} samples" if step == "best" else None
            selection = Selection(int(best["step"]), reason, int(best["evaluations"]) if step == "best" else None)
            return model.load(self.best_path, lambda: build_network(self.config, self.facts.shapes)).eval(), selection
        if step == self.step:
            return self.net, Selection(self.step)
        if step in checkpoints:
            net = build_network(self.config, self.facts.shapes)
            net.load_state_dict(load_file(checkpoints[int(step)] / "ema.safetensors"))
            return net.eval(), Selection(int(step))
        known = sorted({self.step, *checkpoints, *([best["step"]] if best else [])})
        hint = "" if best else "; evaluate.every=N with evaluate.keep_best=true keeps the best one"
        expected = f"one of {', '.join(map(str, known))}{' or best' if best else ''}"
        raise RunError(f"step must be {expected}, got {step}{hint}")

    def keep_best(self, net: nn.Module, result: Evaluation) -> bool:
        """Store the network as the best one if no evaluation of training so far has a lower distance."""
        stored = [read_json(path) or {} for path in self.folder.glob(EVALUATIONS["train"])]
        values = [value for one in stored if isinstance(value := one.get("frechet"), (int, float))]
        value = result.frechet
        if value is None or any(other < value for other in values):
            facts = read_json(self.best_path / STEP)
            if facts is not None:
                write_text(self.best_path / STEP, json.dumps({**facts, "evaluations": len(values)}) + "\n")
            return False
        facts = {"step": result.card.generation.step, "metric": result.card.metric, "value": value}
        facts |= {"n": result.card.n, "evaluations": len(values)}
        with self._replaced(self.best_path) as folder:
            get_model(self.config.model.kind).save(net, folder)
            (folder / STEP).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        return True

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the run with a model card to the Hugging Face hub; return the address. See `runs.hub.push_run`."""
        from scalelong.runs.hub import push_run

        return push_run(self, repo_id, **options)

    @classmethod
    def from_pretrained(cls, source: Path | str, **options: Any) -> Run:
        """Open a run that `push_to_hub` uploaded, or a local folder. Loads the network now.

        Args:
            source: owner/name of a repository on the Hugging Face hub, or a run folder.
            options: `revision`, `token`, `cache_dir`.

        Example:
            >>> run = Run.from_pretrained("owner/name")
        """
        from scalelong.models.hub import download

        return load_run(source if Path(source).exists() else download(str(source), **options))

    def pipeline(self) -> ScaleLongPipeline:
        """Return the network as a diffusers pipeline, with its text encoder and autoencoder."""
        from scalelong.models.pipeline import ScaleLongPipeline

        data, settings = self.config.data, self._pipeline_settings()
        if data.text is not None:
            from scalelong.data.prompts import PromptEncoder

            settings["text_encoder"] = PromptEncoder(data.text, data.text_tokens)
        if data.vae is not None:
            from scalelong.data import load_vae

            settings["vae"] = load_vae(data.vae)
        return ScaleLongPipeline.of(self.net, self.objective, **settings)

    def _pipeline_settings(self) -> dict[str, Any]:
        """Arguments of `ScaleLongPipeline`."""
        from scalelong.runs.generate import Request

        data, names = self.config.data, self.facts.class_names
        scale = None if data.vae is None else data.latent_scale
        settings: dict[str, Any] = {"null_label": self.facts.null_y, "class_names": list(names) if names else None}
        settings["clip_denoised"] = Request().clips(self.config)
        return {**settings, "guidance_scale": self.config.sample.guidance, "latent_scale": scale}

    def _write_pipeline(self, net: nn.Module, folder: Path) -> None:
        """Make model/ a diffusers pipeline. It names the text encoder; the autoencoder is passed when it is loaded."""
        from scalelong.models.pipeline_folder import write_index

        data, others = self.config.data, dict[str, tuple[str, str]]()
        if data.text is not None:
            others["text_encoder"] = ("scalelong.data.prompts", "PromptEncoder")
            config = {"_class_name": "PromptEncoder", "encoder": data.text, "max_length": data.text_tokens}
            (folder / "text_encoder").mkdir()
            (folder / "text_encoder" / CONFIG).write_text(json.dumps(config) + "\n", encoding="utf-8")
        write_index(folder, net, self.objective, self._pipeline_settings(), **others)

    # ----------------------------------------------------------------------------------------- writing

    @contextmanager
    def locked(self, timeout: float = 0) -> Iterator[None]:
        """Keep other processes out; wait up to `timeout` seconds for one that holds the lock.

        The operating system frees the lock when its owner ends, even by SIGKILL.
        """
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ".lock"
        owner = path.read_bytes()[:64].decode("ascii", "replace").strip() if path.is_file() else ""
        lock = FileLock(path)
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            raise RunError(
                f"{self.folder} is in use by another process{f' ({owner})' if owner else ''}; "
                "wait for it, or use another --out"
            ) from None
        try:
            with suppress(OSError):  # Windows does not let us write to a locked file; the message then has no owner
                path.write_text(f"process {os.getpid()}", encoding="ascii")
            self._recover()
            sweep(self.folder, CONFIG, RESOURCES, self.stability_path.name, ".model-new", ".best-new")
            sweep(self.checkpoints_path, "step-*")
            sweep(self.samples_path, "step-*")
            yield
        finally:
            lock.release()

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write config.json."""
        write_text(self.config_path, json.dumps(record, indent=2) + "\n")
        for name in ("config", "facts", "record", "settings"):
            self.__dict__.pop(name, None)

    def check_exists(self) -> None:
        """Raise if somebody removed the folder, so that it does not come back with half of its files."""
        if not self.config_path.is_file():
            raise RunError(f"{self.folder} was removed or emptied during training; training stops and writes nothing")

    def save_model(self, net: nn.Module, step: int) -> None:
        """Replace model/ by this network: written beside it first, then renamed."""
        with self._replaced(self.model_path) as folder:
            get_model(self.config.model.kind).save(net, folder)
            if hasattr(net, "save_pretrained"):
                self._write_pipeline(net, folder)
            (folder / STEP).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        self.__dict__.pop("net", None)

    @contextmanager
    def _replaced(self, target: Path) -> Iterator[Path]:
        """Write a new folder, then rename: `.NAME-old` keeps the one it replaces until the new one has its name."""
        new, old = (target.with_name(f".{target.name}-{age}") for age in ("new", "old"))
        shutil.rmtree(new, ignore_errors=True)
        with atomic_folder(new) as folder:
            yield folder
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
        shutil.rmtree(old, ignore_errors=True)

    def _recover(self) -> None:
        """A kill between the two renames of `_replaced` leaves no folder: restore the newer of the two."""
        for target in (self.model_path, self.best_path):
            for age in ("new", "old"):
                candidate = target.with_name(f".{target.name}-{age}")
                if candidate.exists() and not target.exists():
                    os.rename(candidate, target)
            shutil.rmtree(target.with_name(f".{target.name}-old"), ignore_errors=True)


def load_run(folder: Path | str) -> Run:
    """Open a trained run, ready to sample. Loads the network now.

    Args:
        folder: A run folder, "digits" (a trained network that comes with the package), or "hf:owner/name" for a run
            on the Hugging Face hub.

    Returns:
        The run: `.net`, `.config`, `.pipeline()`, `.evaluate(…)` and its logs.

    Examples:
        >>> run = scalelong.load_run("digits")
        >>> pipe = run.pipeline()
        >>> pipe.set_progress_bar_config(disable=True)
        >>> len(pipe(class_labels=[3, 8], num_inference_steps=2).images)
        2
    """
    run = Run(locate(folder))
    _ = run.config, run.net, run.facts, run.step
    return run


def find_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Return the runs at `paths`, each once. The folder of a comparison stands for its runs, variant by variant."""
    runs: list[Run] = []
    for path in map(locate, paths):
        comparison = read_json(path / COMPARISON)
        if comparison is not None:
            runs += _members(path, comparison)
        elif (path / CONFIG).is_file() or (path / "metrics.jsonl").is_file():
            runs.append(Run(path))
        else:
            problem = "is neither a run folder nor a comparison" if path.exists() else "does not exist"
            raise RunError(f"{path} {problem}; scalelong train and scalelong compare create them")
    unique = list({run.folder.resolve(): run for run in runs}.values())
    if not unique:
        raise RunError(f"no runs in {', '.join(map(str, paths)) or 'an empty list'}; give at least one run folder")
    return unique


def _members(path: Path, comparison: dict[str, Any]) -> list[Run]:
    """The runs of a comparison in the order of its variants, then seeds; also those that did not finish."""
    rank = {str(row.get("variant")): k for k, row in enumerate(_objects(comparison.get("rows")))}
    runs = _objects(comparison.get("runs"))
    unfinished = comparison.get("unfinished")
    for folder in map(str, unfinished if isinstance(unfinished, list) else ()):
        variant, _, seed = folder.rpartition("-seed")
        runs.append({"variant": variant, "seed": seed, "folder": folder})
    runs.sort(key=lambda run: (rank.get(str(run.get("variant")), 0), str(run.get("seed"))))
    folders = [path / Path(str(run.get("folder", ""))).name for run in runs]
    return [Run(folder) for folder in folders if folder.is_dir()]


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def reference_images(config: Config) -> DatasetImages:
    """Return the images that samples of a run are compared with: evaluate.reference, by default the training split."""
    from scalelong.evaluation.sources import DatasetImages

    split, _, n = (config.evaluate.reference or config.data.split).partition(":")
    if n and not n.isdecimal():
        raise invalid("evaluate.reference", "SPLIT or SPLIT:N", config.evaluate.reference)
    return DatasetImages(config.data.name, split, int(n) if n else None, config.data.options())


def training_reference(config: Config, extractor: FeatureExtractor) -> Reference:
    """Return the statistics of `reference_images`, from the cache or computed now."""
    from scalelong.evaluation.sources import as_reference

    return as_reference(reference_images(config), extractor)


def build_network(config: Config, shapes: Shapes) -> nn.Module:
    """Build the network of a config. Its initial weights depend on the seed, not on the scaling."""
    import torch

    from scalelong.skips import apply

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        net = get_model(config.model.kind).build(config.model, shapes)
        if not config.applied_scaling.is_identity:
            apply(net, config.applied_scaling, placement=config.placement)
    if config.mup.base_width is not None or config.mup.base_depth is not None:
        from scalelong import mup

        mup.init_(net, config.mup.base_width, config.mup.base_depth, zero_output=config.mup.zero_output)
    if config.train.gradient_checkpointing:
        if not hasattr(net, "enable_gradient_checkpointing"):
            needed = "false for a network without enable_gradient_checkpointing()"
            raise invalid("train.gradient_checkpointing", needed, type(net).__name__)
        net.enable_gradient_checkpointing()  # type: ignore[operator]
    return net
