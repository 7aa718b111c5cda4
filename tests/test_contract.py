"""The public contract: every name and signature of the design that exists today. A failure here breaks users."""

import importlib
import inspect

import pytest

import scalelong

SIGNATURES = {
    "scalelong.UViT": "img_size patch_size in_chans embed_dim depth num_heads mlp_ratio qkv_bias mlp_time_embed "
    "num_classes clip_dim num_clip_token conv init_std scaling",
    "scalelong.UViT.forward": "self x t y context",
    "scalelong.UViT.from_official": "path_or_state_dict img_size num_heads scaling",
    "scalelong.UViT.from_pretrained": "args kwargs",
    "scalelong.build_unet": "name scaling overrides",
    "scalelong.StackedUNet": "width num_skips block_depth scaling init seed",
    "scalelong.apply": "net scaling example sites placement replace",
    "scalelong.find_skips": None,
    "scalelong.fold": None,
    "scalelong.describe": "net example kwargs",
    "scalelong.remove": "net",
    "scalelong.unscaled": "net",
    "scalelong.save_scaling": "net folder",
    "scalelong.load_scaling": "net folder",
    "scalelong.register_adapter": "cls find_skips",
    "scalelong.parameters": "net",
    "scalelong.scale_skip": "net skip i backbone",
    "scalelong.set_coefficients": "net scaling",
    "scalelong.distill": "net examples loss",
    "scalelong.compose": "scalings",
    "scalelong.NormScaling": "kind over gain init",
    "scalelong.MagnitudePreserving": "t",
    "scalelong.GatedScaling": "",
    "scalelong.LerpScaling": "weight",
    "scalelong.SparseScaling": "stride",
    "scalelong.SkipTuning": "innermost outermost timesteps",
    "scalelong.FreeU": "b1 b2 s1 s2 version",
    "scalelong.SkipAdapter": "rank",
    "scalelong.SelfConditioning": "block",
    "scalelong.Site": "path argument item channels trailing dim tokens carrier source norm shortcut",
    "scalelong.SkipShape": "channels dim tokens",
    "scalelong.NoScaling": "",
    "scalelong.UniformScaling": "value",
    "scalelong.ConstantScaling": "kappa reverse innermost",
    "scalelong.ExplicitScaling": "coefficients",
    "scalelong.LearnableScaling": "calibration reduction activation shared gate init",
    "scalelong.StableScaling": "tau",
    "scalelong.ReZeroScaling": "",
    "scalelong.parse_scaling": "scaling options",
    "scalelong.estimate_kappa": "images num_skips process samples seed latents",
    "scalelong.evaluate_images": None,
    "scalelong.load_run": "folder",
    "scalelong.runs.Run.push_to_hub": "self repo_id",
    "scalelong.runs.Run.from_pretrained": "source",
    "scalelong.ScaleLongPipeline.push_to_hub": "self repo_id",
    "scalelong.ScaleLongPipeline.from_pretrained": "folder",
    "scalelong.linear_probe": "net train test layers t objective conditions untrained pixels fit seed batch_size cache",
    "scalelong.tune": "make_run candidates steps budget",
    "scalelong.mup.roles": "net base_width base_depth",
    "scalelong.mup.init_": "net base_width base_depth",
    "scalelong.mup.param_groups": "net lr weight_decay base_width base_depth",
    "scalelong.StabilityMonitor": None,
    "scalelong.StabilityMonitor.step": None,
    "scalelong.StabilityMonitor.note": None,
    "scalelong.StabilityMonitor.attach": "self optimizer first",
    "scalelong.integrations.lightning.StabilityCallback": None,
    "scalelong.integrations.transformers.StabilityCallback": None,
    "scalelong.training.train": "config out loss optimizer metrics quiet",
    "scalelong.models.registry.Model": "build adapt save load",
}
FIELDS = {
    "scalelong.KappaEstimate": "low high recommended mean_ratio share_below_5",
    "scalelong.skips.Row": "index path source coefficient coefficient_range shape felt norm_passes gain note",
    "scalelong.Alarm": "kind step",
    "scalelong.Limits": "",
    "scalelong.Evaluation": "",
    "scalelong.representation.LinearProbe": "blocks times accuracy n_train n_test chance pixels untrained",
    "scalelong.representation.Cell": "block t accuracy low high",
}
ERRORS = (
    "InvalidValueError UnknownNameError UnsupportedNetworkError ScalingStateError DataError RunError EvaluationError "
    "HubError"
)
COMMANDS = (
    "train sample evaluate compare report kappa theory robustness paper data presets doctor frontier coords transfer "
    "tune tune-skips freeze campaign export probe"
)


def resolve(name):
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_callable_has_these_parameters(name):
    value = resolve(name)
    assert callable(value)
    if SIGNATURES[name] is not None:
        expected = SIGNATURES[name].split()
        assert list(inspect.signature(value).parameters)[: len(expected)] == expected  # more may follow


@pytest.mark.parametrize("name", FIELDS)
def test_a_public_result_has_these_fields(name):
    assert set(FIELDS[name].split()) <= set(resolve(name).__dataclass_fields__)


@pytest.mark.parametrize("name", ERRORS.split())
def test_every_error_is_a_scalelong_error_and_a_value_error(name):
    error = resolve(f"scalelong.errors.{name}")
    assert issubclass(error, scalelong.ScaleLongError)
    assert issubclass(error, ValueError)


def test_every_public_name_can_be_imported():
    for name in scalelong.__all__:
        assert getattr(scalelong, name) is not None


@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_command_exists(command, capsys):
    from scalelong.cli import main

    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code in (0, None)
    assert "Usage" in capsys.readouterr().out
