from scalelong.runs.config import Config as Config
from scalelong.runs.generate import Request as Request
from scalelong.runs.run import Run as Run
from scalelong.runs.run import find_runs as find_runs
from scalelong.runs.run import load_run as load_run
