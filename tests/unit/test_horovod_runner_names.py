# Names of Horovod's launcher that other programs import, each used as those programs use it.
# Touches threads, processes and sockets of this host.
"""What is in farandole/horovod_names, under Horovod's own names."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")  # here, since its import sets a variable of the process
import horovod.runner
from horovod.runner import _HorovodArgs
from horovod.runner.common.util import (
    codec,
    config_parser,
    env,
    host_hash,
    network,
    safe_shell_exec,
    secret,
    settings,
    timeout,
)
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, HostInfo, SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.elastic import discovery
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer
from horovod.runner.launch import check_build, is_gloo_used, parse_args, run_controller
from horovod.runner.util import network as local_network
from horovod.runner.util import streams, threads

SOURCE = Path(horovod.__file__).resolve().parents[1]


def test_the_version_satisfies_what_programs_ask() -> None:
    from packaging import version

    assert version.parse(horovod.__version__) >= version.parse("0.19.0")


def test_hosts_slots_and_ranks() -> None:
    found = parse_hosts("a:2,b:1")
    assert found == [HostInfo("a", 2), HostInfo("b", 1)] and HostInfo.from_string("c:4") == HostInfo("c", 4)
    plan = get_host_assignments(found, 2, 3)
    assert plan == [SlotInfo("a", 0, 0, 0, 3, 2, 2), SlotInfo("a", 1, 1, 0, 3, 2, 1), SlotInfo("b", 2, 0, 1, 3, 1, 2)]
    assert plan[1].to_response_string() == "1,3,1,2,0,1" and INVALID_SLOT_INFO.rank == -1
    assert len(get_host_assignments(found, 1, 2)) == 2
    with pytest.raises(ValueError, match=r"more processes \(4\) than there are available slots \(3\)"):
        get_host_assignments(found, 4)
    with pytest.raises(ValueError, match="not a number of slots"):
        parse_hosts("a:x")


def test_hostfiles(tmp_path: Path) -> None:
    from horovod.runner.common.util import hosts

    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:3"
    assert hosts.parse_hosts_and_slots("a:2,b:3") == (["a", "b"], {"a": 2, "b": 3})


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.is_exportable("PATH") and not env.is_exportable("BASH_FUNC_x%%")
    assert not env.is_exportable("_HOROVOD_SECRET_KEY") and not env.is_kubeflow_mpi({})
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert env.get_env_rank_and_size() == (2, 4)


def test_timeouts_secrets_codec_and_hashes() -> None:
    late = timeout.Timeout(0, "no {activity} within {timeout} s")
    time.sleep(0.001)  # sleep: so that the moment is over
    with pytest.raises(timeout.TimeoutException, match="no answer within 0 s"):
        late.check_time_out_for("answer")
    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH and len(secret.compute_digest(key, b"x")) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"x", secret.compute_digest(key, b"x"))
    assert not secret.check_digest(key, b"y", secret.compute_digest(key, b"x"))
    assert codec.loads_base64(codec.dumps_base64({"a": [1, None]})) == {"a": [1, None]}
    assert isinstance(codec.dumps_base64(1), str) and isinstance(codec.dumps_base64(1, to_ascii=False), bytes)
    assert host_hash.host_hash() == host_hash.host_hash() != host_hash.host_hash(salt="x")
    assert host_hash.host_hash().startswith(os.uname().nodename.partition(".")[0])


def test_settings() -> None:
    one = settings.Settings(num_proc=2, hosts="a:2", key=b"k")
    assert (one.num_proc, one.hosts, one.elastic, one.nics) == (2, "a:2", False, None)
    from horovod.runner.elastic.settings import ElasticSettings

    other = ElasticSettings(None, 1, 4, 600, None, num_proc=2)
    assert (other.min_num_proc, other.max_num_proc, other.elastic, other.num_proc) == (1, 4, True, 2)


def test_threads() -> None:
    def double(x: int, y: int) -> int:
        return 2 * x + y

    assert threads.execute_function_multithreaded(double, [(1, 0), (2, 1)]) == {0: 2, 1: 5}
    assert threads.execute_function_multithreaded(double, [(1, 0)], block_until_all_done=False) is None
    seen: list[Any] = []
    threads.in_thread(seen.append, (1,)).join()
    event, stop = threading.Event(), threading.Event()
    stop.set()
    threads.on_event(event, seen.append, (2,), stop=stop, check_stop_interval_s=0.01).join()
    event.set()
    threads.on_event(event, seen.append, (3,)).join()
    assert seen == [1, 3]
    with pytest.raises(ValueError, match="tuple"):
        threads.in_thread(seen.append, [1])


def test_pipes() -> None:
    pipe = streams.Pipe()
    writer = threads.in_thread(lambda: [pipe.write("abc"), pipe.write("d"), pipe.close()])
    assert [pipe.read(2), pipe.read(), pipe.read(), pipe.read()] == ["ab", "c", "d", None]
    writer.join()


def test_addresses_of_this_host() -> None:
    assert "127.0.0.1" in local_network.get_local_host_addresses() and "lo" in local_network.get_local_intfs()
    assert local_network.get_local_intfs("lo") == {"lo"} and local_network.get_driver_ip(["lo"]) == "127.0.0.1"
    assert local_network.resolve_host_address("localhost") == "127.0.0.1"
    assert local_network.resolve_host_address("no-such-host.invalid") is None
    assert local_network.filter_local_addresses(["localhost", "192.0.2.1"]) == ["192.0.2.1"]
    server, port = local_network.find_port(lambda place: socket.create_server(place))
    assert server.getsockname()[1] == port
    server.close()


class Adding(network.BasicService):  # type: ignore[misc]
    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        return sum(req) if isinstance(req, list) else super()._handle(req, client_address)


def test_services_answer_who_has_the_key() -> None:
    service = Adding("adding", b"key", nics=["lo"])
    try:
        assert service.addresses() == {"lo": [("127.0.0.1", service.get_port())]}
        client = network.BasicClient("adding", service.addresses(), b"key")
        assert client.addresses() == service.addresses() and client._send([1, 2, 3]) == 6
        assert client._send(network.PingRequest()).source_address == "127.0.0.1"
        for name, key in (("adding", b"another"), ("other", b"key")):
            with pytest.raises(network.NoValidAddressesFound, match="on any of the following addresses"):
                network.BasicClient(name, service.addresses(), key)
    finally:
        service.shutdown()


def test_commands_are_run_with_their_output_marked() -> None:
    out, err = io.StringIO(), io.StringIO()
    code = safe_shell_exec.execute("echo one; echo two >&2; printf $MINE; exit 3", {"MINE": "x"}, out, err, index=1)
    assert (code, out.getvalue(), err.getvalue()) == (3, "[1]<stdout>:one\n[1]<stdout>:x", "[1]<stderr>:two\n")
    assert safe_shell_exec.execute("kill -9 $$", stdout=out, stderr=err) == 137


def test_an_event_ends_a_command_and_what_it_started(tmp_path: Path) -> None:
    event = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            event.set()
            return super().write(text)

    out = Out()
    code = safe_shell_exec.execute("sleep 100 & echo $!; wait", stdout=out, events=[threading.Event(), event])
    assert code == 143
    child = Path(f"/proc/{out.getvalue().strip()}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
    other = subprocess.Popen(["sleep", "100"])
    safe_shell_exec.terminate_executor_shell_and_children(other.pid)
    assert other.wait(10) == -15


def test_settings_between_arguments_file_and_variables() -> None:
    args = _HorovodArgs()
    args.fusion_threshold_mb = 32
    args.no_stall_check = True
    config = {"params": {"cycle_time_ms": 5}, "stall_check": {"warning_time_seconds": 9}, "controller": "gloo"}
    config_parser.set_args_from_config(args, config, set())
    assert (args.cycle_time_ms, args.stall_check_warning_time_seconds, args.use_gloo) == (5, 9, True)
    config_parser.set_args_from_config(args, {"params": {"fusion_threshold_mb": 1}}, {"fusion_threshold_mb"})
    config_parser.validate_config_args(args)
    found = config_parser.set_env_from_args({"A": "b"}, args)
    assert found["HOROVOD_FUSION_THRESHOLD"] == str(32 << 20) and found["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert float(found[config_parser.HOROVOD_CYCLE_TIME]) == 5 and found["A"] == "b"
    assert found[config_parser.HOROVOD_STALL_CHECK_TIME_SECONDS] == "9"  # scripts read it with int()
    args.cycle_time_ms = -1
    with pytest.raises(ValueError, match="cycle-time"):
        config_parser.validate_config_args(args)
    with pytest.raises(AttributeError):
        config_parser.HOROVOD_NOTHING  # noqa: B018


def test_command_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    command_line = "-np 4 --min-np 2 -H a:2,b:2 --cycle-time-ms 3 --timeline-filename t.json --verbose python train.py"
    monkeypatch.setattr(sys, "argv", ["horovodrun", *command_line.split()])
    args = parse_args()
    assert (args.num_proc, args.min_num_proc, args.hosts, args.verbose) == (4, 2, "a:2,b:2", True)
    assert (args.cycle_time_ms, args.timeline_filename, args.command) == (3, "t.json", ["python", "train.py"])
    assert args.fusion_threshold_mb is None and args.use_mpi is None
    from farandole.horovod_names.arguments import words_of

    monkeypatch.setattr(sys, "argv", ["horovodrun", *words_of(args), *args.command])
    assert vars(parse_args()) == vars(args)
    monkeypatch.setattr(sys, "argv", ["horovodrun", "--nump", "4"])
    with pytest.raises(SystemExit) as caught:
        parse_args()
    assert caught.value.code == 2 and "did you mean" in capfd.readouterr().err
    check_build(False)
    assert "Available" in capfd.readouterr().out
    called: list[str] = []
    ways = [lambda name=name: called.append(name) for name in ("gloo", "mpi", "js")]
    for gloo, mpi, jsrun in ((False, False, False), (False, True, False), (False, False, True), (True, False, False)):
        run_controller(gloo, ways[0], mpi, ways[1], jsrun, ways[2], 0)
    assert called == ["gloo", "mpi", "js", "gloo"] and is_gloo_used() and not is_gloo_used(use_mpi=True)


RUN = """
import os, sys
from horovod.runner import _HorovodArgs
from horovod.runner.launch import _run
args = _HorovodArgs()
args.num_proc = int(sys.argv[1])
args.cycle_time_ms = 7
if sys.argv[2] == "function":
    def work():
        import farandole
        farandole.init()
        return farandole.rank(), farandole.size(), farandole.world.runtime.runtime.world.config.cycle_time
    args.run_func = work
    print(_run(args))
