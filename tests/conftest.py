"""What holds for all tests: property tests draw the same examples everywhere, and no clock judges them.

Else the machine would choose what is tested, and a slow one fail. `--hypothesis-profile=default` draws anew.
"""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

settings.register_profile(
    "same everywhere",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same everywhere")

# It would also draw constants of ours, out of the modules that the tests before have happened to import.
assert callable(providers._get_local_constants)
providers._get_local_constants = Constants
