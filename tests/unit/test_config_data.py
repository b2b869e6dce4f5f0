"""Raw text to an indexed dataset: documents held out whole, no paragraph shared, made once."""

import json

import numpy as np
import pytest

from megatron_kd.config.schema import DataConfig
from megatron_kd.errors import ConfigError, DataError
from megatron_kd.mcore import data as module

PYDOC = "python:pydoc_data.topics.topics"


def text_config(source, **fields) -> DataConfig:
    return DataConfig(kind="text", text=str(source), seq_length=32, **fields)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as f:
        for i in range(20):
            f.write(json.dumps({"text": f"Only in {i}.\n\nShared  by all\nof them.\n\nAlso only in {i}, a little longer."}) + "\n")
    (folder / "b.txt").write_text("A text of its own.\n\nWith two paragraphs.")
    (folder / "c.md").write_text("not read")
    return folder


def test_documents_come_in_a_fixed_order_from_all_files(corpus):
    texts = list(module.documents(text_config(corpus)))
    assert len(texts) == 21 and texts[0].startswith("Only in 0.") and texts[-1].startswith("A text of its own.")
    assert len(list(module.documents(text_config(corpus, max_documents=5)))) == 5


@pytest.mark.parametrize("held_out", [0.05, 0.2, 0.5])
def test_held_out_documents_reach_their_share_and_do_not_depend_on_order(corpus, held_out):
    config = text_config(corpus, held_out=held_out)
    chosen, _ = module.held_out_documents(config)
    texts = list(module.documents(config))
    share = sum(len(texts[i]) for i in chosen) / sum(map(len, texts))
    assert held_out - 0.06 <= share <= held_out + 0.001 or len(chosen) == 1
    (corpus / "a.jsonl").rename(corpus / "z.jsonl")
    again, _ = module.held_out_documents(config)
    reordered = list(module.documents(config))
    assert {texts[i] for i in chosen} == {reordered[i] for i in again}


class Characters:
    """A tokenizer of code points; id 0 ends a document."""

    eos_token_id = 0

    def __len__(self):
        return 1 << 16

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})


@pytest.fixture
def prepared_pydoc(tmp_path, monkeypatch, megatron_ranks):
    """Indexing needs megatron-core, which this process imports on the CPU runtime only inside a rank."""
    config = text_config(PYDOC, held_out=0.06)
    return megatron_ranks.run(_prepare, 1, config=config, folder=str(tmp_path))[0]


def _prepare(rank, world, config, folder):
    from pathlib import Path

    import transformers
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    original = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *_: Characters()
    try:
        prepared = module.prepare_text(config, "characters", Path(folder))
        transformers.AutoTokenizer.from_pretrained = None  # a second call must not tokenise again
        assert module.prepare_text(config, "characters", Path(folder)) == prepared
    finally:
        transformers.AutoTokenizer.from_pretrained = original
    read = {
        name: [np.array(document) for document in IndexedDataset(prefix)]
        for name, prefix in (("train", prepared.train_prefix), ("held_out", prepared.held_out_prefix))
    }
    return prepared, read


def test_no_paragraph_of_a_held_out_topic_is_left_in_training(prepared_pydoc):
    prepared, read = prepared_pydoc
    texts = {name: ["".join(map(chr, ids[:-1])) for ids in documents] for name, documents in read.items()}
    paragraphs = {name: {" ".join(p.split()) for text in part for p in text.split("\n\n") if p.strip()} for name, part in texts.items()}
    assert not paragraphs["train"] & paragraphs["held_out"]
    assert prepared.dropped_paragraphs > 0, "pydoc's topics do share paragraphs, so the rule was at work"
    import pydoc_data.topics

    assert set(texts["held_out"]) <= set(pydoc_data.topics.topics.values()), "held-out topics are whole"
    assert 0.03 < prepared.held_out_tokens / (prepared.train_tokens + prepared.held_out_tokens) < 0.08
    assert all(ids[-1] == 0 for part in read.values() for ids in part)
    assert (sum(map(len, read["train"])), sum(map(len, read["held_out"])), len(read["train"])) == (
        prepared.train_tokens,
        prepared.held_out_tokens,
        prepared.train_documents,
    )


@pytest.mark.parametrize(
    "source, words",
    [
        ("nowhere", ["nowhere", "no such file or folder"]),
        ("/proc/self/fdinfo", ["fdinfo", "no .txt or .jsonl"]),
        ("python:no.such", ["python:no.such", "cannot be loaded"]),
        ("python:os.nothing", ["cannot be loaded"]),
    ],
)
def test_text_that_is_not_there_is_named(source, words):
    with pytest.raises(ConfigError) as error:
        list(module.documents(text_config(source)))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("line", ["{broken", '{"other": 1}', "[1]"])
def test_bad_jsonl_line_is_named_with_its_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError, match="a.jsonl:3"):
        list(module.documents(text_config(tmp_path / "a.jsonl")))


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(ConfigError, match="one must train and one be held out"):
        module.held_out_documents(text_config(tmp_path))
