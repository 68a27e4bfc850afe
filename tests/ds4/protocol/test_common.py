"""ds4/protocol/common.py: ranges, refusals by name, defaults, the request that results."""

import logging
from typing import Any

import msgspec
import pytest

from ds4.config import Settings
from ds4.errors import ContextOverflowError, RequestError
from ds4.protocol.common import (
    GenerationFields,
    Plan,
    SamplingDefaults,
    Vocabulary,
    decode_body,
    make_plan,
    sampling_defaults,
    timings,
    usage,
)

_DECODER = msgspec.json.Decoder(GenerationFields)
_VOCABULARY = Vocabulary(size=100, end_ids=frozenset({2, 7}), spell=lambda text: list(text.encode()))


def _plan(**fields: Any) -> Plan:
    body = decode_body(_DECODER, msgspec.json.encode(fields))
    return make_plan(body, SamplingDefaults(), _VOCABULARY, num_logprobs=-1)


def _refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        _plan(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 1.01),
        ("top_p", -1),
        ("min_p", 2),
        ("typical_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("repeat_penalty", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("n_predict", 0),
        ("min_tokens", -1),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"100": 1}),
        ("logit_bias", [[1, True]]),
        ("logit_bias", {"x" * 257: 1}),
        ("logit_bias", {"1": 101}),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, bad: Any) -> None:
    error = _refused(**{name: bad})
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("stop", 5),
        ("stop", [5]),
        ("logit_bias", [1]),
        ("stream", "yes"),
        ("model", 5),
        ("stream_options", "x"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(name: str, bad: Any) -> None:
    error = _refused(**{name: bad})
    assert error.param is not None
    assert error.param.startswith(name)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("suffix", "x"),
        ("mirostat", 1),
        ("mirostat", False),
        ("guided_whitespace_pattern", " *"),
        ("use_beam_search", True),
        ("modalities", ["text", "audio"]),
        ("truncate_prompt_tokens", 5),
        ("logits_processors", ["x"]),
        ("skip_special_tokens", False),
        ("top_n_sigma", 1.0),
        ("max_new_tokens", 5),
        ("reasoning_format", "none"),
        ("reasoning_budget_message", "enough"),
        ("separate_reasoning", False),
        ("return_logprob", True),
        ("echo", True),
        ("lora", [{"id": 0, "scale": 1.0}]),
    ],
)
def test_a_field_that_would_change_the_output_and_is_not_honoured_is_refused(name: str, bad: Any) -> None:
    error = _refused(**{name: bad})
    assert error.param == name
    assert error.code == "unsupported_parameter"


def test_penalties_have_no_window() -> None:
    assert _refused(repeat_last_n=64, repeat_penalty=1.1).param == "repeat_last_n"
    assert _refused(penalty_last_n=0, presence_penalty=1).param == "penalty_last_n"
    _plan(repeat_last_n=64, repeat_penalty=1.0)
    _plan(repeat_last_n=-1, repeat_penalty=1.1)


def test_biases_of_texts_are_those_of_their_tokens() -> None:
    assert _plan(logit_bias={"5": 1, "AB": -2}).sampling.logit_bias == ((5, 1.0), (65, -2.0), (66, -2.0))
    pairs = [[5, 1.5], ["5", 2], ["A", False]]
    assert _plan(logit_bias=pairs).sampling.logit_bias == ((5, 1.5), (53, 2.0), (65, -100.0))


def test_neutral_values_of_refused_fields_pass() -> None:
    _plan(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        typical_p=1,
        mirostat=0,
        modalities=["text"],
        suffix=None,
        guided_json=None,
    )


def test_fields_that_cannot_change_the_output_are_ignored() -> None:
    plan = _plan(user="x", metadata={"a": 1}, store=True, service_tier="auto", whatever=[1, {"b": None}])
    assert plan.num_choices == 1


