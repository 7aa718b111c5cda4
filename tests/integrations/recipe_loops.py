"""The training loops that docs/recipes.md patches, at toy size: the same calls of the same packages in the same order.

A line `# +` stands where the page's next added line belongs; `test_recipes.py` inserts it. A loop leaves `watch` and
the network `model` behind.
"""

DIFFUSERS = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

accelerator = Accelerator(gradient_accumulation_steps=2)
blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
model = UNet2DModel(sample_size=8, block_out_channels=(32, 32), layers_per_block=1, **blocks)
# +
ema_model = EMAModel(model.parameters(), decay=0.999, model_cls=UNet2DModel, model_config=model.config)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
# +
data = torch.utils.data.DataLoader(torch.randn(48, 3, 8, 8), batch_size=4, shuffle=True)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=12)
model, optimizer, data, lr_scheduler = accelerator.prepare(model, optimizer, data, lr_scheduler)
ema_model.to(accelerator.device)
for images in data:
    noise, t = torch.randn_like(images), torch.randint(0, 1000, (len(images),)).long()
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(noise_scheduler.add_noise(images, noise, t), t).sample, noise)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        ema_model.step(model.parameters())
unet = accelerator.unwrap_model(model)
ema_model.store(unet.parameters())
ema_model.copy_to(unet.parameters())
DDPMPipeline(unet=unet, scheduler=noise_scheduler)(batch_size=1, num_inference_steps=2, output_type="np")
ema_model.restore(unet.parameters())
"""

LUCIDRAINS = """
import numpy as np
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
from PIL import Image
from pathlib import Path

Path("images").mkdir()
for k in range(100):
    Image.fromarray(np.random.default_rng(k).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(f"images/{k}.png")
model = Unet(dim=8, dim_mults=(1, 2))
# +
diffusion = GaussianDiffusion(model, image_size=8, timesteps=10, sampling_timesteps=2)
trainer = Trainer(
    diffusion, "images", train_batch_size=8, train_lr=8e-5, train_num_steps=6, gradient_accumulate_every=2,
    ema_decay=0.995, amp=False, calculate_fid=False, num_samples=4, save_and_sample_every=3,
)
# +
trainer.train()
"""

TORCHCFM = """
import copy

import torch
from torchcfm.conditional_flow_matching import ExactOptimalTransportConditionalFlowMatcher
from torchcfm.models.unet.unet import UNetModelWrapper

net_model = model = UNetModelWrapper(
    dim=(3, 8, 8), num_res_blocks=1, num_channels=32, channel_mult=[1, 2], num_heads=1, num_head_channels=16,
    attention_resolutions="4", dropout=0.1,
)
# +
ema_model = copy.deepcopy(net_model)
optim = torch.optim.Adam(net_model.parameters(), lr=2e-4)
# +
sched = torch.optim.lr_scheduler.LambdaLR(optim, lr_lambda=lambda step: min(step, 5) / 5)
FM = ExactOptimalTransportConditionalFlowMatcher(sigma=0.0)
for step in range(6):
    optim.zero_grad()
    x1 = torch.randn(4, 3, 8, 8)
    t, xt, ut = FM.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
    loss = torch.mean((net_model(t, xt) - ut) ** 2)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net_model.parameters(), 1.0)
    optim.step()
    sched.step()
    with torch.no_grad():
        for name, value in net_model.state_dict().items():
            ema_model.state_dict()[name].lerp_(value, 1e-4)
with torch.no_grad():
    ema_model.eval()(torch.tensor(0.5), torch.randn(1, 3, 8, 8))
"""

MONAI = """
import torch
import torch.nn.functional as F
from monai.inferers import DiffusionInferer
from monai.networks.nets import DiffusionModelUNet
from monai.networks.schedulers import DDPMScheduler
from torch.amp import GradScaler, autocast

device = torch.device("cpu")
model = DiffusionModelUNet(
    spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32, 32), attention_levels=(False, True, True),
    num_res_blocks=1, num_head_channels=32, norm_num_groups=16,
)
model.to(device)
# +
scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.Adam(params=model.parameters(), lr=2.5e-5)
# +
inferer, scaler = DiffusionInferer(scheduler), GradScaler("cpu", enabled=False)
for step in range(6):
    model.train()
    images = torch.rand(4, 1, 16, 16)
    optimizer.zero_grad(set_to_none=True)
    with autocast("cpu", enabled=False):
        noise = torch.randn_like(images)
        timesteps = torch.randint(0, 1000, (len(images),)).long()
        noise_pred = inferer(inputs=images, diffusion_model=model, noise=noise, timesteps=timesteps)
        loss = F.mse_loss(noise_pred.float(), noise.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    model.eval()
    with torch.no_grad():
        inferer(inputs=images, diffusion_model=model, noise=noise, timesteps=timesteps)
"""

LOOPS = {
    "diffusers' `train_unconditional.py`": DIFFUSERS,
    "lucidrains' README": LUCIDRAINS,
    "torchcfm's `train_cifar10.py`": TORCHCFM,
    "MONAI's 2D DDPM tutorial": MONAI,
}
