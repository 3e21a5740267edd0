"""deploy/test.sh, as far as it can be tried without setting anything up."""

from __future__ import annotations

import subprocess

from tests.deploy.service_rig import DEPLOY


def test_a_file_that_is_not_there_is_named_before_anything_is_set_up() -> None:
    command = ["bash", str(DEPLOY / "test.sh"), "--all", "tests/unit/no_such_test.py::test_nothing", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kakeya: there is no tests/unit/no_such_test.py\n"
