# Options: flags, the file, variables; which wins; what is said about wrong ones. Every flag of the contract is there.
# Touches farandole.launch and a temporary file.
from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.config import SETTINGS, Config
from farandole.launch import cli, options
from farandole.launch.options import Usage, parse

# Section 2.1 of the contract, as users type them.
CONTRACT = """
-v --version|-np 2|--num-proc 2|-cb --check-build|--disable-cache|--start-timeout 5|--network-interfaces a,b
--network-interface a|--output-filename d|--verbose|-p 22 --ssh-port 22|-i f --ssh-identity-file f
--fusion-threshold-mb 4|--cycle-time-ms 2.5|--cache-capacity 3|--hierarchical-allreduce|--no-hierarchical-allreduce
--hierarchical-allgather|--no-hierarchical-allgather|--torus-allreduce|--no-torus-allreduce|--autotune|--no-autotune
--autotune-log-file f|--autotune-warmup-samples 1|--autotune-steps-per-sample 1|--autotune-bayes-opt-max-samples 1
--autotune-gaussian-process-noise 0.5|--min-np 1 --min-num-proc 1|--max-np 1 --max-num-proc 1|--slots-per-host 1
--slots 1|--elastic-timeout 5|--reset-limit 1|--blacklist-cooldown-range 1 2|--timeline-filename f
--timeline-mark-cycles|--no-timeline-mark-cycles|--no-stall-check|--stall-check|--stall-check-warning-time-seconds 1
--stall-check-shutdown-time-seconds 1|--mpi-threads-disable|--no-mpi-threads-disable|--mpi-args=--x|--tcp
--binding-args=--y|--num-nccl-streams 2|--thread-affinity 1|--gloo-timeout-seconds 90|--log-level DEBUG
--log-with-timestamp|--log-without-timestamp|-prefix-timestamp --prefix-output-with-timestamp|--log-hide-timestamp
--no-log-hide-timestamp|-H a:1 --hosts a:1|-hostfile f --hostfile f|--host-discovery-script s|--gloo|--mpi|--jsrun
"""
FILE = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 3, cache_capacity: 7, hierarchical_allreduce: true,
         hierarchical_allgather: true, torus_allreduce: true}
autotune: {enabled: true, log_file: a, warmup_samples: 5, steps_per_sample: 6, bayes_opt_max_samples: 8,
           gaussian_process_noise: 0.1}
