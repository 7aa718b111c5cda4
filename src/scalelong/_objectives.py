"""Names of objectives and of their parts, without torch: configs and commands check them before it is imported."""

PROCESSES = ("vp", "ddpm", "cosine", "sd", "linear", "edm")
TARGETS = ("eps", "x0", "v", "flow")
TIMES = ("uniform", "logit-normal", "log-normal", "mode")
WEIGHTS = ("one", "min-snr", "soft-min-snr", "sigmoid", "edm")
PRECONDITIONS = ("none", "edm")
# eps, x0 and v keep the process of a preset if it is variance preserving; "vp" is their default.
VARIANCE_PRESERVING = ("vp", "ddpm", "cosine", "sd")
OBJECTIVES: dict[str, dict[str, str]] = {
    "eps": {"process": "vp", "target": "eps", "times": "uniform", "weight": "one", "precondition": "none"},
    "x0": {"process": "vp", "target": "x0", "times": "uniform", "weight": "one", "precondition": "none"},
    "v": {"process": "vp", "target": "v", "times": "uniform", "weight": "one", "precondition": "none"},
    "flow": {"process": "linear", "target": "flow", "times": "uniform", "weight": "one", "precondition": "none"},
    "edm": {"process": "edm", "target": "x0", "times": "log-normal", "weight": "edm", "precondition": "edm"},
}
# Numbers that only some parts read, and the parts that read them.
READ_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "sigma_data": {"precondition": ("edm",), "weight": ("edm",)},
    "p_mean": {"times": ("log-normal",)},
    "p_std": {"times": ("log-normal",)},
    "logit_mean": {"times": ("logit-normal",)},
    "logit_std": {"times": ("logit-normal",)},
    "mode_scale": {"times": ("mode",)},
    "snr_gamma": {"weight": ("min-snr", "soft-min-snr")},
    "bias": {"weight": ("sigmoid",)},
    "sigma_min": {"process": ("edm",)},
    "sigma_max": {"process": ("edm",)},
    "rho": {"process": ("edm",)},
}


def objective_name(target: str, precondition: str) -> str:
    """eps, x0, v, flow or edm: what a network predicts."""
    return "edm" if precondition == "edm" else target
