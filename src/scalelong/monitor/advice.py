"""What the paper's theory says about an alarm: the sums of κ² that stand behind it, and a kappa that lowers them."""

from __future__ import annotations

from collections.abc import Sequence

from scalelong.kappa import sum_of_squares

GENERAL = "a lower learning rate, a longer warm-up or a tighter clipping"


def advice(kind: str, skip: int | None, coefficients: Sequence[float], kappa: float | None) -> str:
    """A sentence or two for an alarm at long skip `skip` (None: nowhere near one) of a network with these κ_1 … κ_N.

    `kappa` is the base of CS where it is in force.
    """
    if not coefficients:
        return f"No long skips are known in this network, so the theory says nothing; {GENERAL} may help."
    if kind == "nonfinite":
        return f"{GENERAL.capitalize()} may help; {_remedy(coefficients, kappa, 1)}."
    if kind == "gradient":
        i = min(skip or 1, len(coefficients))
        law = f"Theorem 3.3 bounds the gradient's square of block {i} by ℓ·‖x_t‖²·Σκ_j² over j ≥ {i}"
        return f"{law}, here {sum_of_squares(coefficients, i):.3g}; {_remedy(coefficients, kappa, i)}."
    if kind == "loss":
        law = f"Theorem 3.3 lets the gradient grow with ℓ·Σκ_j², here Σκ_j² = {sum_of_squares(coefficients):.3g}"
        return f"{law}; {_remedy(coefficients, kappa, 1)}, and so may {GENERAL}."
    if skip is not None and skip >= len(coefficients):
        law = "no long skip joins before the middle block, so Theorem 3.1 sets no room for it to oscillate"
        return f"There {law}; what reaches it comes through the gradient: {_remedy(coefficients, kappa, 1)}."
    i = skip or 0
    law = f"Theorem 3.1 lets ‖h_{i}‖² range in proportion to Σκ_j² over j > {i}"
    return f"{law}, here {sum_of_squares(coefficients, i + 1):.3g}; {_remedy(coefficients, kappa, i + 1)}."


def _remedy(coefficients: Sequence[float], kappa: float | None, start: int) -> str:
    """CS with the recommended kappa where it lowers the sum from `start` on, and what it would be."""
    from scalelong.kappa import PAPER_MEAN, choose_kappa, kappa_notices
    from scalelong.scaling import ConstantScaling

    n, now = len(coefficients), sum_of_squares(coefficients, start)
    recommended = choose_kappa(PAPER_MEAN, n)[2]
    then = sum_of_squares(ConstantScaling(recommended).coefficients(n), start)
    if n > 1 and then < 0.9 * now:
        named = (
            f"ConstantScaling({recommended:g})" if kappa is None else f"kappa = {recommended:g} instead of {kappa:g}"
        )
        text = f"{named} makes that sum {then:.3g}"
    else:
        text = f"the coefficients are small already, {GENERAL} may help"
    notices = [notice.text for notice in kappa_notices(coefficients, kappa) if notice.level == "warning"]
    return "; ".join([text, *notices])
