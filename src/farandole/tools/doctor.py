# `farandole doctor`: checks this host, the network, ssh and the frameworks. A failed check says how to correct it.
# Touches the same as checks.py; starts a short job of probes.
"""`farandole doctor`; with `-H host1,host2` it also checks the connections between hosts. Exit code 0: all is ok."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from farandole.launch import ssh
from farandole.launch.agent_connection import StartError, package_place
from farandole.launch.hosts import parse
from farandole.launch.job import Job
from farandole.launch.output import MemorySink
from farandole.launch.plan import Plan
from farandole.launch.slots import rank_numbers
from farandole.rendezvous.interfaces import is_this_host
from farandole.tools import checks, probe
from farandole.tools.checks import NOTE, OK, REPORT, UNFIT, Check, Problem

JOB_SECONDS = 60.0
FAR_CLOCK_MS = 1000.0  # clocks may differ by so much; timelines of several hosts are aligned by their clocks
SAME = ("farandole", "python", "numpy", "torch", "tensorflow", "jax")
MUST_BE_SAME = ("farandole",)


def job(hosts: Sequence[str], ssh_options: ssh.SshOptions) -> MemorySink:
    """Runs one probe for each entry of `hosts`. Returns their output. Problem when the job fails."""
    plan = Plan(
        command=[ssh_options.python, "-c", ssh.start_code(ssh_options.package, "farandole.tools.probe")],
        numbers=rank_numbers(hosts),
        hosts=["" if is_this_host(host) else host for host in hosts],
        environ=os.environ,
        directory="/",
        connector=ssh_options,
    )
    kept = MemorySink(len(hosts))
    try:
        with Job(plan, kept) as running:
            code = running.wait(JOB_SECONDS)
    except (StartError, OSError, TimeoutError) as error:
        found, _, remedy = str(error).partition("\n")
        raise Problem(found, remedy.strip() or "see the checks above") from None
    if code != 0:
        said = "".join(kept.text(rank, 1) for rank in range(len(hosts))).strip().splitlines()
        raise Problem(f"ended with code {code}: {(said or ['nothing was said'])[-1]}", "see the checks above")
    return kept


def between(name: str, hosts: Sequence[str], ssh_options: ssh.SshOptions) -> Iterator[Check]:
    """Runs a real job: the ranks join, compute a sum, and measure their links."""
    try:
        said = job(hosts, ssh_options).text(0, 0)
    except Problem as problem:
        yield Check(name, UNFIT, str(problem), problem.remedy)
        return
    yield from judge(name, said)


def each_host(hosts: Sequence[str], ssh_options: ssh.SshOptions) -> Iterator[Check]:
    """Checks each host separately: whether it can be reached, has the package, and how long this takes."""
    for host in hosts:
        name = "this host" if is_this_host(host) else f"ssh {host}"
        began = time.monotonic()
        try:
            reports = read(job([host], ssh_options).text(0, 0))
        except Problem as problem:
            yield Check(name, UNFIT, str(problem), problem.remedy)
            continue
        if reports is None:
            yield Check(name, UNFIT, "the probe ended without a report", REPORT)
            continue
        about = reports[0]["about"]
        what = ", ".join(f"{key} {about[key]}" for key in ("python", "farandole", "torch", "cores") if key in about)
        yield Check(name, OK, f"{what}; {time.monotonic() - began:.1f} s")


def judge(name: str, said: str) -> Iterator[Check]:
    """Checks the results of the probes: sums, versions, links, clocks."""
    reports = read(said)
    if reports is None:
        yield Check(name, UNFIT, "the probes ended without a report", REPORT)
        return
    if not all(report["right"] for report in reports):
        yield Check(name, UNFIT, "the ranks' sum is wrong", REPORT)
        return
    yield Check(name, OK, f"{len(reports)} ranks agree on a sum")
    hosts = [report["about"]["host"] for report in reports]
    yield from compare([report["about"] for report in reports])
    for one in (one for report in reports for one in report["measured"]):
        yield from judge_link(one, hosts)


def read(said: str) -> list[dict[str, Any]] | None:
    """The report of the probes in the output of rank 0."""
    for line in said.splitlines():
        if line.startswith(probe.MARK):
            found: list[dict[str, Any]] = json.loads(line.removeprefix(probe.MARK))
            return found
    return None


def compare(abouts: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Names hosts with different versions."""
    for what in SAME:
        versions = {about["host"]: about.get(what, "none") for about in abouts}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{host}: {version}" for host, version in versions.items())
            state = UNFIT if what in MUST_BE_SAME else NOTE
            yield Check(what, state, text, f"install the same {what} on all hosts")


def judge_link(one: dict[str, Any], hosts: Sequence[str]) -> Iterator[Check]:
    """Checks one pair of ranks: latency, rate, and the difference of the clocks."""
    a, b = one["pair"]
    name = f"{hosts[a]} - {hosts[b]}" if hosts[a] != hosts[b] else "between them"
    latency = f"latency {one['latency_us']:.0f} us (median {one['typical_us']:.0f})"
    yield Check(name, OK, f"{latency}, {one['rate'] / 1e6:.0f} MB/s")
    if abs(one["clock_ms"]) > FAR_CLOCK_MS:
        text = f"{hosts[b]} is {one['clock_ms'] / 1e3:+.1f} s off {hosts[a]}"
        yield Check("clocks", NOTE, text, "timelines will not fit together: use NTP on both")


def show(check: Check) -> None:
    """Prints one line, and the remedy below it."""
    print(f"{check.state:<6}{check.name:<20}{check.found}", flush=True)
    if check.remedy:
        print(f"{'':<26}-> {check.remedy}", flush=True)


def examine(arguments: Sequence[str] | None) -> Iterator[Check]:
    """The checks that the command line requests. If this host fails, the checks that need it are skipped."""
    parser = argparse.ArgumentParser(prog="farandole doctor", description="Says whether hosts are fit for a job.")
    parser.add_argument("-H", "--hosts", default="", metavar="HOST,...", help="also what lies between these hosts")
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="where sshd listens there")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the key to log in with")
    parser.add_argument("--remote-python", default=sys.executable, metavar="PATH", help="the interpreter there")
    options = parser.parse_args(arguments)
    try:
        hosts = [host.name for host in parse(options.hosts)] if options.hosts else []
    except ValueError as error:
        parser.error(str(error))
    ssh_options = ssh.SshOptions(options.remote_python, package_place(), options.ssh_port, options.ssh_identity_file)
    fit = True
    for check in checks.this_host():
        fit = fit and check.state != UNFIT
        yield check
    if fit:
        yield from between("two ranks", ["localhost"] * 2, ssh_options)
    for check in each_host(hosts, ssh_options):
        fit = fit and check.state != UNFIT
        yield check
    if fit and len(hosts) > 1:
        yield from between("all hosts", hosts, ssh_options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks. Returns 1 if one fails."""
    unfit = []
    for check in examine(arguments):
        show(check)
        if check.state == UNFIT:
            unfit.append(check.name)
    print(f"unfit: {', '.join(unfit)}" if unfit else "fit: jobs can run here", flush=True)
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