timeline: {filename: t, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 11, shutdown_time_seconds: 22}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 5, gloo_timeout_seconds: 88}
logging: {level: INFO, with_timestamp: false}
"""


@pytest.mark.parametrize("flags", CONTRACT.strip().replace("\n", "|").split("|"))
def test_every_flag_of_the_contract_is_known(flags: str) -> None:
    found = parse([*flags.split(), "python", "x.py"], {})
    assert found.command == ["python", "x.py"]
    assert found.values or found.variables()


def test_values_of_flags_reach_the_ranks_in_units_of_the_variable() -> None:
    flags = ["--fusion-threshold-mb", "4", "--no-stall-check", "--log-with-timestamp", "--cycle-time-ms=2.5", "x"]
    variables = parse(flags, {}).variables()
    config = Config.from_environment(variables)
    assert config.fusion_threshold == 4 << 20 and config.stall_check_disable and config.cycle_time == 2.5
    assert variables["HOROVOD_FUSION_THRESHOLD"] == variables["FARANDOLE_FUSION_THRESHOLD"] == str(4 << 20)
    assert parse(["--stall-check", "x"], {}).settings["stall_check_disable"].value is False


def test_a_parameter_file_of_the_contract(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(FILE)
    found = parse(["--config-file", str(file), "x"], {})
    config = Config.from_environment(found.variables())
    assert (config.fusion_threshold, config.cycle_time, config.cache_capacity) == (32 << 20, 3.0, 7)
    assert config.hierarchical_allreduce and config.torus_allreduce and config.timeline_mark_cycles
    assert (config.autotune, config.autotune_gaussian_process_noise) == (True, 0.1)
    assert (config.stall_check_disable, config.stall_check_time_seconds) == (True, 11.0)
    assert (config.thread_affinity, config.gloo_timeout_seconds, config.log_level) == ("5", 88.0, "info")
    assert config.log_hide_time and found.gloo
    assert all(found.settings[name].source == f"file {file}" for name in ("fusion_threshold", "log_level"))


def test_a_flag_wins_over_the_file_and_the_file_over_variables(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("params: {cache_capacity: 7, cycle_time_ms: 3}")
    environ = {"HOROVOD_CACHE_CAPACITY": "1", "HOROVOD_CYCLE_TIME": "1", "FARANDOLE_SPIN_US": "9"}
    found = parse(["--config-file", str(file), "--cache-capacity", "8", "x"], environ).settings
    assert (found["cache_capacity"].value, found["cache_capacity"].source) == (8, "flag --cache-capacity")
    assert (found["cycle_time"].value, found["spin_us"].source) == (3.0, "variable FARANDOLE_SPIN_US")
    assert found["links"].source == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {fusion_threshold_mb: -1}", "params.fusion_threshold_mb"),
        ("params: {fusion_treshold_mb: 1}", "did you mean fusion_threshold_mb?"),
        ("parms: {}", "did you mean params?"),
        ("autotune: {gaussian_process_noise: 1.5}", "at most 1"),
        ("params: [1]", "expected settings below it"),
        ("params: {cache_capacity: [1]}", "expected a whole number"),
        ("stall_check: {enabled: perhaps}", "expected true or false"),
        ("controller: steam", "expected gloo, mpi or jsrun"),
        ("- a", "expected sections"),
        ("params: {a: b", "line 1, column"),
        ("params:\n\t- x", "line 2"),
        ("a: !!python/object/apply:os.system [x]", "is no YAML"),
    ],
)
def test_errors_of_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(Usage) as caught:
        parse(["--config-file", str(file), "x"], {})
    assert message in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fusion-threshold-mb", "much"], "--fusion-threshold-mb much: expected a number"),
        (["--fusion-threshold-mb=-1"], "--fusion-threshold-mb"),
        (["--autotune=1"], "is a switch"),
        (["--raw=1"], "is a switch"),
        (["--log-level", "loud"], "--log-level='loud'"),
        (["--blacklist-cooldown-range", "1"], "needs a value"),
        (["--grace", "x"], "expected a number"),
    ],
)
def test_errors_of_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(Usage) as caught:
        parse(flags, {})
    assert message in str(caught.value)


def test_a_wrong_variable_is_an_error_before_anything_starts() -> None:
    with pytest.raises(Usage, match="HOROVOD_CYCLE_TIME='soon'"):
        parse(["x"], {"HOROVOD_CYCLE_TIME": "soon"})


def test_no_word_means_two_things() -> None:
    flags = [word for flag in options.FLAGS for word in flag.words]
    for setting in SETTINGS.values():
        if setting.scope == "job":
            flags += [*setting.flags, *(setting.off_flags if setting.base == "bool" else ())]
    assert len(flags) == len(set(flags))


def test_double_dash_and_options_of_the_command() -> None:
    assert parse(["-np", "2", "--", "-x", "--np"], {}).command == ["-x", "--np"]
    assert parse(["-np", "2", "a", "-np", "3"], {}).np == 2


def test_a_users_controller_reaches_rank_0_though_ranks_get_ours() -> None:
    variables = parse(["x"], {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CYCLE_TIME": "2"}).variables()
    assert variables == {"FARANDOLE_CONTROLLER": "mpi"}


def test_tcp_alone_is_for_nccl_too() -> None:
    assert parse(["--tcp", "x"], {}).variables() == {"NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nproc-per-node", "did you mean -np, the number of all ranks?"),
        ("--nproc_per_node=2", "did you mean -np, the number of all ranks?"),
        ("--num_processes", "did you mean -np, the number of all ranks?"),
        ("--nnodes", "did you mean -H host1:2,host2:2"),
        ("--master_port", "leave it out: ranks find each other"),
        ("--num-prox", "did you mean --num-proc?"),
    ],
)
def test_spellings_of_other_launchers(word: str, meant: str) -> None:
    with pytest.raises(Usage, match="unknown option " + word.partition("=")[0]) as caught:
        parse([word, "2", "python", "train.py"], {})
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        (["runn", "-np", "2", "a"], "did you mean `run`?"),
        (["launch", "a"], "did you mean `farandole run -np N COMMAND...`?"),
        (["-np", "2", "a"], "did you mean `farandole run -np N COMMAND...`?"),
        (["train.py"], "did you mean `farandole run -np N python train.py`?"),
    ],
)
def test_commands_that_do_not_exist(flags: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags) == 2
    message = capsys.readouterr().err
    assert f"unknown command {flags[0]!r}; {meant}" in message


def test_ranks_without_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-np", "2"]) == 2
    assert "there is no command to run, e.g. farandole run -np 2 python train.py" in capfd.readouterr().err
