# What the launcher says about itself: help, completion, the summary of a job, and the project that `new` writes.
# Starts shells; pure otherwise.
from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from farandole.launch import cli, completion, help, missing
from farandole.launch.blame import Ending, judge
from farandole.launch.options import FLAGS, OURS, job_settings, parse, table
from farandole.launch.summary import Account
from farandole.tools import new


def test_the_short_help_has_about_twenty_flags_and_the_long_one_all() -> None:
    page = help.short(OURS)
    flags = [line.split()[0].rstrip(",") for line in page.splitlines() if line.startswith("  -")]
    assert 18 <= len(flags) <= 26 and set(flags) <= set(table())
    assert page.count("farandole run -np") == 4  # the usage and three examples
    rest = help.long(OURS)
    assert [flag.words for flag in FLAGS if not flag.hidden and flag.words[0] not in rest] == []
    assert [one.name for one in job_settings() if one.flags[0] not in rest] == []
    working, idle = rest.split("accepted, without effect:")
    assert "--cycle-time-ms" in idle and "--cycle-time-ms" not in working and "--autotune-log-file" in working
    assert "horovodrun -np 4" in help.short("horovodrun") and "horovodrun" not in page + rest


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    line = (
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _farandole; printf '%s\\n' ${{COMPREPLY[@]}}"
    )
    script = completion.script("bash", list(cli.COMMANDS))
    return subprocess.run(["bash", "-c", script + line], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_and_flags() -> None:
    assert completed("farandole", "do") == ["doctor"]
    assert completed("farandole", "run", "--min") == ["--min-np", "--min-num-proc"]
    assert completed("horovodrun", "--min") == ["--min-np", "--min-num-proc"]
    assert completed("farandole", "check", "--min") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell: str) -> None:
    script = completion.script(shell, list(cli.COMMANDS))
    assert "doctor" in script and "min-np" in script
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", "/dev/stdin"], input=script, text=True, check=True)


def test_the_command_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0 and "complete -o" in capsys.readouterr().out
    assert cli.main(["completion", "csh"]) == 2


def account(*endings: Ending, code: int = 0, generations: int = 1) -> Account:
    dead = sum(one.failed for one in endings)
    verdict = judge(endings)
    return Account(["python", "train.py"], OURS, code, 75.0, 2, endings, dead, generations, verdict)


def test_the_summary_of_a_job() -> None:
    fast, slow = Ending(0, 0, peak_kb=2048, lived=70, waited=35), Ending(1, 0, peak_kb=4096, lived=70, waited=1)
    first, second, third = account(fast, slow).lines()
    assert first == "2 ranks ended well after 1 min 15 s; peak memory 4 MB (rank 1)"
    assert second == "slowest: rank 1; the others waited 50% of their time"
    assert third.startswith("advice: --log-dir DIR keeps a timeline")
    alone = account(Ending(0, 0), Ending(1, 0))
    assert alone.lines() == ["2 ranks ended well after 1 min 15 s; no rank called init()"]
    assert replace(alone, command=["hostname"]).lines() == [] == replace(alone, ranks=1).lines()
    assert len(account(fast, replace(slow, waited=34)).lines()) == 1  # everybody waits: nobody is slow
    killed = account(Ending(1, 137), Ending(0, 1, blames=1, error="PeerLost: x"), code=137)
    assert killed.lines()[0] == "2 ranks ended with exit code 137 after 1 min 15 s"
    assert "--min-np" in killed.lines()[1]
    other = replace(killed, other_python="/usr/bin/python").advice()
    assert other.startswith(
        f"the ranks ran /usr/bin/python, which is not the Python of this program: {sys.executable}."
    )
    recovered = account(fast, slow, generations=3)
    assert "0 deaths, 2 times the ranks changed" in recovered.lines()[0]


def test_the_file_of_json() -> None:
    found = account(Ending(1, 1, error="ValueError: x", at="train.py:3"), code=1).data()
    assert json.loads(json.dumps(found)) == found
    assert found["root_cause"] == {"rank": 1, "text": "exit code 1: ValueError: x (train.py:3)"}
    assert found["endings"][0]["peak_memory_mb"] is None and found["deaths"] == 1


@pytest.mark.parametrize("kind", new.TITLES)
def test_the_files_of_a_new_project(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert new.main([kind, str(folder)]) == 0
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"train.py", "README.md", "Dockerfile", "job.sbatch", "requirements.txt"} <= set(files)
    assert ("stack.yaml" in files) == (kind == "lightning")
    assert [name for name, text in files.items() if "@" in text and name != "train.py"] == []
    compile(files["train.py"], "train.py", "exec")
    subprocess.run(["bash", "-n", str(folder / "job.sbatch")], check=True)
    assert yaml.safe_load(files["farandole.yaml"])
    parse(["--config-file", str(folder / "farandole.yaml"), "-np", "2", "true"], {})
    assert "farandole check train.py" in capsys.readouterr().out
    assert new.main([kind, str(folder)]) == 1 and "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["mxnet", "x"], ["torch", "--np"], []])
def test_wrong_arguments_of_farandole_new(words: list[str]) -> None:
    assert new.main(words) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torch"], "torch is a kind of project; give the folder another name, for example: farandole new torch first"),
        (["jaxx", "first"], "unknown kind 'jaxx'; did you mean jax?"),
        (["caffe", "first"], "unknown kind 'caffe'; there are torch, lightning"),
        (["--kind", "first"], "unknown option --kind"),
        (["torch", "my", "project"], "expected a kind and a folder, not 3 words"),
    ],
)
def test_new_answers_wrong_words_and_writes_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new.main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_does_not_exist_is_answered_with_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert missing.script(["python3.11", "trian.py"]).endswith("; did you mean train.py?")
    assert missing.script(["python", str(tmp_path / "tran.py")]).endswith(f"; did you mean {tmp_path}/train.py?")
    present = (["python", "train.py"], ["python", "-m", "trian.py"], ["python"], ["cat", "trian.py"])
    assert [missing.script(command) for command in present] == [""] * 4
