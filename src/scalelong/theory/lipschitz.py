"""Theorem 3.4 on the network of Eq. 3: how far the output moves, the certified bound and the paper's bound.

A ReLU network is linear around an input, so for a small perturbation the exact answer is the spectral norm of the
Jacobian ∂UNet/∂x_t. Theorem 3.4 is compared with it, using the norms of the blocks' Jacobians at the same input.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from scalelong.errors import UnsupportedNetworkError, invalid
from scalelong.scaling import ConstantScaling, FixedScaling, NoScaling
from scalelong.skips import apply, scaling_of
from scalelong.theory.bounds import exp_or_inf, log_main_term, log_or_minus_inf, log_robustness
from scalelong.theory.propagation import Shape, ddpm_inputs
from scalelong.theory.stacked import Stack, StackedUNet


@dataclass(frozen=True)
class LocalRobustness:
    """Norms of the Jacobians at one input, outermost first.

    network: ‖∂UNet/∂x_t‖₂, the largest ‖UNet(x_t + δ) − UNet(x_t)‖/‖δ‖ of a small δ.
    separate: ‖J_{b_i}‖‖J_{a_i}‖.
    composed: ‖J_{b_i}J_{a_i}‖, the paper's ‖b_i∘a_i‖.
    middle: ‖J_{f_N}‖, the paper's L_0.
    log_certified: Theorem 3.4 with M_0 = max ‖J_b‖‖J_a‖. It always holds, by the triangle inequality.
    log_paper: with the paper's M_0 = max ‖b_i∘a_i‖. A network can violate it, because of Eq. 61.
    """

    coefficients: tuple[float, ...]
    network: float
    separate: tuple[float, ...]
    composed: tuple[float, ...]
    middle: float
    log_certified: float
    log_paper: float

    def violates(self, log_bound: float, slack: float = 1e-5) -> bool:
        """Whether the norm of the network exceeds a bound by more than rounding."""
        return self.network > 0 and math.log(self.network) > log_bound + slack


def measure_robustness(net: StackedUNet, x: Tensor) -> LocalRobustness:
    """Compute every Jacobian at one input `x` (m,), exactly, from the matrices and the ReLU pattern."""
    if x.shape != (net.width,):
        raise invalid("the shape of x", f"({net.width},), one input", tuple(x.shape))
    kappas = coefficients_of(net)
    with torch.no_grad():
        features = net.features(x)
        joins = [k * s + h for k, s, h in zip(kappas, features.skips, features.hidden[1:], strict=True)]
        inputs = [x, *features.skips[:-1]]
        n = net.num_skips
        J_a = [stack_jacobian(a, s) for a, s in zip(net.blocks[:n], inputs, strict=True)]
        J_b = [stack_jacobian(b, z) for b, z in zip(net.blocks[n + 1 :], joins, strict=True)]
        J_middle = stack_jacobian(net.middle, features.skips[-1])
        J = J_middle
        for kappa, a, b in zip(reversed(kappas), reversed(J_a), reversed(J_b), strict=True):
            J = b @ (kappa * a + J @ a)  # ∇f_{i−1} = J_b (κ_i + ∇f_i) J_a
        separate = tuple((_norms(J_b) * _norms(J_a)).tolist())
        composed = tuple(_norms([b @ a for a, b in zip(J_a, J_b, strict=True)]).tolist())
        network, middle = _norms([J, J_middle]).tolist()
    log_l0 = log_or_minus_inf(middle)
    sizes = [abs(kappa) for kappa in kappas]
    log_bounds = [log_robustness(sizes, log_or_minus_inf(max(norms)), log_l0) for norms in (separate, composed)]
    return LocalRobustness(kappas, network, separate, composed, middle, *log_bounds)


def global_log_norms(net: StackedUNet) -> tuple[float, float]:
    """log M_0 and log L_0 for every input, from the norms of the matrices: max Π‖W‖ and the middle block's Π‖W‖.

    With them Theorem 3.4 (`bounds.log_robustness`) is certified for perturbations of any size.
    """
    with torch.no_grad():
        norms = torch.stack([_norms(block.weights).prod() for block in net.blocks])  # Π_p ‖W_p‖ of a_i, f_N, b_i
        n = net.num_skips
        return log_or_minus_inf(float((norms[:n] * norms[n + 1 :]).max())), log_or_minus_inf(float(norms[n]))


def stack_jacobian(stack: Stack, x: Tensor) -> Tensor:
    """∂(stack∘x)/∂x at one input (m,): the product of the matrices without the rows of closed ReLUs.  (m, m)"""
    *inner, last = stack.weights
    J = torch.eye(len(x), dtype=x.dtype, device=x.device)
    for weight in inner:
        x = weight @ x
        open_ = (x > 0).to(x.dtype)
        x, J = x * open_, open_[:, None] * (weight @ J)
    return last @ J


def coefficients_of(net: StackedUNet) -> tuple[float, ...]:
    """The fixed coefficients κ_1 … κ_N that scale the network; 1 if it is not scaled."""
    scaling = scaling_of(net)
    spec = NoScaling() if scaling is None else scaling.spec
    kappas = spec.coefficients(net.num_skips)
    if kappas is None:
        raise UnsupportedNetworkError(f"the bounds need fixed coefficients κ_1 … κ_N, got {spec!r}")
    return kappas


def counterexample(stretch: float = 10.0) -> StackedUNet:
    """A network of two skips and width 2 that violates the paper's bound by a factor that grows like stretch².

    b_1∘a_1 is the identity, but b_1 and a_1 stretch opposite axes and b_2 swaps the axes between them. Every
    ‖b_i∘a_i‖ is 1, and the network stretches by stretch²: norms of products ignore what happens in between.
    """
    net = StackedUNet(width=2, num_skips=2, block_depth=1)
    stretched = torch.tensor([stretch, 1 / stretch]).diag()
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    matrices = [stretched, torch.eye(2), torch.eye(2), torch.linalg.inv(stretched), swap]  # a_1, a_2, f_N, b_1, b_2
    with torch.no_grad():
        for block, matrix in zip(net.blocks, matrices, strict=True):
            block.weights[0].copy_(matrix)
    return net


def _norms(matrices: Sequence[Tensor]) -> Tensor:
    return torch.linalg.matrix_norm(torch.stack(list(matrices)), ord=2)


@dataclass(frozen=True)
class RobustnessRow:
    """One initialization and scaling; geometric means over networks.

    network: ‖∂UNet/∂x_t‖₂, the worst direction of a small perturbation.
    perturbed: the largest ‖ΔUNet‖/‖δ‖ over random δ with ‖δ‖ = 0.01‖x_t‖.
    certified, paper: the bounds with M_0 = max ‖J_b‖‖J_a‖ and with M_0 = max ‖b_i∘a_i‖; m0 is the latter, l0 is L_0.
    main_term: Σ κ_i M_0^i, the part of the paper's bound that κ scales; the rest is c_0 = M_0^N L_0.
    lipschitz: the bound from the norms of the matrices, certified for perturbations of any size.
    certified_violations: networks that exceed the certified bound, or `lipschitz` under a random perturbation.
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
    """How often one kind of network exceeds Theorem 3.4's bounds; worst: largest ‖∂UNet/∂x_t‖ / the paper's bound."""

    networks: str
    checked: int
    certified: int
    paper: int
    worst: float


