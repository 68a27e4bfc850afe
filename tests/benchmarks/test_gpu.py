"""The GPU benchmark runs: on a tiny model, with the emulator in the GPU's place."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ds4.model_file import ModelFile
from tests.benchmarks.gpu import MIXES, TINY, fitting, llama_cpp, main
from tests.support.shaped_model import ModelShape, write_shaped_model
from workers.devices.cuda import opening
from workers.devices.cuda.driver import probe
from workers.devices.emulator.compiler import compiler
from workers.devices.interface import DeviceFaultError
from workers.model.program import Tensor
from workers.model.registry import load_program


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++")
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0"])
def test_it_reports_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str], mix: str) -> None:
    report = tmp_path / "report.json"
    arguments = ["--device", "emulator", "--tiny", "--mixes", mix, "--rows", "1,3", "--contexts", "20,40"]
    assert main([*arguments, "--steps", "4", "--directory", str(tmp_path), "--json", str(report)]) == 0
    rows = json.loads(report.read_bytes())["rows"]
    assert [(row["what"], row["rows"], row["context"]) for row in rows] == [
        ("prefill", 1, 40),
        *(("decode", count, context) for context in (20, 40) for count in (1, 3)),
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["step_bytes"] > 0
    # What a step reads grows with its rows and their contexts.
    read = [row["step_bytes"] for row in rows[1:]]
    assert read[0] < read[1]
    assert read[0] < read[2] < read[3]
    assert f"| {mix} | decode | 3 | 40 |" in capsys.readouterr().out


@pytest.mark.skipif(compiler() is None, reason="the emulator needs g++")
def test_a_model_that_fails_is_named_in_a_report_that_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise DeviceFaultError("an illegal address")

    monkeypatch.setattr(opening, "load", fail)
    report = tmp_path / "new" / "report.json"
    arguments = ["--device", "emulator", "--tiny", "--directory", str(tmp_path / "models")]
    assert main([*arguments, "--rows", "1", "--contexts", "20", "--json", str(report)]) == 0
    found = json.loads(report.read_bytes())
    assert found["rows"] == []
    assert found["left_out"] == [f"{mix}: an illegal address" for mix in MIXES]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--llama-batched-bench", "/nowhere/llama-batched-bench"], "is no program"),
        (["--rows", "1,0"], "--rows"),
        (["--contexts", "many"], "--contexts"),
        (["--mixes", "Q4_K_M,Q3"], "not Q4_K_M,Q3"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--device", "emulator", "--tiny", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_by_name() -> None:
    plan, left_out = fitting([1, 8, 32], [512, 2048], 64, max_tokens=8 * 600)
    assert plan == [(512, [1, 8]), (2048, [1])]
    assert left_out == [
        "32 rows of 512 tokens: no memory",
        "8 rows of 2048 tokens: no memory",
        "32 rows of 2048 tokens: no memory",
    ]


@pytest.mark.skipif(not probe().problem, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().err.startswith("error: no usable GPU: ")


def test_the_peers_figures_are_read_from_its_json_lines(tmp_path: Path) -> None:
    """The lines are those of llama-batched-bench, build of August 2026."""
    program = tmp_path / "llama-batched-bench"
    line = '{"n_kv_max": 768, "pp": $npp, "tg": 4, "pl": 3, "n_kv": 72, "speed_pp": 38.4, "speed_tg": 58.9}'
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\necho llama_context: n_ctx_seq\n'
        f"while [ $1 != -npp ]; do shift; done; npp=$2\ncat <<END\n{line}\nEND\n"
    )
    program.chmod(0o755)
    found = llama_cpp(program, tmp_path / "model.gguf", [(20, [1, 3]), (300, [3])], 4)
    assert found == {(3, context): {"decode": 58.9, "prefill": 38.4} for context in (20, 300)}
    first, second = (tmp_path / "arguments").read_text().splitlines()
    assert "-c 768 " in first
    assert "-npp 20 -ntg 4 -npl 1,3 " in first
    assert "-c 1536 " in second


def test_the_models_are_of_the_shape_and_mix_that_they_say(tmp_path: Path) -> None:
    path = write_shaped_model(tmp_path / "model.gguf", shape=TINY, mix="Q4_K_M")
    program = load_program(ModelFile.open(path))
    assert program.dimensions.vocab_size == TINY.vocab_size
    kinds = {
        tensor.name.removeprefix("blk.0."): tensor.ggml_type
        for operation in program.operations
        for field in operation.__struct_fields__
        if isinstance(tensor := getattr(operation, field), Tensor)
    }
    assert kinds["attn_q.weight"] == 12  # Q4_K
    assert kinds["output.weight"] == 14  # Q6_K


def test_the_default_shape_is_llama_3_1_8b() -> None:
    shape = ModelShape()
    per_layer = shape.hidden_size * (
        2 * shape.num_heads * shape.head_size + 2 * shape.num_kv_heads * shape.head_size + 3 * shape.ffn_size
    )
    weights = shape.num_layers * per_layer + 2 * shape.vocab_size * shape.hidden_size
    assert round(weights / 1e9, 2) == 8.03
