"""The command line: `halfbyte info | report | plan | bench | quantize`, also as `python -m halfbyte`.

Results go to stdout (a table, or JSON with `--json`), errors as one line to stderr. Exit codes: 0 done, 1 it failed, 2 the
arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import halfbyte
from halfbyte import _library
from halfbyte.formats import FORMATS, Format
from halfbyte.memory.plan import MemoryPlan, parse_bytes, plans_of
from halfbyte.memory.plan import _aligned as aligned
from halfbyte.memory.sharded import STRATEGIES
from halfbyte.memory.simulate import OPTIMIZERS
from halfbyte.nn.report import Report

__all__ = ["console", "help_page", "main"]

T = TypeVar("T")
OPS = ("quantize", "dequantize", "linear", "linear_backward_input", "embedding", "adamw8bit_step_", "lion8bit_step_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: instead of those of the process.

    Returns:
        The exit code: 0, or 1 with one line on stderr. Wrong arguments exit with 2 (`SystemExit`).
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        data, text = args.run(args)
    except KeyboardInterrupt:
        print("halfbyte: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"halfbyte {args.verb}: {lines[0].removeprefix(f'{args.verb}: ')}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(data, indent=2))
    else:
        _show(text)
    return 0


def console() -> int:
    """`main` as a process of its own: progress bars of other libraries are off too, unless a terminal shows them."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    return main()


def _parser() -> argparse.ArgumentParser:
    describe = "Native low-bit training for PyTorch. Every command prints a table, or JSON with --json."
    parser = argparse.ArgumentParser(prog="halfbyte", description=describe)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def verb(name: str, run: Callable[[argparse.Namespace], tuple[Any, str]], help: str, example: str) -> Any:
        sub = verbs.add_parser(name, help=help, description=help, epilog=f"Example: halfbyte {name} {example}".rstrip())
        sub.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
        sub.set_defaults(run=run)
        return sub

    verb("info", _info, "Say what was built, and which kernels run on this machine.", "")

    help = "List the tensors that the safetensors files of a folder hold, by reading their headers only."
    report = verb("report", _report, help, "smollm2-nf4 --all")
    report.add_argument("dir", type=Path, metavar="DIR", help="A folder with .safetensors files, or one such file.")
    report.add_argument("--all", action="store_true", help="Print a line per tensor instead of one per kind.")

    help = "Predict the peak memory of a training step, per rank and by kind, without allocating it."
    plan = verb("plan", _plan, help, "Llama-3.1-8B --lora-rank 16 --memory 24GiB --format nf4 --format dense")
    formats = f"{', '.join(FORMATS)}, with a block size as in nf4:128, or dense"
    plan.add_argument("model", type=Path, metavar="MODEL_DIR", help="A folder with a transformers config.json.")
    text = f"Plan for weights in this format: {formats}. Give it several times to compare. Default: all of them."
    plan.add_argument("--format", action="append", type=_format, metavar="FORMAT", help=text)
    plan.add_argument("--batch-size", type=int, default=1, metavar="ROWS", help="Rows of the batch of one rank. Default: 1.")
    plan.add_argument("--seq-len", type=int, default=2048, metavar="TOKENS", help="Tokens of a row. Default: 2048.")
    text = "Train LoRA adapters of this rank on all linear layers. Default: none, what the model leaves trainable trains."
    plan.add_argument("--lora-rank", type=int, metavar="RANK", help=text)
    text = "The optimizer whose state is counted. Default: adamw8bit."
    plan.add_argument("--optimizer", default="adamw8bit", choices=[*OPTIMIZERS, "none"], help=text)
    text = "How the ranks share the model. Default: single."
    plan.add_argument("--strategy", default="single", choices=STRATEGIES, help=text)
    plan.add_argument("--world-size", type=int, default=1, metavar="RANKS", help="Number of ranks. Default: 1.")
    text = "Keep the activations of every block instead of recomputing them in backward."
    plan.add_argument("--no-checkpointing", action="store_true", help=text)
    text = "The device to plan for. Default: cuda if this machine has one, else cpu."
    plan.add_argument("--device", choices=("cpu", "cuda"), help=text)
    text = "The dtype of dense weights. Default: what config.json says."
    plan.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = "Bytes of one device, such as 24GiB or 80GB: also say the largest batch and sequence that fit."
    plan.add_argument("--memory", type=_memory, metavar="SIZE", help=text)
    text = "Draw the plans as stacked bars into this file; needs matplotlib."
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help=text)

    help = "Time the ops on this machine, beside torch's dense ones and bitsandbytes where it is installed."
    bench = verb("bench", _bench, help, "--size 4096 --format nf4-dq --seconds 2")
    text = "Rows and columns of the weight. Default: 2048."
    bench.add_argument("--size", type=int, default=2048, metavar="N", help=text)
    bench.add_argument("--format", type=_format, default="nf4", metavar="FORMAT", help="Format of the weight. Default: nf4.")
    text = "Seconds spent on each comparison. Default: 1."
    bench.add_argument("--seconds", type=float, default=1.0, metavar="S", help=text)

    help = (
        "Quantize a dense checkpoint into a folder, a few megabytes at a time; from_pretrained and load_model read it. Run "
        "again after an interruption, it goes on where it was."
    )
    quantize = verb("quantize", _quantize, help, "SmolLM2-135M smollm2-nf4 --format nf4 --calibrate notes.txt")
    text = "A transformers folder (safetensors, or pytorch_model.bin), or a .gguf file."
    quantize.add_argument("src", type=Path, metavar="SRC", help=text)
    quantize.add_argument("out", type=Path, metavar="OUT", help="The folder to make.")
    text = f"One of {', '.join(FORMATS)}, with a block size as in nf4:128. Default: nf4."
    quantize.add_argument("--format", type=_format, default="nf4", metavar="FORMAT", help=text)
    text = "Choose the codes by this text, a file or a folder of files, which lowers the error of every layer."
    quantize.add_argument("--calibrate", type=Path, metavar="TEXT", help=text)
    text = "Tokens of that text to use. Default: 8192."
    quantize.add_argument("--tokens", type=int, default=8192, metavar="TOKENS", help=text)
    return parser