else:
    code = "import os; print(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_CYCLE_TIME'])"
    code += "; os._exit(int(os.environ['HOROVOD_RANK']))" if sys.argv[2] == "fail" else ""
    args.command = [sys.executable, "-c", code]
    try:
        _run(args)
    except RuntimeError as error:
        print("failed:", error)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["function", "command", "fail"])
def test_run_with_arguments(size: int, kind: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RUN)
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "program.py"), str(size), kind]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if kind == "function":
        assert done.stdout.splitlines()[-1] == str([(rank, size, 7.0) for rank in range(size)])
        return
    assert {f"[{rank}]<stdout>:{rank} 7" for rank in range(size - 1)} <= set(done.stdout.splitlines())
    assert ("failed: Horovod detected that one or more processes exited" in done.stdout) == (kind == "fail")


class Changing(discovery.HostDiscovery):  # type: ignore[misc]
    def __init__(self) -> None:
        self.found = {"a": 2, "b": 1}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self.found)


def test_discovery(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho b\n")
    script.chmod(0o755)
    assert discovery.HostDiscoveryScript(str(script), 4).find_available_hosts_and_slots() == {"a": 2, "b": 4}
    with pytest.raises(RuntimeError, match="No such file"):
        discovery.HostDiscoveryScript(str(tmp_path / "none"), 4).find_available_hosts_and_slots()
    fixed = discovery.FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}


