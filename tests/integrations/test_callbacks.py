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


class Plain:
    """The part of Lightning's Trainer that the callback reads."""

    global_step, accumulate_grad_batches = 0, 1

    def __init__(self):
        self.loggers, self.logged = [self], {}

    def log_metrics(self, scalars, step):
        self.logged = scalars


def lightning_module(**networks):
    import lightning

    class Module(lightning.LightningModule):
        def training_step(self, x):
            return self.unet(x, torch.full((len(x),), 5.0)).square().mean()

    module = Module()
    for name, net in networks.items():
        setattr(module, name, net)
    return module


def network():
    torch.manual_seed(0)
    return scalelong.UViT(img_size=8, embed_dim=16, depth=4, num_heads=2)


def test_validation_between_accumulated_batches_is_not_recorded():
    from scalelong.integrations.lightning import StabilityCallback

    recorded = []
    for validates in (False, True):
        module, trainer, callback = lightning_module(unet=network()), Plain(), StabilityCallback(every=1)
        callback.on_train_start(trainer, module)
        for part in torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1)):
            callback.on_train_batch_start(trainer, module, None, 0)
            module.training_step(part).backward()
            if validates:
                module.eval()
                with torch.no_grad():
                    module.training_step(100 * torch.randn(16, 3, 8, 8))
                module.train()
        callback.on_before_optimizer_step(trainer, module, None)
        recorded.append(callback.watch.last)
    assert recorded[0] == recorded[1]
    assert recorded[0]["train"]["n"] == 8


def test_an_unscaled_baseline_is_recorded_and_logged_under_one_prefix():
    from scalelong.errors import ScalingStateError
    from scalelong.integrations.lightning import StabilityCallback

    module, trainer, callback = (
        lightning_module(unet=network(), head=torch.nn.Linear(2, 2)),
        Plain(),
        StabilityCallback(every=1),
    )
    callback.on_train_start(trainer, module)
    assert callback.watch.root is module.unet
    callback.on_train_batch_start(trainer, module, None, 0)
    module.training_step(torch.randn(4, 3, 8, 8)).backward()
    callback.on_before_optimizer_step(trainer, module, None)
    assert len(callback.watch.last["train"]["backbone"]) == 2
    assert "stability/grad_norm" in trainer.logged
    assert not any(name.startswith("stability/stability/") for name in trainer.logged)
    for networks in ({"unet": network(), "other": network()}, {"unet": torch.nn.Linear(2, 2)}):
        with pytest.raises(ScalingStateError, match=r"StabilityCallback\(net=lambda module: module.unet\)"):
            StabilityCallback(every=1).on_train_start(trainer, lightning_module(**networks))


def test_the_norm_before_clipping_that_hugging_faces_trainer_logs_counts_in_the_next_maximum():
    from types import SimpleNamespace

    from scalelong.integrations.transformers import StabilityCallback

    net, state = network(), SimpleNamespace(global_step=0)
    optimizer, callback = torch.optim.SGD(net.parameters(), 1e-3), StabilityCallback(every=2)
    callback.on_train_begin(None, state, None, model=net)
    norms = {}
    for step in range(1, 5):
        callback.on_step_begin(None, state, None)
        net(torch.randn(4, 3, 8, 8), torch.full((4,), 5.0)).square().mean().mul(10.0**step).backward()
        norms[step] = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
        callback.on_pre_optimizer_step(None, state, None)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        if step == 2:  # logging_steps=2
            callback.on_log(None, state, None, logs={"loss": 1.0, "grad_norm": norms[2]})
    grad = callback.watch.last["grad"]
    assert grad["total"] == pytest.approx(0.01, rel=1e-3)  # after clipping
    assert (grad["at"], grad["max"]) == (2, pytest.approx(norms[2], rel=1e-3))


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
