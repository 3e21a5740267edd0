"""The limit on open files is the daemon's own business, and not that of a library it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from kakeya_zmq.model.open_files import limit_kept
with limit_kept():
    import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
@pytest.mark.parametrize("soft", [512, 3_000])
def test_importing_mlx_lm_leaves_the_limit_on_open_files_alone(soft: int) -> None:
    program = IMPORT.format(soft=soft, hard=3_000)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(soft), "3000", "256", "3000"]