def help_page() -> str:
    """The help texts of all commands as Markdown: docs/commands.md. Widths do not depend on the terminal."""
    parser = _parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {"halfbyte": parser, **{f"halfbyte {name}": sub for name, sub in verbs.choices.items()}}
    made = "python -c 'from halfbyte.cli import help_page; print(help_page(), end=\"\")'"
    page = f"# Commands\n\nMade from the parsers by `{made}`.\n"
    for title, each in texts.items():
        each.formatter_class = partial(argparse.HelpFormatter, width=110)
        page += f"\n## {title}\n\n```text\n{each.format_help()}```\n"
    return page


def _format(text: str) -> str:
    return text if text == "dense" else _argument(lambda: str(Format.parse(text)))


def _memory(text: str) -> int:
    return _argument(lambda: parse_bytes(text))


def _argument(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _show(text: str) -> None:
    """Colours numbers on a terminal if rich is installed; plain text everywhere else."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(soft_wrap=True).print(text, markup=False, emoji=False)
            return
    print(text)


# ---- info -----------------------------------------------------------------------------------------------------------


def _info(_: argparse.Namespace) -> tuple[Any, str]:
    built = _library.build_info()
    loaded = _library.load_error is None
    data: dict[str, Any] = {
        "halfbyte": built.get("version"),
        "commit": built.get("commit"),
        "torch": torch.__version__,
        "built_with_torch": built.get("torch"),
        "python": platform.python_version(),
        "compiler": built.get("compiler"),
        "library": str(_library.LIBRARY_DIR) if loaded else _library.load_error,
        "isas_built": built.get("isas"),
        "isa_in_use": _library.cpu_isa() if loaded else None,
        "threads": torch.get_num_threads(),
        "cuda_built": built.get("cuda") or built.get("cuda_skipped") or "no",
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": {op: _kernels(op) for op in OPS} if loaded else {},
    }
    lines = [(name, _plain(value)) for name, value in data.items() if name != "kernels"]
    width = max(len(name) for name, _ in lines)
    text = "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
    text += "".join(f"\n{f'kernels of {op}'.ljust(width)}  {', '.join(keys)}" for op, keys in data["kernels"].items())
    return data, text


def _kernels(op: str) -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [key for key in ("CPU", "CUDA") if has(f"halfbyte::{op}", key)]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


# ---- the others -----------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> tuple[Any, str]:
    from halfbyte.memory.headers import report_headers

    found = report_headers(args.dir)
    return {"bytes": found.bytes, "tensors": [asdict(row) for row in found.rows]}, found.table(every=args.all)


def _plan(args: argparse.Namespace) -> tuple[Any, str]:
    formats = args.format or ["dense", *FORMATS]
    plans: dict[str, MemoryPlan] = {}
    _progress("planning", 0, len(formats))
    for each, made in plans_of(
        args.model,
        formats,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        optimizer=None if args.optimizer == "none" else args.optimizer,
        strategy=args.strategy,
        world_size=args.world_size,
        checkpointing=not args.no_checkpointing,
        lora_rank=args.lora_rank,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        device=args.device,
    ):
        plans[each] = made
        _progress("planning", min(len(plans), len(formats) - 1), len(formats))
    _progress("", 0, 0)
    compared = halfbyte.memory.PlanComparison(plans)
    first = next(iter(plans.values()))
    text = str(first) if len(plans) == 1 else f"{first.title}\n{compared}"
    data: dict[str, Any] = {
        each: {"peak_bytes": plan.peak_bytes, "rows": {row.what: row.bytes for row in plan.rows}}
        for each, plan in plans.items()
    }
    if args.memory is not None:
        for each, plan in plans.items():
            fit = {vary: plan.fits(args.memory, vary=vary) for vary in ("batch_size", "seq_len")}
            data[each]["fits"] = fit
            text += (
                f"\n{each} in {args.memory / 2**30:.4g} GiB: batch size up to {fit['batch_size']} at {args.seq_len} tokens, "
                f"or up to {fit['seq_len']} tokens at batch size {args.batch_size}"
            )
    if args.plot:
        compared.plot(args.plot)
        text += f"\n{args.plot}"
    return data, text


def _progress(what: str, done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what} ({done + 1}/{of})" if what else "\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bench(args: argparse.Namespace) -> tuple[Any, str]:
    from halfbyte.bench import run_benchmarks

    rows = run_benchmarks(args.size, args.format, args.seconds)
    peers = list(dict.fromkeys(name for row in rows for name in row.milliseconds))
    table = [("milliseconds", *peers)]
    table += [
        (row.what, *(f"{row.milliseconds[peer]:.3f}" if peer in row.milliseconds else "" for peer in peers)) for row in rows
    ]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {_library.cpu_isa()}"
    foot = (f"{where}, {torch.get_num_threads()} threads, weight {args.size} x {args.size}", *("" for _ in peers))
    data = {"where": foot[0], "rows": [asdict(row) for row in rows]}
    return data, aligned(table, foot)


def _quantize(args: argparse.Namespace) -> tuple[Any, str]:
    if args.format == "dense":
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got 'dense'")
    if args.calibrate is not None:
        return _calibrate(args)
    try:
        from peft_bridge.folder import quantize_folder
    except ModuleNotFoundError as error:
        raise ImportError(
            f"quantize: reading a transformers checkpoint needs {error.name}; pip install {error.name} "
            "(halfbyte.checkpoint.quantize_checkpoint packs any module's weights without it)"
        ) from error

    say = partial(_say_disk_use, args.out)
    done = quantize_folder(args.src, args.out, args.format, announce=say, progress=sys.stderr.isatty())
    data = {"out": str(args.out), "bytes": done.bytes, "dense_bytes": done.dense_bytes, "quantized": len(done.quantized)}
    return data, f"{done}\n{args.out}"


def _say_disk_use(out: Path, found: Report, left_out: Sequence[str], missing: Sequence[str]) -> None:
    """To stderr: what the weights will take, what is free, and where model and checkpoint differ."""
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    print(f"{out}: {found.bytes / 1e6:.1f} MB will be written, {free / 1e6:.1f} MB are free", file=sys.stderr)
    if left_out:
        print(f"{len(left_out)} tensors are no part of the model: {', '.join(left_out[:5])}", file=sys.stderr)
    if missing:
        print(f"{len(missing)} tensors of the model are not in SRC: {', '.join(missing[:5])}", file=sys.stderr)


def _calibrate(args: argparse.Namespace) -> tuple[Any, str]:
    done = halfbyte.calibrate(args.src, args.calibrate, args.format, tokens=args.tokens, out=args.out)
    return {"out": str(args.out), **json.loads(done.to_json())}, f"{done}\n{args.out}"
