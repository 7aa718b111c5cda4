"""One linear layer on fixed features: multinomial logistic regression."""

import torch
from torch import Tensor, nn

from scalelong.errors import invalid, unknown

FITS = ("lbfgs", "adam")
ITERATIONS, PENALTY = 200, 1.0  # L-BFGS; PENALTY is scikit-learn's 1/C
EPOCHS, BATCH, LR = 15, 128, 1e-3  # Adam with a cosine schedule, as in DDAE


def probe_features(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, *, fit: str = "lbfgs", seed: int = 0
) -> float:
    """Return the test accuracy of a linear classifier of features (n, D), standardized with the training mean and std.

    Args:
        train_x: Features (n, D) to fit.
        train_y: Their labels 0 … C − 1, (n,).
        test_x: Features to measure the accuracy on.
        test_y: Their labels.
        fit: "lbfgs" minimizes Σ cross-entropy + ‖W‖²/2 (‖W‖² for two classes), the problem of scikit-learn's
            `LogisticRegression()`, which is convex and has one answer. "adam" is DDAE's recipe: 15 epochs, learning
            rate 1e-3, cosine.
        seed: Of Adam's batches.

    Returns:
        The share of test labels that the classifier predicts.
    """
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if x.ndim != 2 or y.shape != x.shape[:1] or not len(x):
            raise invalid(f"{name} features and labels", "(n, D) and (n,)", (tuple(x.shape), tuple(y.shape)))
    train_x, test_x = standardized(train_x, test_x)
    return fit_accuracy(train_x, train_y, test_x, test_y, fit, seed)


def standardized(train_x: Tensor, test_x: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the training features and divide by their standard deviation."""
    std, mean = torch.std_mean(train_x.float(), dim=0, correction=0)
    std = torch.where(
        std > 1e-6 * (1 + mean.abs()), std, torch.inf
    )  # a feature that rounding alone changes says nothing
    return (train_x - mean) / std, (test_x - mean) / std


def fit_accuracy(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, fit: str, seed: int) -> float:
    """Fit standardized features and return the test accuracy."""
    if fit not in FITS:
        raise unknown("fit", fit, FITS)
    classes = int(max(train_y.max(), test_y.max())) + 1
    train_x, test_x = train_x.float(), test_x.float()
    layer = nn.utils.skip_init(nn.Linear, train_x.shape[1], classes, device=train_x.device)
    with torch.enable_grad():
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        (_lbfgs if fit == "lbfgs" else _adam)(layer, train_x, train_y, seed)
    with torch.no_grad():
        return float((layer(test_x).argmax(1) == test_y).double().mean())


def _lbfgs(layer: nn.Linear, x: Tensor, y: Tensor, seed: int) -> None:
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=ITERATIONS, tolerance_grad=1e-5, history_size=10, line_search_fn="strong_wolfe"
    )

    # Of two classes scikit-learn penalizes the difference w of both rows, ‖w‖²/2, which is ‖W‖² where they are ±w/2.
    penalty = PENALTY * (2 if len(y.unique()) == 2 else 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layer(x), y) + penalty / (2 * len(x)) * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _adam(layer: nn.Linear, x: Tensor, y: Tensor, seed: int) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=LR)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=generator).to(x.device).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
