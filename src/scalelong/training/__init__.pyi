from scalelong.runs.config import Config as Config
from scalelong.runs.config import override as override
from scalelong.runs.run import Run as Run
from scalelong.runs.run import load_run as load_run
from scalelong.training.loop import train as train
from scalelong.training.presets import PRESETS as PRESETS
from scalelong.training.presets import preset as preset
