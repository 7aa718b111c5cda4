"""The monitor as a callback of Lightning and of Hugging Face's Trainer: it records and changes nothing."""

import importlib.util
from pathlib import Path

import pytest
import torch

import scalelong

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ("lightning_callback", "trainer_callback")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own, about workers and loggers


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_example_records_every_snapshot(name, tmp_path, capsys):
    watch = load(name).main(steps=4, batch_size=4, out=tmp_path, every=2)
    entry = watch.last
    assert entry["step"] == 4
    assert len(entry["train"]["backbone"]) == 4  # long skips
    assert all(value > 0 for value in entry["probe"]["backbone"])
    assert entry["grad"]["total"] > 0
    assert (tmp_path / "stability.jsonl").is_file()
    assert "UNet2DModel" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_callback_changes_no_weight(name, tmp_path):
    module = load(name)

    def weights(every):
        torch.manual_seed(0)
        watch = module.main(steps=3, batch_size=4, out=tmp_path / str(every), every=every)
        return torch.cat([p.detach().flatten() for p in watch.root.parameters()])

    assert torch.equal(weights(1), weights(100))


def test_accumulated_gradients_are_one_step(tmp_path):
    import lightning

    example = load("lightning_callback")
    from scalelong.integrations.lightning import StabilityCallback

    images = torch.randn(24, 1, 8, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), 4)
    callback = StabilityCallback(lambda module: module.unet, every=1)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=3, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(example.Diffusion(), loader)
    assert trainer.global_step == 2
    assert callback.watch.last["step"] == 2


def test_an_error_inside_a_step_leaves_no_hook(tmp_path):
    import lightning

    example = load("lightning_callback")
    from scalelong.integrations.lightning import StabilityCallback

    class Broken(example.Diffusion):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            raise RuntimeError("broken")

    module = Broken()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.unet.modules())
    before = hooks()
    trainer = lightning.Trainer(
        max_steps=1, callbacks=[StabilityCallback(every=1)], logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 1, 8, 8)), 4)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader)
    assert hooks() == before


def test_steps_end_once():
    from scalelong.monitor.steps import Steps

    net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2)
    steps = Steps(scalelong.StabilityMonitor(net, every=1))
    steps.end()  # before any step: nothing to end
    steps.begin(1)
    steps.begin(1)
    steps.abandon()
    assert steps.watch.last is None
