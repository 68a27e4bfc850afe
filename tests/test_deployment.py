"""The deployment files against the code: compose, Dockerfile, Prometheus, Grafana.

There is no Docker daemon where the tests run, so the files are parsed and every name in them that
the code owns is looked up: settings, paths, targets, metrics, signals and times.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from ds4 import config, metrics

ROOT: Final = Path(__file__).parents[1]
VARIABLES: Final = {setting.variable for setting in config.TABLE}
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
OURS: Final = ("front", "worker", "worker-cpu", "worker-gpu")
DOCKERFILE: Final = (ROOT / "configs/docker/Dockerfile").read_text()


def _seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_every_variable_in_the_deployment_files_is_a_setting() -> None:
    files = [ROOT / "docker-compose.yml", *(path for path in (ROOT / "configs").rglob("*") if path.is_file())]
    found = {name for path in files for name in re.findall(r"DS4_SERVER_[A-Z0-9_]+", path.read_text())}
    assert found
    assert found <= VARIABLES


@pytest.mark.parametrize("name", OURS)
def test_the_settings_of_a_service_are_valid(name: str) -> None:
    environment = SERVICES[name]["environment"]
    assert all(isinstance(value, str) for value in environment.values()), "YAML made a number of a setting"
    settings = config.load_settings([], environment)
    assert settings.shared_dir == "/run/ds4-server"


def test_every_path_that_compose_mounts_or_reads_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0] if isinstance(volume, str) else volume["source"]
            if source.startswith("./"):
                assert (ROOT / source).exists(), f"{name}: {source}"
            elif not source.startswith("${"):
                assert source in COMPOSE["volumes"], f"{name}: {source}"
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", OURS)
def test_ring_and_model_are_shared_the_same_way(name: str) -> None:
    ring, model = SERVICES[name]["volumes"]
    assert ring == "ring:/run/ds4-server"
    assert model["read_only"] is True
    assert model["target"] == SERVICES[name]["environment"]["DS4_SERVER_MODEL"]
    assert COMPOSE["volumes"]["ring"]["driver_opts"]["type"] == "tmpfs"


@pytest.mark.parametrize("name", OURS)
def test_docker_kills_only_after_the_drain(name: str) -> None:
    drain = int(SERVICES[name]["environment"]["DS4_SERVER_DRAIN_TIMEOUT_S"])
    assert _seconds(SERVICES[name]["stop_grace_period"]) > drain
    assert _seconds(SERVICES["nginx"]["stop_grace_period"]) > drain


def test_every_service_of_the_main_path_has_a_health_check() -> None:
    assert all("healthcheck" in SERVICES[name] for name in ("nginx", *OURS))


def test_profiles_leave_the_plain_start_complete() -> None:
    plain = {name for name, service in SERVICES.items() if not service.get("profiles")}
    assert plain == {"nginx", "front", "worker"}
    assert SERVICES["worker-cpu"]["profiles"] == ["cpu"]
    assert SERVICES["worker-gpu"]["profiles"] == ["gpu"]


def test_the_gpu_worker_asks_for_one_gpu_and_has_what_the_device_imports() -> None:
    (reserved,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert not any("deploy" in SERVICES[name] for name in ("worker", "worker-cpu"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (default,) = re.findall(r"^ARG CUDA=(\d+)$", DOCKERFILE, re.MULTILINE)
    assert SERVICES["worker-gpu"]["build"]["args"]["CUDA"] == f"${{CUDA:-{default}}}"
    assert '".[cpu,cuda${CUDA}]"' in DOCKERFILE
    for version in ("12", default):
        assert any(package.startswith(f"cupy-cuda{version}x") for package in extras[f"cuda{version}"])
    final = DOCKERFILE[DOCKERFILE.index(" AS worker-gpu") :]
    assert "COPY --from=build-gpu /opt/ds4 /opt/ds4" in final
    assert "DS4_SERVER_DEVICE=cuda" in final


def test_build_targets_exist_and_run_unprivileged_as_the_owner_of_the_ring() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for name in OURS:
        assert SERVICES[name]["build"]["target"] in targets
    uid = re.search(r"useradd --uid (\d+)", DOCKERFILE)
    assert uid
    assert f"uid={uid[1]}," in COMPOSE["volumes"]["ring"]["driver_opts"]["o"]
    assert DOCKERFILE.index("\nUSER ds4") < DOCKERFILE.index(" AS front")
    assert "USER root" not in DOCKERFILE


def test_what_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in allowed, source


def test_nginx_finds_the_front_ends_and_holds_nothing_back() -> None:
    upstream = (ROOT / "configs/nginx/docker-upstream.conf").read_text()
    server = (ROOT / "configs/nginx/ds4-server.conf").read_text()
    port = SERVICES["front"]["environment"]["DS4_SERVER_PORT"]
    assert f"server front:{port} resolve" in upstream
    assert re.search(r"^upstream (\S+)", upstream, re.MULTILINE)[1] in server  # type: ignore[index]
    assert "proxy_buffering off;" in server
    assert "proxy_next_upstream error timeout;" in server, "a POST that was sent is never repeated"
    published = SERVICES["nginx"]["ports"][0].rpartition(":")[2]
    assert f"listen {published};" in server


def test_dashboards_ask_only_for_metrics_that_exist() -> None:
    known = {metric.name for metric in metrics.TABLE}
    known |= {
        f"{metric.name}{part}"
        for metric in metrics.TABLE
        if metric.kind == "histogram"
        for part in ("_bucket", "_sum", "_count")
    }
    dashboards = list((ROOT / "configs/grafana/dashboards").glob("*.json"))
    assert dashboards
    for path in dashboards:
        board = json.loads(path.read_text())
        asked = {
            name
            for panel in board["panels"]
            for target in panel["targets"]
            for name in re.findall(r"ds4_\w+", target["expr"])
        }
        assert asked
        assert asked <= known


def test_prometheus_scrapes_one_place_that_reports_all_processes() -> None:
    scrape = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in SERVICES
