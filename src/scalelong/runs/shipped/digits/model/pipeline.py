"""DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)"""

import scalelong.models.uvit  # noqa: F401
from scalelong.models.pipeline import ScaleLongPipeline  # noqa: F401