def test_the_host_manager_keeps_order_and_leaves_failed_hosts_out() -> None:
    hosts = Changing()
    manager = discovery.HostManager(hosts)
    assert manager.update_available_hosts() == 2 and manager.current_hosts.host_assignment_order == ["a", "b"]
    assert manager.update_available_hosts() == 0
    hosts.found = {"b": 1, "c": 2, "a": 1}
    assert manager.update_available_hosts() == 3 and manager.current_hosts.host_assignment_order == ["a", "b", "c"]
    event = manager.get_host_event("b")
    manager.blacklist("b")
    assert event.is_set() and manager.is_blacklisted("b")
    assert manager.current_hosts.available_hosts == {"a", "c"} and manager.current_hosts.count_available_slots() == 3
    manager.update_available_hosts()
    assert manager.current_hosts.host_assignment_order == ["a", "c"]
    cooled = discovery.HostManager(hosts, (1, 2))
    cooled.update_available_hosts()
    cooled.blacklist("a")
    cooled._states["a"]._until = time.monotonic()  # its time is over
    assert cooled.update_available_hosts() == 2 and not cooled.is_blacklisted("a")
    for bounds in ((0, 5), (5, 1), (1, 3601)):
        with pytest.raises(ValueError, match="blacklist-cooldown-range"):
            discovery.HostState(bounds)


def test_servers_of_http_are_refused() -> None:
    class Mine(RendezvousHandler):  # type: ignore[misc]
        def do_GET(self) -> None: ...

    with pytest.raises(ValueError, match="handlers of HTTP are not served"):
        RendezvousServer().start(Mine)
    with pytest.raises(RuntimeError, match="start"):
        RendezvousServer().init([])


def test_names_on_ray() -> None:
    from horovod.ray.adapter import Adapter, BaseParams
    from horovod.ray.driver_service import _driver_fn
    from horovod.ray.strategy import create_placement_group

    assert BaseParams(use_gpu=True).gpus_per_worker == 1 and callable(create_placement_group)
    with pytest.raises(ValueError, match="use_gpu must be True"):
        BaseParams(gpus_per_worker=1)
    with pytest.raises(TypeError):
        Adapter()
    assert _driver_fn(settings.Settings(nics={"lo"})) == {"lo"}


def test_arguments_reach_the_function() -> None:
    """Programs write what they got to a file or send it by JSON."""
    assert json.loads(json.dumps(vars(_HorovodArgs())))["num_proc"] == 1
    with pytest.raises(AttributeError, match="no option 'numproc'"):
        _HorovodArgs().numproc  # noqa: B018