def test_null_is_the_same_as_absent() -> None:
    names = msgspec.structs.fields(GenerationFields)
    nothing, nulls = _plan(), _plan(**{field.name: None for field in names})
    assert msgspec.structs.replace(nulls, sampling=nothing.sampling) == nothing
    assert msgspec.structs.replace(nulls.sampling, seed=0) == msgspec.structs.replace(
        nothing.sampling, seed=0
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\\ud800 and more text after it"}',
        b'{"model":"\\udc00x"}',
        b'{"x":' + b"[" * 50_000,
        b'{"temperature":NaN}',
        b'{"temperature":1e999}',
        b"\xef\xbb\xbf{}",
        b'{"seed":' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_of_ours_is_the_clients_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        make_plan(decode_body(_DECODER, body), SamplingDefaults(), _VOCABULARY, num_logprobs=-1)


def test_a_plan_becomes_requests_with_clamped_lengths_and_seeds_of_their_own() -> None:
    plan = _plan(seed=(1 << 64) - 1, n=2, max_tokens=50, min_tokens=60)
    first, second = (plan.generation(70, 100, choice, "prompt") for choice in range(2))
    assert (first.max_tokens, first.min_tokens) == (30, 30)
    assert (first.sampling.seed, second.sampling.seed) == ((1 << 64) - 1, 0)
    assert _plan().generation(70, 100, 0, "prompt").max_tokens == 30
    assert _plan(max_tokens=-1).generation(70, 100, 0, "prompt").max_tokens == 30
    assert _plan(seed=-2).sampling.seed == (1 << 64) - 2


def test_a_prompt_that_fills_the_context_is_an_overflow() -> None:
    assert _plan().generation(99, 100, 0, "prompt").max_tokens == 1
    with pytest.raises(ContextOverflowError) as caught:
        _plan().generation(100, 100, 0, "messages")
    assert caught.value.param == "messages"
    assert caught.value.num_prompt_tokens == 100


def test_without_a_seed_every_request_draws_its_own() -> None:
    assert _plan().sampling.seed != _plan().sampling.seed
    assert _plan(seed=-1).sampling.seed != _plan(seed=-1).sampling.seed
    assert max(_plan().sampling.seed for _ in range(9)) < 1 << 32, (
        "clients with 64-bit floats can send it again"
    )


def test_ends_of_the_vocabulary_stop_unless_ignored() -> None:
    assert _plan(stop_token_ids=[5, 5]).stop_token_ids == (2, 7, 5)
    assert _plan(stop_token_ids=[5], ignore_eos=True).stop_token_ids == (5,)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_more_entries_than_the_worker_takes_are_refused_by_name(name: str) -> None:
    vocabulary = Vocabulary(size=200_000, end_ids=frozenset({2, 7}), spell=lambda text: list(text.encode()))
    ids = range(4095) if name == "stop_token_ids" else range(65_537)
    value = list(ids) if name == "stop_token_ids" else dict.fromkeys(map(str, ids), 1.0)
    body = decode_body(_DECODER, msgspec.json.encode({name: value}))
    with pytest.raises(RequestError, match="allowed") as caught:
        make_plan(body, SamplingDefaults(), vocabulary, num_logprobs=-1)
    assert caught.value.param == name


def test_stops_are_a_text_or_a_list_and_empty_ones_fall_out() -> None:
    assert _plan(stop="a").stops == ("a",)
    assert _plan(stop=["b", "", "a", "b"]).stops == ("b", "a")
    assert _plan(stop="").stops == ()


def test_top_k_is_off_where_it_filters_nothing() -> None:
    assert [_plan(top_k=value).sampling.top_k for value in (-1, 0, 5, 100, 1 << 40)] == [0, 0, 5, 0, 0]


def test_defaults_come_from_settings_then_the_file_then_the_house() -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.top_p": True}
    defaults = sampling_defaults(Settings(top_k=30), metadata)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.5, 30, 1.0, 0.05)
    assert sampling_defaults(Settings(temperature=0), metadata).temperature == 0


def test_values_of_the_file_that_no_request_might_have_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    values = {"temp": 1e9, "top_k": -2, "top_p": 1.5, "min_p": -0.5, "penalty_repeat": 0.0}
    metadata = {f"general.sampling.{key}": value for key, value in values.items()}
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(Settings(), metadata) == SamplingDefaults()
    assert len(caplog.records) == 1
    assert "temp 1000000000.0, top_p 1.5, top_k -2" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "hot", True, [1.0]])
def test_what_is_no_number_in_the_file_is_left_out(value: object) -> None:
    metadata = {"general.sampling.temp": value, "general.sampling.top_k": value}
    assert sampling_defaults(Settings(), metadata) == SamplingDefaults()


def test_values_of_the_file_that_are_in_range_are_not_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        defaults = sampling_defaults(
            Settings(top_p=0.5),
            {"general.sampling.temp": 0, "general.sampling.top_p": 7, "general.sampling.top_k": -1},
        )
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.0, 0.5, 0)
    assert not caplog.records


def test_usage_and_timings_add_up() -> None:
    assert usage(5, 7, 3).total_tokens == 12
    times = timings(10, 4, 0.25, 0.5, 11, 2.0)
    assert (times.prompt_per_token_ms, times.predicted_per_token_ms) == pytest.approx(
        (500 / 6, 200), abs=1e-3
    )
    assert (times.prompt_n, times.prompt_per_second, times.predicted_per_second) == (6, 12.0, 5.0)
    none = timings(1, 1, 0.0, 0.0, 0, 0.0)
    assert none.predicted_per_second == none.prompt_per_token_ms == none.predicted_per_token_ms == 0
