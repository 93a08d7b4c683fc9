"""The command line: every verb in both forms, exit codes, and errors that are one line naming the argument."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte._library import CPU_ISAS
from halfbyte.cli import _parser, help_page, main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of two layers, and the same in nf4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(where / "dense")
    import peft_bridge  # noqa: F401

    with halfbyte.init_quantized("nf4"):
        LlamaForCausalLM.from_pretrained(where / "dense").save_pretrained(where / "nf4")
    return where


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def test_info_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "info")
    data = json.loads(output_of(capsys, "info", "--json"))
    assert data["torch"] == torch.__version__
    assert data["isa_in_use"] in CPU_ISAS
    assert "CPU" in data["kernels"]["linear"]
    assert data["isa_in_use"] in text
    assert "\x1b" not in text


def test_report_reads_headers_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output_of(capsys, "report", folder / "nf4", "--json"))
    rows = {row["name"]: row for row in data["tensors"]}
    assert rows["model.layers.0.mlp.up_proj.weight"]["format"] == "nf4"
    assert rows["model.layers.0.mlp.up_proj.weight"]["bytes"] == 128 * 48
    assert rows["lm_head.weight"]["format"] is None
    assert data["bytes"] == sum(row["bytes"] for row in rows.values())
    text = output_of(capsys, "report", folder / "nf4")
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "model.layers.1.mlp.up_proj.weight" in output_of(capsys, "report", folder / "nf4", "--all")


def test_report_needs_no_data_behind_the_header(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (folder / "dense" / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    (tmp_path / "cut.safetensors").write_bytes(whole[: 8 + length])
    assert json.loads(output_of(capsys, "report", tmp_path / "cut.safetensors", "--json"))["bytes"] > 0


def test_plan_compares_formats_and_says_what_fits(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", folder / "dense", "--format", "dense", "--format", "nf4", "--seq-len", 32, "--lora-rank", 2]
    text = output_of(capsys, *asked, "--memory", "4MB", "--plot", tmp_path / "plan.png")
    assert text.splitlines()[1].split() == ["MB", "dense", "nf4"]
    assert "nf4 in 0.003725 GiB: batch size up to" in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(output_of(capsys, *asked, "--json"))
    assert data["nf4"]["rows"]["weights, packed"] < data["dense"]["rows"]["weights, float32"]


def test_bench_times_the_peers(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output_of(capsys, "bench", "--size", 64, "--seconds", 0.01, "--json"))
    assert [row["what"] for row in data["rows"]][:2] == ["quantize to nf4", "dequantize nf4"]
    assert all(row["milliseconds"]["halfbyte"] > 0 for row in data["rows"])


def test_quantize_makes_a_folder_that_loads(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    data = json.loads(output_of(capsys, "quantize", folder / "dense", tmp_path / "out", "--format", "int8", "--json"))
    assert data["bytes"] < data["dense_bytes"]
    assert data["quantized"] == 14
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert halfbyte.verify(model).quantized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "nowhere"), "halfbyte report: DIR must be a .safetensors file or a folder with some, got 'nowhere'"),
        (("plan", "nowhere"), "halfbyte plan: model_or_config must be a folder with config.json, got 'nowhere'"),
        (("quantize", "nowhere", "out", "--format", "dense"), "halfbyte quantize: --format must be one of nf4, "),
        (("quantize", "nowhere.gguf", "out"), "halfbyte quantize: SRC: nowhere.gguf does not exist"),
        (("bench", "--size", "0"), "halfbyte bench: run_benchmarks: size must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_bad_values_name_their_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["plan", "x", "--memory", "lots"], "argument --memory: memory must be bytes, or a number with a unit"),
        (["plan", "x", "--format", "nf5"], "argument --format:"),
        ([], "the following arguments are required: COMMAND"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"not a header at all")
    assert main(["report", str(tmp_path)]) == 1
    assert "bad.safetensors is not a safetensors file" in capsys.readouterr().err


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "halfbyte", "report", "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("halfbyte report: DIR must be")


def test_a_library_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['transformers'] = None; from halfbyte.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "quantize", str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "quantize: reading a transformers checkpoint needs transformers; pip install transformers" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the page has the layout of argparse before Python 3.13")
def test_the_page_of_commands_is_what_the_parsers_say() -> None:
    assert (ROOT / "docs/commands.md").read_text() == help_page()


def test_every_help_text_is_a_sentence_and_says_its_default() -> None:
    (verbs,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(verbs.choices) == {"info", "report", "plan", "bench", "quantize"}
    for name, parser in verbs.choices.items():
        assert parser.epilog.startswith(f"Example: halfbyte {name}")
        parser.parse_args(shlex.split(parser.epilog.removeprefix(f"Example: halfbyte {name}")))
        for action in parser._actions[1:]:  # past argparse's own --help
            assert action.help[0].isupper() and action.help.endswith("."), (name, action.dest, action.help)
            if action.option_strings and action.nargs != 0 and action.dest not in ("memory", "plot", "calibrate"):
                assert "Default: " in action.help, (name, action.dest)
                if action.default is not None:
                    assert f"Default: {action.default:g}." in action.help if isinstance(
                        action.default, float
                    ) else f"Default: {action.default}." in action.help
