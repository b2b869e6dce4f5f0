"""The commands in docs/ are run as written, on a tiny model and text: in one process that has imported Megatron once."""

import os
import re
import shlex
from pathlib import Path

import pytest
import transformers

from megatron_kd.convert.tiny import tiny_config, write_tiny_model

ROOT = Path(__file__).parents[2]
DOCS = ("convert", "launch", "recipes")


def commands(name: str) -> list[str]:
    """Every line of the page's bash blocks."""
    return [line for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / f"docs/{name}.md").read_text(), re.M | re.S) for line in block.splitlines() if line.strip()]


def run_line(rank, world, line, folder):
    """One command line in this process; its exit code."""
    from megatron_kd.cli.main import main

    os.chdir(folder)
    program, *arguments = shlex.split(line)
    assert program == "megatron-kd", line
    return main(arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory as a user's: the repository's recipes, and the MODEL and TEXT that the pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    write_tiny_model(tiny_config(transformers.GptOssConfig().to_dict(), num_layers=8), folder / "MODEL", packed_mxfp4=True)
    (folder / "TEXT").mkdir()
    (folder / "TEXT" / "a.txt").write_text((ROOT / "docs/convert.md").read_text())
    (folder / "out").mkdir()
    return folder


@pytest.mark.parametrize("page", DOCS)
def test_the_commands_of_a_page_work_as_written(page, folder, megatron_ranks):
    lines = commands(page)
    assert lines, "a page without a command cannot be tested"
    for line in lines:
        assert megatron_ranks.run(run_line, 1, timeout_s=120, line=line, folder=folder) == [0], line
    if page == "convert":
        transformers.AutoModelForCausalLM.from_pretrained(folder / "out/exported")
    if page == "recipes":
        transformers.AutoModelForCausalLM.from_pretrained(folder / "out/exported_student")
