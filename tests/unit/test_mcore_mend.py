"""Whatever a kill leaves of a checkpoint's description, the run resumes from the newest finished one; healthy folders stay as they are."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from megatron_kd.mcore.mend import LATEST, mend

CONFIG = {"_target_": "x", "checkpoint": {"save_rng": True}, "model": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}, "train": {"iters": 3}}
MINE = CONFIG | {"name": "of this run"}
CFG = SimpleNamespace(to_yaml=lambda path: open(path, "w").write(yaml.safe_dump(MINE)))


def save(folder, *steps):
    """As Bridge leaves a folder."""
    for step in steps:
        iteration = folder / f"iter_{step:07d}"
        iteration.mkdir()
        (iteration / ".metadata").write_bytes(b"weights")
        torch.save({"step": torch.tensor(step)}, iteration / "train_state.pt")
        (iteration / "run_config.yaml").write_text(yaml.safe_dump(CONFIG | {"name": f"of step {step}"}))
        (folder / LATEST).write_bytes((iteration / "train_state.pt").read_bytes())
    return folder


def contents(folder):
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def resumes_from(folder) -> tuple[int, dict]:
    """What Bridge's loader reads, and nothing else left behind."""
    step = int(torch.load(folder / LATEST, weights_only=True)["step"])
    config = yaml.safe_load((folder / f"iter_{step:07d}" / "run_config.yaml").read_text())
    assert config["model"]["tensor_model_parallel_size"] == 2 and not [path for path in folder.rglob(".*") if path.name != ".metadata"]
    return step, config


@pytest.mark.parametrize("steps", [(4,), (4, 8)])
def test_finished_checkpoints_stay_as_they_are(tmp_path, steps):
    before = contents(save(tmp_path, *steps))
    mend(tmp_path, CFG)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", [None, 0, 10, 40, 90])
@pytest.mark.parametrize(("steps", "wanted"), [((4,), "of this run"), ((4, 8), "of step 4")])
def test_a_cut_off_run_config_is_made_again(tmp_path, steps, wanted, left):
    path = save(tmp_path, *steps) / f"iter_{steps[-1]:07d}" / "run_config.yaml"
    text = path.read_text()
    assert "tensor_model_parallel_size" not in text[:left or 0]
    path.unlink() if left is None else path.write_text(text[:left])
    mend(tmp_path, CFG)
    step, config = resumes_from(tmp_path)
    assert (step, config["name"]) == (steps[-1], wanted)


@pytest.mark.parametrize("left", [0, 1, 500])
def test_a_cut_off_copy_of_the_train_state_is_made_again(tmp_path, left):
    latest = save(tmp_path, 4, 8) / LATEST
    latest.write_bytes(latest.read_bytes()[:left])
    mend(tmp_path, CFG)
    assert resumes_from(tmp_path)[0] == 8


def test_a_newer_checkpoint_that_is_not_finished_is_not_taken(tmp_path):
    latest = save(tmp_path, 4) / LATEST
    (tmp_path / "iter_0000008").mkdir()
    (tmp_path / "iter_0000008" / "train_state.pt").write_bytes(latest.read_bytes()[:100])
    latest.write_bytes(b"")
    mend(tmp_path, CFG)
    assert resumes_from(tmp_path)[0] == 4


def test_an_older_checkpoint_that_was_chosen_stays_chosen(tmp_path):
    save(tmp_path, 4, 8)
    (tmp_path / LATEST).write_bytes((tmp_path / "iter_0000004" / "train_state.pt").read_bytes())
    mend(tmp_path, CFG)
    assert resumes_from(tmp_path)[0] == 4


def test_folders_without_a_checkpoint_are_left_alone(tmp_path):
    mend(tmp_path / "none", CFG)
    (tmp_path / LATEST).write_bytes(b"")
    mend(tmp_path, CFG)
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]


@pytest.mark.parametrize("load", ["checkpoints", None])
def test_attach_mends_what_the_run_loads(monkeypatch, load):
    from megatron_kd.config.schema import TeacherConfig
    from megatron_kd.student import attach

    class Configured(Exception):
        pass

    def configure(*_, **__):
        raise Configured

    mended = []
    monkeypatch.setattr(attach, "mend", lambda folder, cfg: mended.append(folder))
    monkeypatch.setattr(attach.configure, "configure", configure)
    with pytest.raises(Configured):
        attach.attach(SimpleNamespace(checkpoint=SimpleNamespace(save=None, load=load)), teacher=TeacherConfig(model="teacher"))
    assert mended == ([load] if load else [])
