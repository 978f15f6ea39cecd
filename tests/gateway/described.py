"""The OpenAPI document as an oracle of real responses; undescribed fields are errors."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def strict(schema: Any) -> Any:
    """The same schema, its objects closed."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    return closed


class Described:
    """Checks responses and events against the document."""

    def __init__(self, document: Schema) -> None:
        self.document = document
        self.components: Schema = {"schemas": strict(document["components"]["schemas"])}

    def operation(self, method: str, path: str) -> Schema:
        """The operation that a real path belongs to; literal paths win over templates."""
        segments = path.partition("?")[0].split("/")
        templates = sorted(self.document["paths"], key=lambda each: (-each.count("/"), each.count("{")))
        found = next(template for template in templates if _matches(template.split("/"), segments))
        operation: Schema = self.document["paths"][found][method.lower()]
        return operation

    def check(self, method: str, path: str, status: int, answer: object, media_type: str = "application/json") -> None:
        """Check that the document allows this response. Raises: AssertionError."""
        responses = self.operation(method, path)["responses"]
        assert str(status) in responses, (
            f"{method} {path}: status {status} is not described in chatcache/gateway/routes.py"
        )
        response = responses[str(status)]
        if "$ref" in response:
            response = self.document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        self.fits(answer, response["content"][media_type]["schema"], f"{method} {path}")

    def check_event(self, method: str, path: str, event: object) -> None:
        content = self.operation(method, path)["responses"]["200"]["content"]["text/event-stream"]
        data = content["schema"]["properties"]["data"]["anyOf"][0]
        self.fits(event, data["contentSchema"], f"an event of {method} {path}")

    def fits(self, value: object, schema: Schema, what: str) -> None:
        whole = {**strict(schema), "components": self.components}
        errors = sorted(Draft202012Validator(whole).iter_errors(value), key=lambda error: len(error.path))
        assert not errors, (
            f"{what} is not as openapi.json says: {errors[0].json_path}: {errors[0].message}\n"
            "If the answer is right, describe it: the types are in chatcache/gateway/schemas/responses.py"
        )


def _matches(wanted: list[str], segments: list[str]) -> bool:
    """Whether a path matches a template; an id at the end may contain slashes."""
    if len(segments) > len(wanted) and wanted[-1].startswith("{"):
        segments = segments[: len(wanted)]
    return len(wanted) == len(segments) and all(
        want == have or want.startswith("{") for want, have in zip(wanted, segments, strict=True)
    )
