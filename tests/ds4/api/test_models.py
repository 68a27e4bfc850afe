"""ds4/api/models.py: the names the model answers to."""

from pathlib import Path

from tests.support.front_rig import Front, with_front


def test_without_an_alias_the_file_gives_the_name(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        listed = (await front.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert card["id"] == "tiny"
        assert card["object"] == "model"
        assert card["context_length"] == card["max_model_len"] == card["max_completion_tokens"] == 512
        assert card["created"] == int((tmp_path / "tiny.gguf").stat().st_mtime)  # in every front end
        assert (await front.client.get("/v1/models/tiny")).json() == card

    with_front(tmp_path, scenario, None)


def test_every_alias_is_listed_and_found_and_others_are_not(tmp_path: Path) -> None:
    async def scenario(front: Front) -> None:
        listed = (await front.client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["org/model", "small"]
        assert (await front.client.get("/v1/models/org/model")).json()["id"] == "org/model"
        response = await front.client.get("/v1/models/tiny")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"

    with_front(tmp_path, scenario, None, model_alias="org/model, small")
