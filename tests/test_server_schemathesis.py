"""The OpenAPI document against the server: whatever fits it or just fails to, the replies do."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from products import num_examples
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from served import SETTINGS, ReadyBackend, demo_runtime

from oled_moe.config import SamplingParams
from oled_moe.server import ServerSettings, create_app

OPERATIONS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
    "GET /experts",
)
# A request that fits its schema may still ask for what only the model can refuse: a longer context,
# tools without a template for them, a schema that is no schema.
UNCHECKED = {"positive_data_acceptance"}


@pytest.fixture(scope="module")
def operations() -> Iterator[dict[str, Any]]:
    # Short answers: the shape of replies is what matters.
    defaults = SamplingParams(max_tokens=4)
    with demo_runtime() as runtime:
        served = ServerSettings(SETTINGS.served_names, defaults=defaults)
        schema = schemathesis.openapi.from_asgi(
            "/openapi.json", create_app(ReadyBackend(runtime), served)
        )
        found = [result.ok() for result in schema.get_all_operations()]
        yield {operation.label: operation for operation in found}


def test_every_operation_is_tried(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


# Nothing can be wrong about a request that says nothing; any text may be a model's name.
WITH_BODY = [label for label in OPERATIONS if label.startswith("POST")]


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        *((label, GenerationMode.NEGATIVE) for label in WITH_BODY),
    ],
)
def test_replies_are_as_described(
    operations: dict[str, Any], label: str, mode: GenerationMode
) -> None:
    checks = [check for check in CHECKS.get_all() if check.__name__ not in UNCHECKED]

    @given(case=operations[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples(30 if label in WITH_BODY else 3),
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(checks=checks)

    check()
