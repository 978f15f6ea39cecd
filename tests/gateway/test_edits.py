"""Random conversations, grown and cut over HTTP, against a model of plain dictionaries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gateway.serving import Server

pytestmark = pytest.mark.slow

Json = dict[str, Any]
PATH = "/v1/responses"


@dataclass
class Modelled:
    """The expected conversation: parent and text of each message, messages of each response."""

    parents: dict[str, str | None] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    locations: dict[str, str | None] = field(default_factory=dict)  # of responses: what their outputs hang under
    made: dict[str, list[str]] = field(default_factory=dict)
    inputs: dict[str, list[str]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def put(self, item: str, parent: str | None, text: str) -> None:
        self.parents[item], self.texts[item] = parent, text

    def path(self, item: str | None) -> list[str]:
        found = []
        while item is not None:
            found.append(self.texts[item])
            item = self.parents[item]
        return found[::-1]

    def cut(self, item: str) -> None:
        """A message goes; what stood on it stands on what it stood on."""
        above = self.parents.pop(item)
        self.parents = {each: above if parent == item else parent for each, parent in self.parents.items()}
        self.locations = {each: above if location == item else location for each, location in self.locations.items()}

    def drop(self, response: str) -> None:
        """A response goes, and those of its messages that nothing stands on."""
        self.deleted.add(response)
        for item in [*self.made[response], *reversed(self.inputs[response])]:
            if item not in self.parents or item in self.parents.values():
                continue
            others = (location for each, location in self.locations.items() if each != response)
            if item not in others:
                del self.parents[item]
        if not any(item in self.parents for item in self.made[response]):
            del self.locations[response]


def answer(server: Server, model: Modelled, draws: random.Random, conversation: str) -> None:
    parent = draws.choice([None, *model.parents])
    count = draws.choice([1, 1, 2])
    text = f"question {draws.random()}"
    body: Json = {"previous_item_id": parent or "root", "conversation": conversation, "n": count}
    status, _, response = server.post(PATH, input=text, max_output_tokens=draws.randrange(1, 9), **body)
    assert status == 200, response
    (question,) = response["input_item_ids"]
    model.put(question, parent, text)
    for item in response["output"]:
        model.put(item["id"], question, item["content"][0]["text"])
    model.locations[response["id"]] = question
    model.inputs[response["id"]] = [question]
    model.made[response["id"]] = [item["id"] for item in response["output"]]


def add(server: Server, model: Modelled, draws: random.Random, conversation: str) -> None:
    parent = draws.choice([None, *model.parents])
    texts = [f"said {draws.random()}" for _ in range(draws.randrange(1, 4))]
    items = [{"role": draws.choice(["user", "assistant"]), "content": text} for text in texts]
    path = f"/v1/conversations/{conversation}/items"
    status, _, page = server.post(path, items=items, parent_id=parent or "root")
    assert status == 200, page
    for item, text in zip(page["data"], texts, strict=True):
        model.put(item["id"], parent, text)
        parent = item["id"]


def cut(server: Server, model: Modelled, draws: random.Random, conversation: str) -> None:
    if model.parents:
        item = draws.choice(list(model.parents))
        assert server.request("DELETE", f"/v1/conversations/{conversation}/items/{item}")[0] == 200
        model.cut(item)


def drop(server: Server, model: Modelled, draws: random.Random, conversation: str) -> None:
    left = [each for each in model.made if each not in model.deleted]
    if left:
        response = draws.choice(left)
        assert server.request("DELETE", f"{PATH}/{response}")[0] == 200
        model.drop(response)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_random_edits_over_http_equal_a_dictionary_model(server: Server, seed: int) -> None:
    draws, model = random.Random(seed), Modelled()
    conversation: str = server.post("/v1/conversations")[2]["id"]
    for _ in range(30):
        draws.choice([answer, answer, answer, add, cut, drop])(server, model, draws, conversation)
        path = f"/v1/conversations/{conversation}/items"
        items = server.request("GET", f"{path}?branches=all")[2]["data"]
        assert {item["id"]: item["parent_id"] for item in items} == model.parents
        head = server.request("GET", f"/v1/conversations/{conversation}")[2]
        assert head["active_leaf"] in (None, *model.parents)
        if model.parents:
            leaf = draws.choice(list(model.parents))
            along = server.request("GET", f"{path}?order=asc&limit=100&leaf={leaf}")[2]["data"]
            assert [item["content"][0]["text"] for item in along] == model.path(leaf)
            counted = server.post(f"{PATH}/input_tokens", previous_item_id=leaf, input="x")
            assert counted[0] == 200 and counted[2]["input_tokens"] > 0
    for response in model.made:
        status = server.request("GET", f"{PATH}/{response}")[0]
        assert status == (404 if response in model.deleted else 200)
        after = server.post(f"{PATH}/input_tokens", previous_response_id=response, input="x")
        assert after[0] == status, after
