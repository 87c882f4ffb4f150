"""What a document of the Agent Trajectory Interchange Format is: a JSON schema, and the rules that
no schema can say. And the way back from one of ours to its rollout.

Written from the facts of the format that the models of Harbor's package 0.26.0 state
(harbor/models/trajectories), without what they say that version 1.8 added.
"""

from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np

from jaxrl.pool.atif import KINDS
from jaxrl.pool.records import read_facts
from jaxrl.pool.rollout import NOT_SAMPLED, TYPES, Rollout

TEXT, COUNT, FREE = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
IDS = {"type": "array", "items": {"type": "integer"}}
NUMBERS = {"type": "array", "items": {"type": "number"}}

AGENTS_ALONE = (
    *("model_name", "reasoning_effort", "reasoning_content"),
    *("tool_calls", "metrics"),
)


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def many(name: str, least: int = 0) -> dict[str, Any]:
    """An array of a definition."""
    return {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": least}


IMAGE = record(
    ("media_type", "path"),
    media_type={"enum": ["image/jpeg", "image/png", "image/gif", "image/webp"]},
    path=TEXT,
)
CONTENT = {
    "anyOf": [
        TEXT,
        {
            "type": "array",
            "items": {
                "oneOf": [
                    record(("type", "text"), type={"const": "text"}, text=TEXT),
                    record(("type", "source"), type={"const": "image"}, source=IMAGE),
                ]
            },
        },
    ]
}

DEFINITIONS = {
    "agent": record(
        ("name", "version"),
        name=TEXT,
        version=TEXT,
        model_name=TEXT,
        tool_definitions={"type": "array", "items": FREE},
        extra=FREE,
    ),
    "step": record(
        ("step_id", "source", "message"),
        step_id={"type": "integer", "minimum": 1},
        timestamp={"type": "string", "format": "date-time"},
        source={"enum": ["system", "user", "agent"]},
        model_name=TEXT,
        reasoning_effort={"type": ["string", "number"]},
        message=CONTENT,
        reasoning_content=TEXT,
        tool_calls=many("tool_call"),
        observation=record(("results",), results=many("result")),
        metrics={"$ref": "#/$defs/metrics"},
        is_copied_context={"type": "boolean"},
        llm_call_count=COUNT,
        extra=FREE,
    )
    | {
        "allOf": [
            {
                "if": {"properties": {"source": {"enum": ["system", "user"]}}},
                "then": {"properties": dict.fromkeys(AGENTS_ALONE, False)},
            },
            {  # an agent's step without a model
                "if": {
                    "properties": {"source": {"const": "agent"}, "llm_call_count": {"const": 0}},
                    "required": ["llm_call_count"],
                },
                "then": {"properties": {"metrics": False, "reasoning_content": False}},
            },
        ]
    },
    "tool_call": record(
        ("tool_call_id", "function_name", "arguments"),
        tool_call_id=TEXT,
        function_name=TEXT,
        arguments=FREE,
        extra=FREE,
    ),
    "result": record(
        source_call_id=TEXT,
        content=CONTENT,
        subagent_trajectory_ref=many("reference"),
        extra=FREE,
    ),
    "reference": record(trajectory_id=TEXT, session_id=TEXT, trajectory_path=TEXT, extra=FREE)
    | {"anyOf": [{"required": ["trajectory_id"]}, {"required": ["trajectory_path"]}]},
    "metrics": record(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        cached_tokens=COUNT,
        cost_usd={"type": "number"},
        prompt_token_ids=IDS,
        completion_token_ids=IDS,
        logprobs=NUMBERS,
        extra=FREE,
    ),
    "trajectory": record(
        ("schema_version", "agent", "steps"),
        schema_version={"const": "ATIF-v1.7"},
        session_id=TEXT,
        trajectory_id=TEXT,
        agent={"$ref": "#/$defs/agent"},
        steps=many("step", least=1),
        notes=TEXT,
        final_metrics=record(
            total_prompt_tokens=COUNT,
            total_completion_tokens=COUNT,
            total_cached_tokens=COUNT,
            total_cost_usd={"type": "number"},
            total_steps=COUNT,
            extra=FREE,
        ),
        continued_trajectory_ref=TEXT,
        extra=FREE,
        subagent_trajectories={
            "type": "array",
            "items": {"allOf": [{"$ref": "#/$defs/trajectory"}, {"required": ["trajectory_id"]}]},
        },
    ),
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$ref": "#/$defs/trajectory",
    "$defs": DEFINITIONS,
}
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def check(document: Mapping[str, Any]) -> None:
    """Refuse what is no document of the format: ValidationError or AssertionError."""
    VALIDATOR.validate(document)
    branches = document.get("subagent_trajectories", [])
    names = [branch["trajectory_id"] for branch in branches]
    assert len(set(names)) == len(names), names
    for one in (document, *branches):
        steps = one["steps"]
        assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
        if (stated := one.get("final_metrics", {}).get("total_steps", len(steps))) != len(steps):
            assert one.get("notes"), stated
        for step in steps:
            calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
            for result in step.get("observation", {"results": ()})["results"]:
                assert result.get("source_call_id") in (None, *calls)


def pieces(trajectory: Mapping[str, Any]) -> list[tuple[list[int], Mapping[str, Any], Any]]:
    """Ids of each step and result in order, what is said of them, and their log-probs."""
    found = []
    for step in trajectory["steps"]:
        metrics = step.get("metrics")
        if metrics is None:
            found.append((step["extra"]["token_ids"], step["extra"], step["extra"].get("logp")))
        else:
            own = metrics.get("extra", {})
            logp = metrics.get("logprobs", own.get("logp"))
            before = [token for ids, _, _ in found for token in ids]
            assert metrics["prompt_token_ids"] == before
            assert metrics["prompt_tokens"] == len(before)
            assert metrics["completion_tokens"] == len(metrics["completion_token_ids"])
            found.append((metrics["completion_token_ids"], step["extra"] | own, logp))
        for result in step.get("observation", {"results": ()})["results"]:
            own = result["extra"]
            found.append((own["token_ids"], own, own.get("logp")))
    return found


def rebuilt(trajectory: Mapping[str, Any]) -> Rollout:
    """The rollout that a trajectory was made of, from nothing else."""
    columns: dict[str, list[Any]] = {name: [] for name in TYPES}
    for ids, own, logp in pieces(trajectory):
        count = len(ids)
        index = own.get("version_index", [None] * count)
        columns["tokens"] += ids
        columns["kind"] += [KINDS.index(own["kind"])] * count
        columns["step"] += [own["step"]] * count
        columns["logp"] += logp or [0.0] * count
        columns["version_index"] += [NOT_SAMPLED if one is None else one for one in index]
        columns["temperature"] += own.get("temperature", [1.0] * count)
    header = dict(trajectory["extra"])
    header["versions"] = [
        (one["epoch"], one["step"], one["digest"]) for one in header.pop("versions")
    ]
    header["facts"] = read_facts(header["facts"])
    arrays = {name: np.array(columns[name], dtype) for name, dtype in TYPES.items()}
    return Rollout.from_header(header, arrays)
