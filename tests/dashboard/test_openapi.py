"""The OpenAPI document: valid, complete, and what the routes really do."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from dashboard.http import KEY_HEADER
from tests.dashboard.fixtures_fleet import tell_fleet
from tests.dashboard.web_kit import API_KEY, Web


@pytest.fixture
def document(web: Web) -> dict[str, Any]:
    tell_fleet(web)
    found: dict[str, Any] = web.get("/openapi.json")
    return found


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    assert document["info"]["title"] == "Kakeya Inference Network"


def test_it_has_every_route_and_no_other(web: Web, document: dict[str, Any]) -> None:
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in web.app.url_map.iter_rules()
        for method in rule.methods or ()
        if method != "HEAD"
    }
    assert documented == served


def test_answers_fit_their_schemas(web: Web, document: dict[str, Any]) -> None:
    run = web.post("/v1/network/benchmarks", {}).json["id"]
    checked = 0
    for path, methods in document["paths"].items():
        content = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is None or "capture" in path:
            continue
        body = web.get(path.replace("{run_id}", run), key=API_KEY)
        jsonschema.validate(body, {**schema, "components": document["components"]})
        checked += 1
    assert checked > 18


def test_writes_name_the_key_and_their_errors(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["apiKey"]["name"] == KEY_HEADER
    register = document["paths"]["/v1/network/nodes/register"]["post"]
    assert register["security"] == [{"apiKey": []}]
    assert {"200", "400", "401", "403", "413", "422"} <= register["responses"].keys()
    redeem = document["paths"]["/v1/network/nodes/register/redeem"]["post"]
    assert "security" not in redeem
    listed = document["paths"]["/v1/network/benchmarks"]["get"]
    assert {parameter["name"] for parameter in listed["parameters"]} == {"limit", "status"}