def robustness_rows(init: str, shape: Shape, scalings: Mapping[str, FixedScaling], seeds: int) -> list[RobustnessRow]:
    """Measure one network and input per seed, the same for every scaling."""
    cases: dict[str, list[tuple[LocalRobustness, float, float]]] = {name: [] for name in scalings}
    for seed in range(seeds):
        net, ((x,), _) = shape.build(init, seed), ddpm_inputs(1, shape.width, seed)
        generator = torch.Generator().manual_seed(1_000_000 + seed)  # the weights come from `seed`
        delta = torch.randn(16, shape.width, generator=generator).to(shape.dtype)
        x = x.to(shape.dtype)
        delta *= 0.01 * x.norm() / delta.norm(dim=1, keepdim=True)
        log_norms = global_log_norms(net)
        for name, spec in scalings.items():
            apply(net, spec, replace=True)
            with torch.no_grad():
                change = (net(x + delta) - net(x)).norm(dim=1) / delta.norm(dim=1)
            case = measure_robustness(net, x)
            log_bound = log_robustness([abs(kappa) for kappa in case.coefficients], *log_norms)
            cases[name].append((case, math.log(float(change.max())), log_bound))
    rows = []
    for name, spec in scalings.items():
        local, log_perturbed, log_lipschitz = zip(*cases[name], strict=True)
        log_m0 = [math.log(max(one.composed)) for one in local]
        exceeded = sum(perturbed > bound for perturbed, bound in zip(log_perturbed, log_lipschitz, strict=True))
        row = RobustnessRow(
            init, name, network=_geometric_mean(math.log(one.network) for one in local),
            perturbed=_geometric_mean(log_perturbed), certified=_geometric_mean(one.log_certified for one in local),
            paper=_geometric_mean(one.log_paper for one in local),
            main_term=_geometric_mean(log_main_term(spec, shape.skips, m) for m in log_m0),
            lipschitz=_geometric_mean(log_lipschitz), m0=_geometric_mean(log_m0),
            l0=_geometric_mean(math.log(one.middle) for one in local), checked=len(local),
            certified_violations=sum(one.violates(one.log_certified) for one in local) + exceeded,
            paper_violations=sum(one.violates(one.log_paper) for one in local),
        )  # fmt: skip
        rows.append(row)
    return rows


def violation_rows(kappa: float, networks: int = 500) -> tuple[ViolationRow, ...]:
    """Count violations where Eq. 61's step fails: in very narrow networks by chance, in one by construction."""
    kinds = {
        "random, m = 2, N = 2, l = 1": [
            StackedUNet(2, 2, 1, ConstantScaling(kappa), init="norm-preserving", seed=seed) for seed in range(networks)
        ],
        "constructed: b_1∘a_1 = 1 with a swap of axes between": [counterexample()],
    }
    rows = []
    for kind, nets in kinds.items():
        local = [measure_robustness(net, torch.ones(2)) for net in nets]
        certified = sum(one.violates(one.log_certified) for one in local)
        paper = sum(one.violates(one.log_paper) for one in local)
        worst = max(one.network / math.exp(one.log_paper) for one in local)
        rows.append(ViolationRow(kind, len(local), certified, paper, worst))
    return tuple(rows)


def _geometric_mean(logarithms: Iterable[float]) -> float:
    return exp_or_inf(fmean(logarithms))
