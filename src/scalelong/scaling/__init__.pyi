from scalelong.scaling.modules import FixedSkips as FixedSkips
from scalelong.scaling.modules import SkipScaling as SkipScaling
from scalelong.scaling.specs import (
    BlockScaling as BlockScaling,
)
from scalelong.scaling.specs import (
    ConstantScaling as ConstantScaling,
)
from scalelong.scaling.specs import (
    ExplicitScaling as ExplicitScaling,
)
from scalelong.scaling.specs import (
    FixedScaling as FixedScaling,
)
from scalelong.scaling.specs import (
    LearnableScaling as LearnableScaling,
)
from scalelong.scaling.specs import (
    NoScaling as NoScaling,
)
from scalelong.scaling.specs import (
    Notice as Notice,
)
from scalelong.scaling.specs import (
    ReZeroScaling as ReZeroScaling,
)
from scalelong.scaling.specs import (
    Scaling as Scaling,
)
from scalelong.scaling.specs import (
    SkipShape as SkipShape,
)
from scalelong.scaling.specs import (
    StableScaling as StableScaling,
)
from scalelong.scaling.specs import (
    UniformScaling as UniformScaling,
)
from scalelong.scaling.specs import (
    kappa_notices as kappa_notices,
)
from scalelong.scaling.specs import (
    parse_scaling as parse_scaling,
)
from scalelong.scaling.specs import (
    scaling_names as scaling_names,
)
