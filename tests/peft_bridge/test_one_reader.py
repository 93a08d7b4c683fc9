"""Plain from_pretrained under accelerate: one rank reads for all; the two ranks are one_reader_ranks.py."""

import sys
from pathlib import Path

from transformers.modeling_utils import PreTrainedModel

from peft_bridge import HalfbyteConfig, one_reader

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run_ranks


def test_rank_0_reads_and_whoever_is_missing_is_named(tmp_path):
    outputs = run_ranks(Path(__file__).with_name("one_reader_ranks.py"), str(tmp_path))
    assert all("DONE" in text for text in outputs)


def test_the_patch_goes_again_and_the_wish_is_not_saved():
    ours = PreTrainedModel.__dict__["from_pretrained"]
    one_reader.uninstall()
    try:
        assert PreTrainedModel.__dict__["from_pretrained"].__func__ is ours.__func__.__wrapped__
    finally:
        one_reader.install()
    assert not one_reader.accelerate_runs()
    assert HalfbyteConfig(one_reader=False).to_dict() == HalfbyteConfig().to_dict()
