from scalelong.models.unet import build_unet as build_unet
from scalelong.models.uvit import UViT as UViT
