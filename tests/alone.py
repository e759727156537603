# Runs tests once more, alone and after all other tests, if they failed while other programs used the processors.
# Touches pytest's hooks; starts pytest.
"""With `--alone`, a run whose few failures all happened on a busy machine runs these tests once more, one at a time.
The last lines of the run count and name them. A test that fails again has failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3  # more failures than this have a common cause other than a busy machine
BUSY = "failed on a busy machine"  # the property of a failed report, with the evidence


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="run tests that failed on a busy machine once more, alone")


def name_of(report: pytest.TestReport, config: pytest.Config) -> str:
    """The test's name without the group that xdist adds to it."""
    grouped = config.getoption("dist", "no") == "loadgroup" and "@" in report.nodeid
    return report.nodeid.rpartition("@")[0] if grouped else report.nodeid


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(config, "workerinput") or not config.getoption("alone"):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reports = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, [])]
    # A file that could not be collected has no properties.
    evidence = {name_of(report, config): dict(getattr(report, "user_properties", ())).get(BUSY) for report in reports}
    if not 0 < len(evidence) <= MOST or None in evidence.values():
        return
    reporter.section(f"tests that failed on a busy machine, now alone: {len(evidence)}")
    for test, busy in evidence.items():
        reporter.line(f"{test}: {busy}")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *evidence]
    if subprocess.run(command, cwd=config.rootpath).returncode == 0:
        reporter.line(f"failed on a busy machine and passed alone: {len(evidence)}: {', '.join(evidence)}")
        session.exitstatus = pytest.ExitCode.OK
