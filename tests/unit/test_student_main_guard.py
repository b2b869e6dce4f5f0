"""A training script that a checkpoint's helper process would run again is refused, with the way out; others are let through."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_kd.config.schema import TeacherConfig
from megatron_kd.errors import ConfigError

CALL = "from megatron_kd.student.main_guard import check_main_guard\n"
GUARDED = "def main():\n    check_main_guard(saves=True)\n    print('trains')\n\n\nif __name__ == '__main__':\n    main()\n"


def run(tmp_path, text: str, *arguments: str) -> subprocess.CompletedProcess:
    script = tmp_path / "train.py"
    script.write_text(text)
    return subprocess.run([sys.executable, *(arguments or [str(script)])], capture_output=True, text=True, timeout=60, cwd=tmp_path)


@pytest.mark.parametrize("text", [
    CALL + "check_main_guard(saves=True)\n",
    CALL + "def main():\n    check_main_guard(saves=True)\n\n\nmain()\n",
    CALL + "if True:\n    check_main_guard(saves=True)\n",
])
def test_a_script_that_trains_at_its_top_level_is_refused(tmp_path, text):
    result = run(tmp_path, text)
    assert result.returncode == 1 and "ConfigError" in result.stderr and "train.py" in result.stderr and 'if __name__ == "__main__":' in result.stderr


@pytest.mark.parametrize("text", [
    CALL + GUARDED,
    CALL + "if __name__ == '__main__' and True:\n    check_main_guard(saves=True)\n    print('trains')\n",
    CALL + "check_main_guard(saves=False)\nprint('trains')\n",
])
def test_guarded_scripts_and_runs_that_save_nothing_pass(tmp_path, text):
    result = run(tmp_path, text)
    assert result.stdout == "trains\n", result.stderr


def test_modules_and_code_without_a_file_pass(tmp_path):
    assert run(tmp_path, CALL + GUARDED, "-m", "train").stdout == "trains\n"
    assert run(tmp_path, "", "-c", CALL + "check_main_guard(saves=True); print('trains')").stdout == "trains\n"


def test_a_helper_process_that_runs_the_script_again_says_so(tmp_path):
    """What happens in a run that told attach of no checkpoints and saves one."""
    result = run(tmp_path, "import multiprocessing\n" + CALL + "check_main_guard(saves=False)\nprint('trains')\nmultiprocessing.get_context('spawn').Manager()\n")
    assert result.returncode == 1 and result.stdout == "trains\n", "not twice"
    assert "started again" in result.stderr and "EOFError" in result.stderr


def test_functions_of_spawned_processes_pass(tmp_path):
    """torch.multiprocessing.spawn and the like: the main script has been imported by then."""
    result = run(tmp_path, "import multiprocessing\n" + CALL + "def work():\n    check_main_guard(saves=True)\n    print('trains')\n\n\nif __name__ == '__main__':\n"
                 "    process = multiprocessing.get_context('spawn').Process(target=work)\n    process.start()\n    process.join()\n")
    assert result.stdout == "trains\n", result.stderr


@pytest.mark.parametrize(("save", "saves"), [("checkpoints", True), (None, False)])
def test_attach_looks_before_it_changes_anything(monkeypatch, save, saves):
    from megatron_kd.student import attach

    def refuse(**asked):
        raise ConfigError(str(asked))

    monkeypatch.setattr(attach, "check_main_guard", refuse)
    with pytest.raises(ConfigError, match=f"'saves': {saves}"):
        attach.attach(SimpleNamespace(checkpoint=SimpleNamespace(save=save)), teacher=TeacherConfig(model="teacher"))


def test_a_main_that_is_not_source_passes(tmp_path):
    import py_compile

    (tmp_path / "source.py").write_text(CALL + GUARDED)
    py_compile.compile(str(tmp_path / "source.py"), cfile=str(tmp_path / "train.pyc"))
    assert run(tmp_path, "", str(tmp_path / "train.pyc")).stdout == "trains\n"
