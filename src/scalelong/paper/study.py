"""A study: variants of one network on one data set under equal conditions, in one folder that several items share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.errors import ScaleLongError

if TYPE_CHECKING:
    from scalelong.experiments.distance import DistanceSpec
    from scalelong.experiments.plan import Variant
    from scalelong.runs.config import Config


@dataclass(frozen=True)
class Arm:
    """One variant by its words: `none`, `cs:0.7`; options of the scaling are settings such as `scaling.tau=0.3`."""

    scaling: str
    settings: tuple[str, ...] = ()

    @property
    def kappa(self) -> float | None:
        number = self.scaling.partition(":")[2]
        return float(number) if number else None

    @property
    def kind(self) -> str:
        return self.scaling.partition(":")[0]


@dataclass(frozen=True)
class Study:
    """What is trained: a preset with settings, the arms (the baseline first), steps and the seeds it is meant for."""

    name: str  # of the folder
    preset: str
    arms: tuple[Arm, ...]
    steps: int
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    distance: tuple[str, int, int | None] | None = None  # extractor, samples, evaluations a sample
    label: str = ""  # what sets it apart from other studies of an item, in words
    seconds: float | None = None  # processor seconds a run, where measured on a CPU

    def config(self, arm: Arm, steps: int | None = None) -> Config:
        from scalelong.training.presets import choose

        return choose(
            self.preset,
            scaling=arm.kind,
            kappa=arm.kappa,
            steps=self.steps if steps is None else steps,
            settings=[*self.settings, *arm.settings],
        )

    def variants(self, steps: int | None = None) -> tuple[Variant, ...]:
        """A variant for each arm, by the name that its scaling has everywhere: none, uniform, cs-0.7, …"""
        from scalelong.experiments.plan import Variant, checked

        configs = [self.config(arm, steps) for arm in self.arms]
        return checked([Variant(config.scaling.label, config) for config in configs])

    def spec(self) -> DistanceSpec | None:
        from scalelong.experiments.distance import DistanceSpec

        return None if self.distance is None else DistanceSpec(*self.distance)

    def folder(self, out: Path, steps: int | None = None) -> Path:
        """OUT/NAME; other steps than the study's own have a folder of their own."""
        return out / (self.name if steps in (None, self.steps) else f"{self.name}-{steps}-steps")

    def commands(self, seeds: Sequence[int], out: Path, steps: int | None = None) -> list[str]:
        """The same runs by `scalelong train`, one command a run, each followed by its FID where the study has one."""
        steps = self.steps if steps is None else steps
        lines = []
        for seed in seeds:
            for arm, variant in zip(self.arms, self.variants(steps), strict=True):
                words = ["scalelong", "train", self.preset, "--scaling", arm.kind]
                words += ["--kappa", f"{arm.kappa:g}"] if arm.kappa is not None else []
                words += ["--steps", str(steps), "--seed", str(seed)]
                words += [word for setting in (*self.settings, *arm.settings) for word in ("--set", setting)]
                folder = str(self.folder(out, steps) / f"{variant.name}-seed{seed}")
                lines.append(shlex.join([*words, "--out", folder]))
                if self.distance is not None and self.distance[0] == "inception":
                    lines.append(shlex.join(["scalelong", "evaluate", folder, "--n", str(self.distance[1])]))
        return lines

    def with_arms(self, *scalings: str) -> Study:
        """The study with these of its arms only, in this order."""
        known = {arm.scaling: arm for arm in self.arms if not arm.settings}
        for scaling in scalings:
            if scaling not in known:
                raise ScaleLongError(f"study {self.name!r} has no arm {scaling!r} (it has: {', '.join(known)})")
        return replace(self, arms=tuple(known[scaling] for scaling in scalings))
