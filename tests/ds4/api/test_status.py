"""ds4/api/status.py: metrics, slots, settings, version."""

import asyncio
from pathlib import Path

from ds4 import __version__
from tests.support.front_rig import Front, until, with_front


def test_metrics_count_what_clients_got(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        await front.chat()
        await front.events(n=2)
        response = await front.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert front.worker is not None
        lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
        num_output = len(front.encode("hello world"))
        assert lines["ds4_generation_tokens_total"] == str(3 * num_output)
        assert lines["ds4_prompt_tokens_total"] == str(2 * len(front.worker.requests[0].prompt))
        assert lines['ds4_request_success_total{finished_reason="stop"}'] == "3"
        assert lines["ds4_time_to_first_token_seconds_count"] == "3"
        assert lines["ds4_inter_token_latency_seconds_count"] != "0"
        assert lines["ds4_e2e_request_latency_seconds_count"] == "3"
        assert lines["ds4_slots"] == "32"
        assert lines["ds4_slots_used"] == "0"
        assert lines["ds4_worker_ready"] == "1"

    with_front(tmp_path, scenario)


def test_slots_show_who_runs(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        worker = front.worker
        assert worker is not None
        worker.hold_after(1)
        asking = asyncio.ensure_future(front.chat())
        await until(lambda: bool(worker.requests) and worker.requests[0].num_sent == 1)
        answer = (await front.client.get("/slots")).json()
        assert answer["decode_pending"] == 0
        (busy,) = [slot for slot in answer["slots"] if slot["is_processing"]]
        assert busy["n_prompt_tokens"] == len(worker.requests[0].prompt)
        worker.release()
        await asking

    with_front(tmp_path, scenario)


def test_props_show_the_settings_in_force_without_secrets(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        response = await front.client.get("/props", headers={"x-api-key": "topsecret"})
        answer = response.json()
        assert answer["settings"]["slots_per_front_end"] == 8
        assert "topsecret" not in response.text
        assert str(tmp_path) not in answer["model_path"]
        assert answer["n_ctx"] == 512
        assert answer["worker"]["device"] == "script"
        assert (answer["bos_token"], answer["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert answer["modalities"] == {"vision": False, "audio": False}
        settings = answer["default_generation_settings"]
        assert (settings["n_ctx"], settings["params"]["min_p"]) == (answer["n_ctx"], 0.05)

    with_front(tmp_path, scenario, api_key="topsecret")


def test_version_is_the_packages(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        assert (await front.client.get("/version")).json()["version"] == __version__

    with_front(tmp_path, scenario, None)
