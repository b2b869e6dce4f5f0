"""What context parallelism asks of data and attention before anything is built."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_kd.config.load import load
from megatron_kd.mcore.bridge_config import packing_multiple
from megatron_kd.mcore.model import needs_all_to_all_cp

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_oss_20b_smoke.yaml"


@pytest.mark.parametrize("student, teacher, multiple", [(1, 1, 1), (2, 1, 4), (1, 4, 8), (2, 3, 12)])
def test_packed_documents_divide_on_both_sides(student, teacher, multiple):
    recipe = load(RECIPE, [f"student.layout.cp={student}", f"teacher.layout.cp={teacher}", "teacher.placement=streamed", "stream.token_file=/dev/null",
                           "data.seq_length=768"])
    assert packing_multiple(recipe) == multiple


def test_sinks_and_windows_go_all_to_all():
    plain = SimpleNamespace(softmax_type="vanilla", window_size=None)
    assert not needs_all_to_all_cp(plain)
    assert needs_all_to_all_cp(SimpleNamespace(softmax_type="learnable", window_size=None))
    assert needs_all_to_all_cp(SimpleNamespace(softmax_type="vanilla", window_size=(127, 0)))
