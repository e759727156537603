"""The file of `farandole fit`: its contents, errors in it, and the output of `--explain`. Starts no ranks.
Reads Lightning's source where it is installed; imports nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.lightning.fit import main
from farandole.lightning.stack import StackError, checked, explain, trainer_options

ROOT = Path(__file__).resolve().parents[2]
MODULE = {"module": "digits.Digits"}


def stack(**sections: Any) -> Any:
    return checked({"application": MODULE, **sections})


def test_a_section_may_be_one_string() -> None:
    found = stack(communication="gloo", orchestration="slurm")
    assert (found.backend, found.kind, found.ranks) == ("gloo", "slurm", 1)
    assert stack(orchestration={"kind": "hosts", "ranks": 4, "hosts": "a:2,b:2"}).hosts == "a:2,b:2"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected the sections communication, orchestration, application"),
        ({"aplication": MODULE}, "unknown key 'aplication'; did you mean 'application'?"),
        ({"application": {}}, "module is missing"),
        ({"application": {"module": "Digits"}}, "expected package.Class, not 'Digits'"),
        ({"application": {"modul": "a.B"}}, "application: unknown key 'modul'; did you mean 'module'?"),
        ({"application": {"module": {"class": "a.B"}}}, "did you mean 'class_path'?"),
        ({"application": MODULE, "communication": "glo"}, "'glo' is unknown; did you mean 'gloo'?"),
        ({"application": MODULE, "communication": "smoke"}, "expected one of farandole, gloo, nccl"),
        ({"application": MODULE, "orchestration": {"rank": 2}}, "unknown key 'rank'; did you mean 'ranks'?"),
        ({"application": MODULE, "orchestration": {"ranks": 0}}, "0 is not a number of ranks"),
        ({"application": MODULE, "orchestration": "hosts"}, "hosts is missing"),
        ({"application": MODULE, "orchestration": {"hosts": "a:1"}}, "hosts is for kind: hosts, not for local"),
        ({"application": {**MODULE, "trainer": {"strategy": "ddp"}}}, "communication and orchestration"),
        ({"application": MODULE, "communication": {"backend": "gloo", "scale_lr": True}}, "for farandole, not for"),
        ({"application": MODULE, "communication": "gloo", "orchestration": {"min_ranks": 1}}, "after a lost rank"),
        ({"application": MODULE, "communication": {"strategy": "fsd"}}, "'fsd' is unknown; did you mean 'fsdp'?"),
        ({"application": MODULE, "communication": {"strategy": "ddp", "scale_lr": True}}, "not for DDPStrategy"),
    ],
)  # fmt: skip
def test_errors_name_the_key_and_the_correction(document: Any, message: str) -> None:
    with pytest.raises(StackError) as caught:
        checked(document)
    assert message in str(caught.value)


@pytest.mark.skipif(not trainer_options(), reason="Lightning is not installed")
def test_options_of_the_trainer_are_known() -> None:
    assert {"max_epochs", "accelerator", "callbacks"} <= set(trainer_options())
    with pytest.raises(StackError, match="trainer: unknown key 'max_epoch'; did you mean 'max_epochs'"):
        checked({"application": {**MODULE, "trainer": {"max_epoch": 3}}})


def test_the_explanation_is_python_that_compiles() -> None:
    for communication in ("gloo", {"compression": "bf16", "scale_lr": True}):
        text = explain(stack(communication=communication, orchestration={"ranks": 3}))
        compile(text[text.index("# train.py") :], "train.py", "exec")
        assert "orchestration  local: 3 ranks on this host" in text
    assert "FarandoleStrategy(compression='bf16', scale_lr=True)" in text
    theirs = explain(stack(communication={"strategy": "model_parallel"}, orchestration={"ranks": 3}))
    compile(theirs[theirs.index("# train.py") :], "train.py", "exec")
    assert "strategy=ModelParallelStrategy(process_group_backend='farandole')" in theirs
    assert "plugins=[FarandoleEnvironment()]" in theirs and "devices=3" in theirs
    elastic = explain(stack(orchestration={"ranks": 3, "min_ranks": 2}))
    assert "2 to 3 ranks" in elastic and "callbacks=[ElasticCallback()]" in elastic and "--min-np 2" in elastic


CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
STOP = {"class_path": "EarlyStopping", "init_args": {"monitor": "loss"}}


def test_the_explanation_has_the_classes_of_the_trainers_options() -> None:
    application = {**MODULE, "trainer": {"callbacks": STOP, "plugins": [{"class_path": "a.Digits"}], "logger": CSV}}
    cases: list[dict[str, Any]] = [
        {"orchestration": {"ranks": 3, "min_ranks": 2}},
        {"communication": {"strategy": "ddp"}, "orchestration": {"ranks": 3}},
    ]
    for sections in cases:
        text = explain(checked({"application": application, **sections}))
        compile(text[text.index("# train.py") :], "train.py", "exec")  # no keyword is given twice
        assert "from lightning.pytorch.callbacks import EarlyStopping" in text
        assert "logger=CSVLogger(save_dir='logs')" in text and "class_path" not in text
        assert "import digits\n" in text and "trainer.fit(digits.Digits())" in text  # `Digits` is the plugin's class
        if "min_ranks" in sections["orchestration"]:
            assert "callbacks=[EarlyStopping(monitor='loss'), ElasticCallback()]" in text
        else:
            assert "plugins=[Digits(), FarandoleEnvironment()]" in text


@pytest.mark.skipif(not trainer_options(), reason="Lightning is not installed")
@pytest.mark.slow
def test_the_explanation_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    }
    options |= {"accelerator": "cpu", "logger": CSV, "callbacks": [{"class_path": "LearningRateMonitor"}]}
    application = {"module": "lightning.pytorch.demos.boring_classes.BoringModel", "trainer": options, "seed": 3}
    text = explain(checked({"application": application, "communication": {"compression": "bf16"}}))
    (tmp_path / "train.py").write_text(text[text.index("# train.py") :])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, text + done.stderr
    [table] = (tmp_path / "logs").rglob("metrics.csv")
    assert "lr-SGD" in table.read_text().splitlines()[0]


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--help"]) == 0 and "usage" in capsys.readouterr().out
    assert main([]) == 2 and "expected one file" in capsys.readouterr().err
    assert main(["a.yaml", "--explian"]) == 2 and "unknown option" in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml")]) == 2 and "No such file" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("a: [")
    assert main([str(tmp_path / "bad.yaml")]) == 2 and "bad.yaml" in capsys.readouterr().err
    assert main([str(ROOT / "examples" / "stack.yaml"), "--explain"]) == 0
    assert 'strategy="farandole"' in capsys.readouterr().out


def test_ray_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("orchestration: ray\napplication: {module: digits.Digits}\n")
    code = "import sys; sys.modules['ray'] = sys.modules['farandole.ray'] = None\n"
    code += f"from farandole.launch.cli import main; sys.exit(main(['fit', {str(tmp_path / 'stack.yaml')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "orchestration: ray needs Ray: pip install" in done.stderr, done.stderr
