"""Theorem 3.4: how far the output moves, beside the certified bound and the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from scalelong.scaling import ConstantScaling, FixedScaling
from scalelong.theory.bounds import log_main_term, log_robustness
from scalelong.theory.lipschitz import LocalRobustness, counterexample, global_log_norms, measure_robustness
from scalelong.theory.propagation import scaled
from scalelong.theory.samples import Shape, ddpm_inputs
from scalelong.theory.stacked import StackedUNet

PERTURBATION = 0.01  # ‖δ‖/‖x_t‖ of the perturbations that are tried besides the Jacobian's worst direction
PERTURBATIONS = 16


@dataclass(frozen=True)
class RobustnessRow:
    """One initialisation and scaling; geometric means over networks.

    network: ‖∂UNet/∂x_t‖₂, the worst direction of a small perturbation.
    perturbed: the largest ‖ΔUNet‖/‖δ‖ over random δ with ‖δ‖ = 0.01‖x_t‖.
    certified, paper: the bounds with M_0 = max ‖J_b‖‖J_a‖ and with M_0 = max ‖b_i∘a_i‖; m0 is the latter, l0 is L_0.
    main_term: Σ κ_i M_0^i, the part of the paper's bound that κ touches; the rest is c_0 = M_0^N L_0.
    lipschitz: the bound from the matrices' own norms, certified for perturbations of any size.
    certified_violations: networks that exceed the certified bound, or the last one under a perturbation.
    """

    init: str
    scaling: str
    network: float
    perturbed: float
    certified: float
    paper: float
    main_term: float
    lipschitz: float
    m0: float
    l0: float
    checked: int
    certified_violations: int
    paper_violations: int


@dataclass(frozen=True)
class ViolationRow:
    """How often one kind of network exceeds Theorem 3.4's bounds; worst: its ‖∂UNet/∂x_t‖ over the paper's bound."""

    networks: str
    checked: int
    certified: int
    paper: int
    worst: float


@dataclass(frozen=True)
class _Case:
    local: LocalRobustness
    perturbed: float
    log_lipschitz: float


def robustness_rows(init: str, shape: Shape, scalings: Mapping[str, FixedScaling], seeds: int) -> list[RobustnessRow]:
    """One network and input a seed, the same for every scaling."""
    cases: dict[str, list[_Case]] = {name: [] for name in scalings}
    for seed in range(seeds):
        net, x = shape.build(init, seed), ddpm_inputs(1, shape.width, seed).x_t[0]
        delta = torch.randn(PERTURBATIONS, shape.width, generator=torch.Generator().manual_seed(seed))
        delta *= PERTURBATION * x.norm() / delta.norm(dim=1, keepdim=True)
        log_norms = global_log_norms(net)
        for name, spec in scalings.items():
            with scaled(net, spec), torch.no_grad():
                moved = (net(x + delta) - net(x)).norm(dim=1) / delta.norm(dim=1)
                local = measure_robustness(net, x)
            cases[name].append(_Case(local, float(moved.max()), log_robustness(local.coefficients, *log_norms)))
    return [_row(init, name, scalings[name], found) for name, found in cases.items()]


def violation_rows(kappa: float, networks: int = 500) -> tuple[ViolationRow, ...]:
    """Where Eq. 61's step fails: in very narrow networks by chance, in one by construction."""
    narrow = []
    for seed in range(networks):
        net = StackedUNet(2, 2, 1, ConstantScaling(kappa), init="norm-preserving", seed=seed)
        narrow.append(measure_robustness(net, torch.ones(2)))
    built = measure_robustness(counterexample(10.0), torch.ones(2))
    return (
        _violations("random, m = 2, N = 2, l = 1", narrow),
        _violations("constructed: b_1∘a_1 = 1 with a swap of axes between", [built]),
    )


def _row(init: str, name: str, spec: FixedScaling, cases: list[_Case]) -> RobustnessRow:
    local = [case.local for case in cases]
    log_m0 = [math.log(max(one.composed)) for one in local]
    beyond = sum(math.log(case.perturbed) > case.log_lipschitz for case in cases)
    return RobustnessRow(
        init=init,
        scaling=name,
        network=_geometric(math.log(one.network) for one in local),
        perturbed=_geometric(math.log(case.perturbed) for case in cases),
        certified=_geometric(one.log_certified for one in local),
        paper=_geometric(one.log_paper for one in local),
        main_term=_geometric(log_main_term(spec, len(local[0].composed), m) for m in log_m0),
        lipschitz=_geometric(case.log_lipschitz for case in cases),
        m0=_geometric(log_m0),
        l0=_geometric(math.log(one.middle) for one in local),
        checked=len(cases),
        certified_violations=sum(one.violates(one.log_certified) for one in local) + beyond,
        paper_violations=sum(one.violates(one.log_paper) for one in local),
    )


def _violations(networks: str, found: list[LocalRobustness]) -> ViolationRow:
    return ViolationRow(
        networks=networks,
        checked=len(found),
        certified=sum(one.violates(one.log_certified) for one in found),
        paper=sum(one.violates(one.log_paper) for one in found),
        worst=max(one.network / math.exp(one.log_paper) for one in found),
    )


def _geometric(logarithms: Iterable[float]) -> float:
    """The geometric mean; inf where a float cannot hold it."""
    values = list(logarithms)
    mean = math.fsum(values) / len(values)
    return math.exp(mean) if mean < 700 else math.inf
