from scalelong.experiments.compare import Result as Result
from scalelong.experiments.compare import run_comparison as run_comparison
from scalelong.experiments.comparison import Comparison as Comparison
from scalelong.experiments.plan import DistanceSpec as DistanceSpec
from scalelong.experiments.plan import Variant as Variant
from scalelong.experiments.plan import scaling_variants as scaling_variants
